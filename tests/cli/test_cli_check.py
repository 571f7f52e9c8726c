"""`torchseam doctor --check`: what is run where, and what is said of what is wrong, missing or ended half-way."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from torchseam.backends import select
from torchseam.checking.run import Result
from torchseam.cli import app, check, doctor
from torchseam.cli.launch import RankError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU changes what is checked")


def invoke(*options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app.app, ["doctor", *options])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "problems", list)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be launched; each backend is right."""
    calls: list[tuple[Any, ...]] = []

    def launch(function: Any, size: int, name: str, *rest: Any, show_output: bool) -> Result:
        assert function is check.check_rank
        calls.append((size, name, *rest))
        return Result(name, size, cases=108, seconds=2.0)

    monkeypatch.setattr(check, "launch", launch)
    return calls


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(check, "gpus", lambda: gpus)
    monkeypatch.setattr(check, "check_compiler", lambda _: None)
    monkeypatch.setattr(select, "missing", lambda name: None)


@no_gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_gpu_what_runs_on_the_cpu_is_checked_and_the_rest_is_skipped_with_its_reason(ready: None) -> None:
    code, stdout, _ = invoke("--check", "--json")
    assert code == 0, stdout
    results = {r["backend"]: r for r in json.loads(stdout)["checks"]}
    assert list(results) == list(check.CHECKED)
    for name in ("local", "collective"):
        assert results[name]["cases"] > 100
        assert results[name]["wrong"] == 0 and results[name]["skipped"] is None
    assert results["collective"]["world_size"] == min(2, len(os.sched_getaffinity(0)))
    for name in ("symmetric", "trtllm", "mnnvl"):
        assert results[name]["skipped"] == select.missing(name) == "there is no CUDA GPU"


@pytest.mark.parametrize(("gpus", "ranks"), [(2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_as_many_ranks_as_the_backends_take_and_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, ready: None, launched: list[Any], gpus: int, ranks: int
) -> None:
    machine(monkeypatch, gpus)
    code, stdout, _ = invoke("--check", "--json")
    assert code == 0
    assert launched[0] == (1, "local", "cuda", False)
    assert launched[1:] == [(ranks, name, "cuda", False) for name in ("collective", "symmetric", "trtllm")]
    (mnnvl,) = (r for r in json.loads(stdout)["checks"] if r["backend"] == "mnnvl")
    assert "multicast" in mnnvl["skipped"]


def test_multicast_is_used_when_asked_for_only(
    monkeypatch: pytest.MonkeyPatch, ready: None, launched: list[Any]
) -> None:
    machine(monkeypatch, 2)
    for name in check.NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    assert invoke("--check", "--multicast", "--thorough", "--ranks", "2")[0] == 0
    assert launched[-1] == (2, "mnnvl", "cuda", True)
    assert not any(name in os.environ for name in check.NO_MULTICAST)
    assert invoke("--check")[0] == 0
    assert launched[-1] == (2, "trtllm", "cuda", False)
    for name, value in check.NO_MULTICAST.items():
        assert os.environ.pop(name) == value


def test_one_gpu_checks_the_local_kernel_alone(
    monkeypatch: pytest.MonkeyPatch, ready: None, launched: list[Any]
) -> None:
    machine(monkeypatch, 1)
    code, stdout, _ = invoke("--check")
    assert code == 0 and launched == [(1, "local", "cuda", False)]
    assert "there are no two ranks: one GPU" in " ".join(stdout.split())


def test_what_is_wrong_or_failed_is_told_and_the_rest_still_checked(
    monkeypatch: pytest.MonkeyPatch, ready: None
) -> None:
    machine(monkeypatch, 2)

    def launch(_: Any, size: int, name: str, *rest: Any, show_output: bool) -> Result:
        if name == "collective":
            raise RankError(1, "ended by SIGKILL", "the end of the log", False)
        if name == "symmetric":
            return Result(name, size, cases=9, wrong=1, told=["T=1 [bold]: rank 1: codes differ"])
        return Result(name, size, cases=9, remarks=["some calls went to collective: too long"])

    monkeypatch.setattr(check, "launch", launch)
    code, stdout, _ = invoke("--check")
    assert code == 1
    assert "symmetric: T=1 [bold]: rank 1: codes differ" in stdout
    assert "collective: rank 1: ended by SIGKILL" in stdout
    assert "trtllm: some calls went to collective: too long" in stdout
    assert "1 wrong" in stdout and "failed" in stdout and "right" in stdout
    code, stdout, _ = invoke("--check", "--json")
    assert code == 1
    assert [r["failed"] is not None for r in json.loads(stdout)["checks"]] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "2"), "add --check"),
        (("--thorough",), "add --check"),
        (("--check", "--ranks", "0"), "it may be 1 to 8"),
        (("--check", "--ranks", "9"), "it may be 1 to 8"),
        (("--check", "--ranks", "5"), "needs 5 GPUs, there are 2; use --ranks 2"),
    ],
)
def test_bad_options_are_answered(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str) -> None:
    machine(monkeypatch, 2)
    code, _, stderr = invoke(*options)
    assert code == 2
    assert words in " ".join(stderr.split())
