"""Tokenizers: the GGUF vocabulary as sentencepiece, id for id, and Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gguf import tiny_vocabulary, write_tiny_gguf

from torchseam.integrations.transformers import store
from torchseam.integrations.transformers.files import ModelError, ModelFiles
from torchseam.integrations.transformers.store import default_model, open_model
from torchseam.integrations.transformers.tokenizer import build_sentencepiece, load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="needs torchseam[transformers]")
transformers = pytest.importorskip("transformers", reason="needs torchseam[transformers]")

ROUND_TRIPS = [
    "",
    " ",
    "  a",
    "a  ",
    " leading and trailing ",
    "a\n\nb\n",
    "\t\tx\r\n  y",
    "héllo wörld",
    "日本語 🎉 👩\u200d👩\u200d👧",
    "\x00\x01\x7f",
    "\U00013000 \U0010ffff",
    "e\u0301 \ufb01 ½ Å",  # not normalised
    "def f(x):\n    return  x\n\n\n",
    "<s></s><unk><tag><bos><eos>",
    " " * 100 + "\n" * 100,
]


def ids_of(*tokens: str) -> list[int]:
    vocabulary = tiny_vocabulary()[0]
    return [vocabulary.index(token) for token in tokens]


def processor(path: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=build_sentencepiece(path))


def tiny(path: Path, **settings: Any) -> Any:
    write_tiny_gguf(path, **settings)
    return processor(path)


@pytest.fixture
def plain(tmp_path: Path) -> Any:
    return tiny(tmp_path / "tiny.gguf", add_space_prefix=False)


def test_every_token_keeps_its_id_and_kind(plain: Any) -> None:
    tokens, scores, _ = tiny_vocabulary()
    assert [plain.id_to_piece(i) for i in range(plain.get_piece_size())] == [
        "▁▁" if token == "  " else token for token in tokens
    ]
    assert [plain.get_score(i) for i in range(len(tokens))] == scores
    assert (plain.unk_id(), plain.bos_id(), plain.eos_id()) == (0, 1, 2)
    assert all(plain.is_byte(i) == (4 <= i < 260) for i in range(len(tokens)))


def test_an_unknown_token_marked_as_control_is_still_the_unknown_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Gemma's GGUF files."""
    tokens, scores, kinds = tiny_vocabulary()
    monkeypatch.setattr("test_gguf.tiny_vocabulary", lambda: (tokens, scores, [3, *kinds[1:]]))
    assert tiny(tmp_path / "tiny.gguf").unk_id() == 0


def test_merges_follow_the_scores(plain: Any) -> None:
    assert plain.encode("ab ab") == ids_of("ab", "▁ab")
    assert plain.encode("abc a") == ids_of("ab", "c", "▁", "a")


def test_bytes_stand_for_what_the_vocabulary_lacks(plain: Any) -> None:
    assert plain.encode("é") == ids_of("é")
    assert plain.encode("ü\n") == ids_of("<0xC3>", "<0xBC>", "<0x0A>")


def test_user_defined_tokens_are_taken_whole_and_control_tokens_stay_text(plain: Any) -> None:
    assert plain.encode("a  b") == ids_of("a", "  ", "b")
    assert plain.encode("<tag>a") == ids_of("<tag>", "a")
    assert set(plain.encode("<s>")).isdisjoint(ids_of("<s>"))


@pytest.mark.parametrize("text", ROUND_TRIPS)
@pytest.mark.parametrize("prefix", [False, True])
def test_text_round_trips(tmp_path: Path, text: str, prefix: bool) -> None:
    tokenizer = tiny(tmp_path / "tiny.gguf", add_space_prefix=prefix)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("settings", "first"), [({"add_space_prefix": False}, "ab"), ({}, "▁ab")])
def test_the_leading_space_is_what_the_file_says_and_yes_by_default(
    tmp_path: Path, settings: dict[str, bool], first: str
) -> None:
    assert tiny(tmp_path / "tiny.gguf", **settings).encode("ab") == ids_of(first)


def test_other_tokenizers_are_refused_with_what_is_supported(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "gpt.gguf", tokenizer="gpt2")
    with pytest.raises(ModelError, match=r"'gpt2'.*only 'llama'"):
        build_sentencepiece(tmp_path / "gpt.gguf")


