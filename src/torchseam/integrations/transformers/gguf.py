"""GGUF files: is this one whole, what does it say about itself, and its weights as a Hugging Face directory.

Not a GGUF runtime: the weights are unpacked once (by transformers) and the quantised blocks are forgotten.
The header is read here and not with `gguf.GGUFReader`, which takes 8 s for the 262144 tokens of Gemma 3
(gguf 0.19 on two CPU cores); this takes 0.3 s.
"""

from __future__ import annotations

import importlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torchseam.integrations.transformers.files import ModelError

MAGIC = b"GGUF"
# The versions with 64-bit counts, little-endian: all that llama.cpp has written since October 2023.
VERSIONS = (2, 3)
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: value types, in the file's own numbering.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
# ggml knows four dimensions; more is a damaged header.
_MAX_DIMENSIONS = 4


def import_extra(name: str) -> ModuleType:
    """The module `name` of the optional extra `transformers`; ModelError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            f"running a model needs the Python package {name!r}, which cannot be imported ({error}). "
            "Install it: pip install torchseam[transformers]"
        ) from error


class _Cursor:
    """A place in the bytes of a file, moved on by each read; struct.error past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def many(self, code: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return values

    def one(self, code: str) -> Any:
        return self.many(code)[0]

    def string(self) -> str:
        length = self.one("Q")
        raw = self.data[self.at : self.at + length]
        if len(raw) != length:
            raise struct.error("a string runs past the end of the file")
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.one("I"), self.one("Q")
            if element in _SCALARS:
                return list(self.many(_SCALARS[element], count))
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind} does not exist")
        return self.one(_SCALARS[kind])


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], list[_Tensor], int]:
    """(metadata, tensors, where the tensor data starts)."""
    cursor = _Cursor(data)
    cursor.at = len(MAGIC) + struct.calcsize("<I")
    tensor_count, value_count = cursor.many("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.one("I"))
    tensors = []
    for _ in range(tensor_count):
        name, dimensions = cursor.string(), cursor.one("I")
        if dimensions > _MAX_DIMENSIONS:
            raise struct.error(f"tensor {name!r} has {dimensions} dimensions")
        tensors.append(_Tensor(name, cursor.many("Q", dimensions), *cursor.many("I"), *cursor.many("Q")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise struct.error(f"general.alignment is {alignment!r}")
    return metadata, tensors, -(-cursor.at // alignment) * alignment


def _tensor_bytes(path: Path, tensor: _Tensor) -> int:
    gguf = import_extra("gguf")
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{path}: tensor {tensor.name!r} has the GGML type {tensor.kind}, which the installed gguf "
            "package does not know. Run pip install --upgrade gguf, or take the model as Q4_K_M or Q8_0"
        ) from error
    elements = 1
    for dimension in tensor.shape:
        elements *= dimension
    return elements // block * block_bytes


def check_magic(path: Path) -> None:
    """ModelError unless `path` starts as a GGUF file of a version that we read. Reads 8 bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}). Give a .gguf file that you may read") from error
    if not start.startswith(MAGIC):
        raise ModelError(
            f"{path} is not a GGUF file: it starts with {start[:4]!r}, not {MAGIC!r}. Give a .gguf file, "
            "or a directory with config.json and *.safetensors"
        )
    if len(start) < 8:
        raise ModelError(f"{path} is truncated: it has {len(start)} bytes. Copy or download the file again")
    version = int.from_bytes(start[4:], "little")
    if version not in VERSIONS:
        raise ModelError(
            f"{path} is GGUF version {version} (read as little-endian); versions {VERSIONS} are supported. "
            "Convert the model again with a current llama.cpp"
        )


def check_gguf(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file that is whole: header readable, every tensor inside the file.

    Raises ModelError for a file that is not GGUF, is truncated, holds no weights, or is one part of several.
    """
    check_magic(path)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            metadata, tensors, start = _read_header(data)
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, RecursionError) as error:
            raise ModelError(
                f"{path} is truncated or damaged: its {size} bytes do not hold a whole header ({error}). "
                "Copy or download the file again"
            ) from error
    if not tensors:
        raise ModelError(f"{path} holds a vocabulary but no weights. Give the GGUF file of the whole model")
    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise ModelError(
            f"{path} is one of {parts} parts of a model; one whole file is needed. "
            "Join them first: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    for tensor in tensors:
        end = start + tensor.offset + _tensor_bytes(path, tensor)
        if end > size:
            raise ModelError(
                f"{path} is truncated: tensor {tensor.name!r} ends at byte {end}, and the file has {size} "
                "bytes. Copy or download the file again"
            )
    return metadata


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Silence the bars of transformers: its own, and the one its GGUF loader takes straight from tqdm."""
    bars: Any = import_extra("transformers").utils.logging
    loader: Any = None
    with suppress(ImportError):
        loader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    shown, tqdm = bars.is_progress_bar_enabled(), getattr(loader, "tqdm", None)
    bars.disable_progress_bar()
    if tqdm is not None:
        loader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        if tqdm is not None:
            loader.tqdm = tqdm
        if shown:
            bars.enable_progress_bar()


def convert_gguf(path: Path, out_dir: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the weights of `path`, unpacked to `dtype`, and the configuration into `out_dir` (which exists).

    Leaves config.json, generation_config.json and model.safetensors (or shards with an index) there.
    Raises ModelError for a file that is damaged, of an architecture that transformers cannot read, or
    without some of the weights that its architecture has.
    """
    metadata = check_gguf(path)
    architecture = metadata.get("general.architecture")
    import_extra("accelerate")  # transformers asks for it, with an error that does not name our extra
    transformers = import_extra("transformers")
    # Alone in a directory: transformers would read an adapter or a generation config that lies next to it.
    with tempfile.TemporaryDirectory(prefix="torchseam-gguf-") as alone, _no_progress_bars():
        os.symlink(path.resolve(), Path(alone) / "model.gguf")
        try:
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                alone,
                gguf_file="model.gguf",
                dtype=dtype,
                # Otherwise transformers looks on the network for kernels that run the packed blocks.
                quantization_config=transformers.GgufConfig(dequantize=True),
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:
            raise ModelError(
                f"transformers {transformers.__version__} cannot read {path} (architecture "
                f"{architecture!r}): {error}. Give a Hugging Face directory of the same model, or a GGUF "
                "file of an architecture that transformers reads (llama, qwen2, qwen3, gemma3, ...)"
            ) from error
        if loading["missing_keys"]:
            missing = sorted(loading["missing_keys"])
            raise ModelError(
                f"{path} lacks {len(missing)} of the weights that its architecture {architecture!r} has "
                f"(first: {missing[0]!r}). Give a GGUF file of the whole model"
            )
        # The weights are plain now; with these marks left, save_pretrained refuses to write them.
        model.hf_quantizer = None
        model.is_quantized = False
        model.quantization_method = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        # A chat model ends its turn with a token of its own, which transformers does not take over.
        ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        if eos_ids := list(dict.fromkeys(i for i in ends if i is not None)):
            model.generation_config.eos_token_id = eos_ids
        try:
            model.save_pretrained(out_dir)
        except Exception as error:  # safetensors has its own for a full disk
            raise ModelError(
                f"the weights of {path} cannot be written to {out_dir} ({error}). "
                "Make room there, or set TORCHSEAM_CACHE to a directory with room for the model in bfloat16"
            ) from error
