"""GGUF files: which ones are refused and how, that the weights come out as they went in, and that a
conversion holds when a process is killed in the middle of it or two want the same one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchseam.integrations.transformers.files import ModelError
from torchseam.integrations.transformers.gguf import check_gguf, convert_gguf
from torchseam.integrations.transformers.store import open_model

transformers = pytest.importorskip("transformers", reason="needs torchseam[transformers]")
gguf = pytest.importorskip("gguf", reason="needs torchseam[transformers]")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs torchseam[transformers]")

HIDDEN, FFN, HEADS = 32, 48, 2
SPECIALS = ("<unk>", "<s>", "</s>", "<end_of_turn>")
# Merges in the order of their scores: "ab" first, then "▁ab".
WORDS = ("ab", "▁ab", "▁", "a", "b", "c", "é")


def tiny_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Special tokens, 256 bytes, words, and user-defined tokens with plain spaces, as llama.cpp writes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    own = ["  ", "<tag>"]
    tokens = [*SPECIALS, *bytes_, *WORDS, *own]
    scores = [0.0] * (4 + 256) + [-float(rank) for rank in range(len(WORDS))] + [-1000.0] * 2
    kinds = [2, 3, 3, 3] + [6] * 256 + [1] * len(WORDS) + [4] * 2
    return tokens, scores, kinds


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tokenizer: str = "llama",
    leave_out: tuple[str, ...] = (),
    seed: int = 0,
    **settings: Any,
) -> dict[str, np.ndarray]:
    """Write a one-layer model; the tensors by their GGUF names. `settings` are tokenizer.ggml.* booleans."""
    tokens, scores, kinds = tiny_vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    for name, value in settings.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
        "output_norm.weight": (HIDDEN,),
    }
    generator = np.random.default_rng(seed)
    tensors = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, value in tensors.items():
        if name not in leave_out:
            writer.add_tensor(name, value)
    finish(writer)
    return tensors


ENTRY_FILES = {
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "tokenizer.model",
    "tokenizer_config.json",
}


def entries(cache: Path) -> list[Path]:
    """Finished or not."""
    return [path for path in cache.glob("models/*") if path.is_dir()]


def assert_valid(entry: Path) -> None:
    """The entry as another program would check it, and the model loads."""
    assert {file.name for file in entry.iterdir()} == ENTRY_FILES
    manifest = json.loads((entry / "manifest.json").read_text())
    assert set(manifest["files"]) == ENTRY_FILES - {"manifest.json"}
    for name, expected in manifest["files"].items():
        content = (entry / name).read_bytes()
        assert expected == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    model = transformers.AutoModelForCausalLM.from_pretrained(entry, local_files_only=True)
    assert model.dtype is torch.bfloat16
    # Nothing half-done is left next to it.
    assert not list(entry.parent.glob(".*.partial"))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_check_reads_the_same_metadata_as_the_gguf_package(tiny: Path) -> None:
    theirs = {key: field.contents() for key, field in gguf.GGUFReader(tiny).fields.items()}
    ours = check_gguf(tiny)
    assert {key: theirs[key] for key in ours} == ours
    assert {key for key in theirs if not key.startswith("GGUF.")} == set(ours)


def test_check_counts_the_bytes_of_quantised_blocks(tmp_path: Path) -> None:
    path = tmp_path / "blocks.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    check_gguf(path)
    # 4 x 64 weights are 8 blocks of 34 bytes; what follows is padding, which may be missing.
    padding = -(8 * 34) % 32
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - padding])
    check_gguf(path)
    path.write_bytes(whole[: len(whole) - padding - 1])
    with pytest.raises(ModelError, match=r"truncated: tensor 'token_embd\.weight'"):
        check_gguf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF\x03", "truncated"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(64), "version 1 "),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(64), "read as little-endian"),
        (b"GGUF" + (3).to_bytes(4, "little"), "truncated or damaged"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(16), "no weights"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 64, "truncated or damaged"),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        check_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.6, 0.9])
def test_a_truncated_file_is_refused_wherever_it_ends(tiny: Path, kept: float) -> None:
    whole = tiny.read_bytes()
    tiny.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ModelError, match="truncated"):
        check_gguf(tiny)
    with pytest.raises(ModelError, match="truncated"):
        convert_gguf(tiny, tiny.parent)


def test_one_part_of_a_split_model_is_refused_with_the_command_that_joins(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=r"one of 2 parts.*llama-gguf-split --merge"):
        check_gguf(path)


def test_a_tensor_type_unknown_to_the_gguf_package_is_refused(tiny: Path) -> None:
    content = bytearray(tiny.read_bytes())
    # A tensor's entry: name, dimension count, dimensions, type. output_norm.weight has one dimension.
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8
    assert content[at : at + 4] == bytes(4)  # F32
    content[at : at + 4] = (999).to_bytes(4, "little")
    tiny.write_bytes(content)
    with pytest.raises(ModelError, match="GGML type 999"):
        check_gguf(tiny)


def test_conversion_keeps_every_weight_in_the_asked_dtype(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", out)
    weights = safetensors_torch.load_file(out / "model.safetensors")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for ours, theirs in names.items():
        assert weights[ours].dtype is torch.bfloat16
        assert torch.equal(weights[ours], torch.from_numpy(source[theirs]).bfloat16()), ours
    # llama.cpp stores q and k with the rotary halves interleaved, per head: put back.
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        stored = torch.from_numpy(source[f"blk.0.{theirs}.weight"]).bfloat16()
        plain = stored.reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN).transpose(1, 2).reshape(HIDDEN, HIDDEN)
        assert torch.equal(weights[f"model.layers.0.self_attn.{ours}.weight"], plain)
    assert len(weights) == len(source)


def test_conversion_leaves_an_ordinary_directory(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    # What lies next to the file is none of the model's business.
    (tiny.parent / "generation_config.json").write_text('{"eos_token_id": 77}')
    convert_gguf(tiny, out, dtype=torch.float32)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 3]


def test_conversion_gives_the_progress_bars_back(tiny: Path, tmp_path: Path) -> None:
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    tqdm = modeling_gguf_pytorch_utils.tqdm
    assert logging.is_progress_bar_enabled()
    convert_gguf(tiny, tmp_path)
    assert logging.is_progress_bar_enabled()
    assert modeling_gguf_pytorch_utils.tqdm is tqdm


def test_conversion_opens_no_socket(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    # To keep the blocks packed, transformers looks for a kernel on the network; only for some architectures.
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

    class Asked(GgufHfQuantizer):
        def read_header(self, file: str) -> None:
            assert self.quantization_config.dequantize
            super().read_header(file)

    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "gguf", Asked)
    convert_gguf(tiny, tmp_path)


def test_an_unsupported_architecture_names_itself_and_keeps_the_cause(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "odd.gguf", architecture="rwkv6")
    with pytest.raises(ModelError, match="architecture 'rwkv6'") as caught:
        convert_gguf(tmp_path / "odd.gguf", tmp_path)
    assert isinstance(caught.value.__cause__, ValueError)


def test_missing_weights_are_refused_and_never_made_up(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "holes.gguf", leave_out=("blk.0.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"lacks 1 of the weights.*mlp\.up_proj\.weight"):
        convert_gguf(tmp_path / "holes.gguf", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_importing_is_light_and_a_missing_extra_is_named(tiny: Path) -> None:
    """In a fresh interpreter: nothing optional is imported, and without it the error says what to install."""
    program = f"""
