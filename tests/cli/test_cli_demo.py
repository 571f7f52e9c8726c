"""`torchseam demo` from end to end: a program of its own, its ranks, one JSON object; and what people see."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_models import save_llama
from rich.errors import MarkupError
from typer.testing import CliRunner

from torchseam.cli import app, demo
from torchseam.compiler.report import FusionReport
from torchseam.integrations.transformers.files import ModelFiles

pytest.importorskip("transformers", reason="needs torchseam[transformers]")

#: The prompt's graph and that of one token.
GRAPHS = 2
LAYERS = demo.QUICK_LAYERS


def quick_json(*options: object) -> dict[str, Any]:
    """The object that `torchseam demo --quick --json` prints; nothing else may be on either stream but progress."""
    program = [sys.executable, "-c", "from torchseam.cli.app import main; main()"]
    run = subprocess.run(
        [*program, "demo", "--quick", "--json", "--device", "cpu", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=280,
        env={name: value for name, value in os.environ.items() if name not in demo.LOG_VARIABLES},
    )
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stderr.splitlines() if not line.startswith("✓ ")] == []
    assert run.stdout.count("\n") == 1
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def check_same_as_eager(result: dict[str, Any]) -> None:
    assert result["tokens_equal"] is True
    assert result["max_logit_diff"] == 0.0
    assert result["first_difference"] is None
    assert result["text"] == result["eager_text"]
    assert (result["not_fused"], result["refusals"], result["unreported"]) == (0, [], 0)
    assert result["graphs"] == GRAPHS


@pytest.mark.slow
def test_two_ranks_of_a_tiny_llama_fuse_every_seam(tmp_path: Path, inductor_cache: Path) -> None:
    result = quick_json("--model", save_llama(tmp_path / "llama"), "--scheme", "fp8_static", "--prompt", "the cat")
    check_same_as_eager(result)
    # A layer has two all_reduces, each with the norm after it; before them stands the first norm.
    assert result["fused"] == 2 * LAYERS + 1
    assert result["kinds"] == {
        "rms_norm + fp8_static": 1,
        "all_reduce + residual + rms_norm + fp8_static": 2 * LAYERS - 1,
        "all_reduce + residual + rms_norm": 1,  # the final norm, before the head, which is not quantised
    }
    assert (result["model"], result["scheme"], result["tp"], result["device"]) == ("llama", "fp8_static", 2, "cpu")
    assert sum(result["gemms"].values()) == LAYERS * 7  # q, k, v, o, gate, up, down


@pytest.mark.slow
def test_one_rank_of_a_tiny_llama_fuses_norms_with_quantisers(tmp_path: Path, inductor_cache: Path) -> None:
    result = quick_json("--model", save_llama(tmp_path / "llama"), "--scheme", "fp8_token", "--tp", 1, "--tokens", 3)
    check_same_as_eager(result)
    assert result["fused"] == 2 * LAYERS  # no all_reduce, and the final norm has no quantiser after it
    assert result["kinds"] == {
        "rms_norm + fp8_token": 1,
        "residual + rms_norm + fp8_token": 2 * LAYERS - 1,
    }


@pytest.mark.slow
def test_the_default_model_is_gemma(converted_gemma: ModelFiles, inductor_cache: Path) -> None:
    result = quick_json("--scheme", "nvfp4")
    check_same_as_eager(result)
    assert result["model"] == converted_gemma.name
    assert result["fused"] == 2 * LAYERS + 1
    assert result["prompt"] == demo.DEFAULT_PROMPT


# -- Without ranks ---------------------------------------------------------------------------------------


class Words:
    """A tokenizer like those that put a space before each word but the first."""

    eos_ids = (9,)
    words = ("the", "cat", "[/b]", "sat")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(self.words[i] for i in ids if i < len(self.words))


@pytest.mark.parametrize(
    ("ids", "expected"), [([3, 1], " sat cat"), ([3, 9, 1], " sat"), ([9], ""), ([], ""), ([2, 3], " [/b] sat")]
)
def test_the_text_follows_the_prompt_and_ends_where_the_model_ends_it(ids: list[int], expected: str) -> None:
    assert demo._continuation(Words(), (0, 1), ids) == expected


def test_json_has_null_for_what_it_cannot_say() -> None:
    value = demo._finite({"a": [math.nan, 1.5, (math.inf,)], "b": {"c": -math.inf}, "d": "nan", "e": 3})
    assert value == {"a": [None, 1.5, [None]], "b": {"c": None}, "d": "nan", "e": 3}


def fake_result(tokens: tuple[int, int] = (1, 1), logit_diff: float = 0.0) -> dict[str, Any]:
    """What launch returns: one token of each run."""
    fused, eager = tokens
    difference = None
    if fused != eager:
        logits = {run: {str(fused): 1.5, str(eager): 1.25} for run in ("fused", "eager")}
        difference = {"step": 0, "tokens": {"fused": fused, "eager": eager}, "logits": logits, "margin": 0.25}
    return {
        "report": FusionReport(),
        "comparison": {"tokens_equal": fused == eager, "max_logit_diff": logit_diff, "first_difference": difference},
        "tokens": {"fused": [fused], "eager": [eager]},
        "seconds": {"load": 1.0, "eager": 1.0, "compile": 1.0, "fused": 1.0},
        "seconds_per_token": {"eager": None, "fused": None},
    }


def run_with(monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], *options: str) -> str:
    """The command's standard output when the ranks give `result`."""
    files = ModelFiles(Path("d"), "tiny[/x]", "huggingface", Path("s"))
    monkeypatch.setattr(demo, "prepare", lambda *_: (files, Words(), (0,)))
    monkeypatch.setattr(demo, "launch", lambda *_, **__: result)
    run = CliRunner().invoke(app.app, ["demo", "--prompt", "the", "--tp", "1", "--device", "cpu", *options])
    assert run.exit_code == 0, (run.stderr, run.exception)
    assert not isinstance(run.exception, MarkupError)
    return run.stdout


def test_people_see_the_text_and_that_the_runs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run_with(monkeypatch, fake_result())
    assert "tiny[/x], fp8_static, 1 rank on cpu" in shown
    assert "the cat" in shown
    rows = Counter(word for line in shown.splitlines() if "tokens" in line for word in line.split())
    assert rows["equal"] == 1
    assert "--quick" not in shown


def test_people_see_where_the_runs_differ_and_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = " ".join(run_with(monkeypatch, fake_result((2, 3), 0.5), "--quick").split())
    assert "the first 2 layers only" in shown
    assert "step 0: fused took 2 '[/b]': logit 1.5 fused, 1.5 eager" in shown
    assert "step 0: eager took 3 'sat': logit 1.25 fused, 1.25 eager" in shown
    assert "margin in the eager run is 0.25, the largest logit difference 0.5" in shown


def test_json_of_a_run_that_went_astray_is_still_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_constant(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    shown = run_with(monkeypatch, fake_result((2, 3), math.nan), "--json")
    result = json.loads(shown, parse_constant=no_constant)
    assert result["max_logit_diff"] is None
    assert result["tokens_equal"] is False
    assert result["first_difference"]["tokens"] == {"fused": 2, "eager": 3}
