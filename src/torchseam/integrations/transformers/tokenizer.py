"""Text to token ids and back, for the two kinds of model that `store` opens.

A GGUF's vocabulary becomes a sentencepiece model: transformers 5.17 turns Gemma's into one that knows only
single letters and forgets the BOS. No chat templates here, and control tokens in the text stay text.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchseam.integrations.transformers.files import ModelError, ModelFiles
from torchseam.integrations.transformers.gguf import check_gguf, import_extra

SENTENCEPIECE_FILE = "tokenizer.model"
SETTINGS_FILE = "tokenizer_config.json"
# GGUF and sentencepiece number the kinds of token alike: 1 normal, 2 unknown, 3 control, 4 user-defined,
# 5 unused, 6 byte.
_KINDS = range(1, 7)
_UNKNOWN, _USER_DEFINED, _BYTE = 2, 4, 6
# Sentencepiece writes a space inside a piece as U+2581.
_SPACE_MARK = "\u2581"
_BPE = 2
# What holds a vocabulary. Without any of these transformers makes an empty tokenizer and says nothing.
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


class Tokenizer(Protocol):
    """What the demo asks of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text; empty when the model names none."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with the BOS first if the model wants one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without BOS, EOS and other control tokens."""
        ...


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: int | float | str | bytes) -> bytes:
    """One protobuf field. By hand, because sentencepiece's generated Python asks for a protobuf runtime
    as new as itself (7.36 for sentencepiece 0.2.3), which other packages of a serving machine forbid."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, str):
        value = value.encode("utf-8")
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _vocabulary(path: Path, metadata: dict[str, Any]) -> tuple[list[str], list[float], list[int]]:
    """(pieces, scores, kinds) of a sentencepiece vocabulary in a GGUF file."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "llama":
        raise ModelError(
            f"{path} has a tokenizer of the kind {model!r}; of GGUF files only 'llama' (sentencepiece, as in "
            "Gemma, Llama 2, Mistral) is supported. Give a Hugging Face directory of the same model"
        )
    lists = [metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type")]
    if not all(lists) or len({len(values) for values in lists if values}) != 1:
        sizes = [len(values) if values else "missing" for values in lists]
        raise ModelError(
            f"{path}: tokens, scores and token types must be there and of one length; they have {sizes}. "
            "Convert the model again with a current llama.cpp"
        )
    pieces, scores, kinds = (list(values) for values in lists if values)
    if strange := set(kinds) - set(_KINDS):
        raise ModelError(
            f"{path}: token types {sorted(strange)} are none of sentencepiece's (1 to 6). "
            "Convert the model again with a current llama.cpp"
        )
    # llama.cpp's converter marks every token that looks special as control, Gemma's <unk> too.
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    if _UNKNOWN not in kinds and unknown_id is not None and unknown_id < len(kinds):
        kinds[unknown_id] = _UNKNOWN
    # llama.cpp writes user-defined tokens with plain spaces, sentencepiece matches them with its mark.
    pieces = [
        piece.replace(" ", _SPACE_MARK) if kind == _USER_DEFINED else piece
        for piece, kind in zip(pieces, kinds, strict=True)
    ]
    return pieces, scores, kinds


def build_sentencepiece(gguf_path: Path) -> bytes:
    """A serialised sentencepiece ModelProto with the tokens of a GGUF file, id for id.

    BPE with byte fallback, which is how llama.cpp runs a 'llama' vocabulary (merges in the order of the
    scores); text is taken as it is, but for the leading space that the GGUF may ask for. Field numbers:
    https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
    """
    metadata = check_gguf(gguf_path)
    pieces, scores, kinds = _vocabulary(gguf_path, metadata)
    entries = (
        _field(1, _field(1, piece) + _field(2, float(score)) + _field(3, kind))
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
    )
    trainer = [_field(3, _BPE), _field(4, len(pieces)), _field(35, int(_BYTE in kinds))]
    # Each special token twice: its id, and five numbers on its text.
    for name, number in (("unknown", 40), ("bos", 41), ("eos", 42), ("padding", 43)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(pieces):
            trainer += [_field(number, token_id), _field(number + 5, pieces[token_id])]
    add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)  # llama.cpp's default
    # identity; no dummy prefix unless asked for; keep all spaces; write them as U+2581
    normalizer = _field(1, "identity") + _field(3, int(add_prefix)) + _field(4, 0) + _field(5, 1)
    proto = b"".join(entries) + _field(2, b"".join(trainer)) + _field(3, normalizer)
    _load_sentencepiece(proto, gguf_path)
    return proto


def gguf_tokenizer_settings(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a ModelProto cannot say: if text begins with a BOS (llama.cpp's default: yes), and which."""
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", True)) and bos_id is not None
    return {"add_bos_token": add_bos, "bos_token_id": bos_id}


def _load_sentencepiece(proto: bytes, source: Path) -> Any:
    sentencepiece = import_extra("sentencepiece")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=proto)
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{source}: sentencepiece refuses the vocabulary ({error}). Give a Hugging Face directory of the same model"
        ) from error


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """`processor` with the BOS in front where `bos_id` is not None."""

    processor: Any
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.processor.encode(text)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.processor.decode([int(i) for i in ids]))


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A transformers tokenizer, special tokens as its own configuration says."""

    tokenizer: Any
    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer(text)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def _eos_ids(directory: Path, own: int | None = None) -> tuple[int, ...]:
    """Every id that ends a text: those of generation_config.json (config.json without one), and `own`."""
    found: Iterable[int] = ()
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if value is not None:
            found = value if isinstance(value, list) else (value,)
            break
    return tuple(dict.fromkeys([*found, *(() if own is None else (own,))]))


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of an opened model; ModelError when its directory has none that can be loaded."""
    if files.tokenizer == "gguf":
        try:
            settings = json.loads((files.directory / SETTINGS_FILE).read_text(encoding="utf-8"))
            bos_id = settings["bos_token_id"] if settings["add_bos_token"] else None
            proto = (files.directory / SENTENCEPIECE_FILE).read_bytes()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"the converted tokenizer in {files.directory} cannot be read ({error!r}). Name the GGUF "
                "file again instead of this directory: a damaged conversion is then made anew"
            ) from error
        processor = _load_sentencepiece(proto, files.source)
        return SentencePieceTokenizer(processor, bos_id, _eos_ids(files.directory))
    transformers = import_extra("transformers")
    if not any((files.directory / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelError(
            f"{files.directory} has no tokenizer: none of {', '.join(_VOCABULARY_FILES)} is there. "
            "Copy the tokenizer files of the model into it"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(files.directory, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot load the tokenizer in {files.directory}: "
            f"{error}. Copy the tokenizer files of the model into it again"
        ) from error
    return HuggingFaceTokenizer(tokenizer, _eos_ids(files.directory, tokenizer.eos_token_id))