import sys
from pathlib import Path
optional = ("transformers", "gguf", "sentencepiece", "accelerate", "google.protobuf")
sys.modules |= dict.fromkeys(optional)  # None: an import raises ImportError
from torchseam.integrations.transformers import gguf, store, tokenizer
from torchseam.integrations.transformers.files import ModelError
try:
    store.open_model(Path({str(tiny)!r}))
except ModelError as error:
    print(error)
"""
    environment = dict(os.environ, TORCHSEAM_CACHE=str(tiny.parent / "cache"))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "pip install torchseam[transformers]" in done.stdout


# What another process does: open the model, say each step, and hold at one until a file appears.
OPENER = """
import contextlib, sys, time
from pathlib import Path
from torchseam.integrations.transformers.store import open_model

gguf, hold_at, release = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

@contextlib.contextmanager
def progress(name):
    print(name, flush=True)
    while name == hold_at and not release.exists():
        time.sleep(0.01)
    yield

print(open_model(gguf, progress).directory, flush=True)
"""


@contextlib.contextmanager
def opener(gguf: Path, hold_at: str, release: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OPENER, str(gguf), hold_at, str(release)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], step: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1] == step:
            return lines
    raise AssertionError(f"{step!r} never came, only {lines}")


@pytest.mark.parametrize("step", ["Converting the GGUF weights", "Writing the converted model"])
def test_a_killed_conversion_is_cleaned_up_by_the_next(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path))
    with opener(tiny, step, tmp_path / "never") as process:
        read_until(process, step)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    (left,) = entries(tmp_path)
    assert left.name.endswith(".partial")
    (left / "garbage").write_bytes(b"half of something")
    entry = open_model(tiny).directory
    assert entry != left
    assert_valid(entry)


def test_two_processes_at_once_convert_once_and_both_have_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path))
    release, step = tmp_path / "release", "Converting the GGUF weights"
    with opener(tiny, step, release) as first:
        read_until(first, step)
        with opener(tiny, "", release) as second:
            waiting = "Waiting for another process that converts this model"
            steps = read_until(second, waiting)
            release.touch()
            rest, _ = second.communicate()
            out, errors = first.communicate()
    assert "%" not in errors, "a progress bar of transformers"
    assert (first.returncode, second.returncode) == (0, 0)
    assert step not in steps + rest.splitlines()
    assert out.splitlines()[-1] == rest.splitlines()[-1]
    assert_valid(Path(rest.splitlines()[-1]))