def test_a_vocabulary_that_sentencepiece_refuses_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, scores, kinds = tiny_vocabulary()
    tokens[-1] = tokens[-4]  # twice the same
    monkeypatch.setattr("test_gguf.tiny_vocabulary", lambda: (tokens, scores, kinds))
    write_tiny_gguf(tmp_path / "twice.gguf")
    with pytest.raises(ModelError, match="sentencepiece refuses"):
        build_sentencepiece(tmp_path / "twice.gguf")


def test_lists_of_different_lengths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, scores, kinds = tiny_vocabulary()
    monkeypatch.setattr("test_gguf.tiny_vocabulary", lambda: (tokens, scores[:-1], kinds))
    write_tiny_gguf(tmp_path / "short.gguf")
    with pytest.raises(ModelError, match=f"{len(tokens)}, {len(tokens) - 1}, {len(tokens)}"):
        build_sentencepiece(tmp_path / "short.gguf")


@pytest.mark.parametrize(
    ("settings", "bos"), [({}, [1]), ({"add_bos_token": True}, [1]), ({"add_bos_token": False}, [])]
)
def test_a_converted_model_has_its_bos_and_all_its_eos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool], bos: list[int]
) -> None:
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf", add_space_prefix=False, **settings)
    tokenizer = load_tokenizer(open_model(tmp_path / "tiny.gguf"))
    assert tokenizer.encode("ab c") == bos + ids_of("ab", "▁", "c")
    assert tokenizer.eos_ids == (2, 3)
    assert tokenizer.decode([1, *ids_of("▁ab", "c"), 2]) == " abc"


def hugging_face(directory: Path) -> ModelFiles:
    return ModelFiles(directory, directory.name, "huggingface", directory)


def save_hugging_face_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ).save_pretrained(directory)


@pytest.mark.parametrize(
    ("file", "eos", "expected"),
    [
        (None, None, (1,)),
        ("config.json", 5, (5, 1)),
        ("generation_config.json", [1, 7], (1, 7)),
        ("generation_config.json", None, (1,)),
    ],
)
def test_a_hugging_face_directory_brings_its_own_tokenizer(
    tmp_path: Path, file: str | None, eos: Any, expected: tuple[int, ...]
) -> None:
    save_hugging_face_tokenizer(tmp_path)
    if file:
        (tmp_path / file).write_text(json.dumps({"eos_token_id": eos}))
    tokenizer = load_tokenizer(hugging_face(tmp_path))
    ids = tokenizer.encode("a b")
    assert ids[0] == 0
    assert len(ids) == 4
    assert tokenizer.eos_ids == expected
    # Not "cleaned up" into "it's it.", and without special tokens.
    assert tokenizer.decode([*tokenizer.encode("it 's it . \n  ü"), 1]) == "it 's it . \n  ü"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    transformers.LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(hugging_face(tmp_path))


def test_a_broken_tokenizer_is_a_model_error_with_its_cause(tmp_path: Path) -> None:
    save_hugging_face_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        load_tokenizer(hugging_face(tmp_path))
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("file", ["tokenizer.model", "tokenizer_config.json"])
def test_a_converted_directory_that_lost_its_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    files = open_model(tmp_path / "tiny.gguf")
    (files.directory / file).unlink()
    with pytest.raises(ModelError, match="Name the GGUF file again"):
        load_tokenizer(files)


@pytest.mark.slow
def test_the_packaged_gemma_is_found_again(gemma: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemma.name == "gemma-3-270m-q4_k_m"
    monkeypatch.setenv("TORCHSEAM_CACHE", str(gemma.directory.parent.parent))
    monkeypatch.setattr(store, "convert_gguf", lambda *_: pytest.fail("converted again"))
    assert default_model() == gemma


@pytest.mark.slow
def test_gemma_is_tokenised_as_its_makers_do(gemma: ModelFiles) -> None:
    tokenizer = load_tokenizer(gemma)
    assert tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    assert tokenizer.eos_ids == (1,)
    for text in ROUND_TRIPS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_gemma_knows_what_paris_is(gemma: ModelFiles) -> None:
    tokenizer = load_tokenizer(gemma)
    model = transformers.AutoModelForCausalLM.from_pretrained(gemma.directory, local_files_only=True)
    assert model.dtype is torch.bfloat16
    ids = torch.tensor([[2, 818, 5279, 529, 7001, 563]])
    out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert tokenizer.decode(out) == " the capital of the country of France."
