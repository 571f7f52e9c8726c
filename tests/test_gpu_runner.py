"""tests/gpu.py, which runs what needs GPUs: it leaves nothing out, and says what failed, what was skipped and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu

ROOT = Path(__file__).parent.parent


def test_every_check_for_gpus_is_a_step_that_is_there():
    named = [path for path in gpu.HERE.rglob("*_check.py") if not path.name.startswith("test_")]
    checks = {str(path.relative_to(gpu.HERE)) for path in named}
    scripts = {step.script for step in gpu.STEPS}
    assert checks <= scripts, "each *_check.py needs a line in STEPS of tests/gpu.py"
    assert all((gpu.HERE / script).is_file() for script in scripts)
    assert len({step.name for step in gpu.STEPS}) == len(gpu.STEPS)


def test_without_a_gpu_it_fails_and_says_so():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "need a CUDA GPU" in done.stderr
    assert "`make test`" in done.stderr


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def script(folder: Path, text: str) -> str:
    file = folder / f"{abs(hash(text))}.py"
    file.write_text(text)
    return str(file)


@pytest.mark.usefixtures("two_gpus")
def test_the_summary_says_what_passed_failed_and_was_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    steps = (
        gpu.Step("good", script(tmp_path, "import torchseam")),
        gpu.Step("bad", script(tmp_path, "raise SystemExit(3)")),
        gpu.Step("many", script(tmp_path, "raise SystemExit(9)"), gpus=4),
        gpu.Step("foreign", script(tmp_path, "raise SystemExit(9)"), package="no_such_package"),
    )
    assert gpu.main(steps) == 1
    printed = capsys.readouterr().out
    assert "good: passed" in printed
    assert "bad: FAILED: exit status 3" in printed
    assert "many: skipped: needs 4 CUDA GPU(s), found 2" in printed
    assert "foreign: skipped: needs the package no_such_package" in printed
    assert "1 passed, 1 failed, 2 skipped" in printed
    assert gpu.main(steps[:1]) == 0


@pytest.mark.usefixtures("two_gpus")
def test_only_the_steps_asked_for_run_and_a_wrong_name_is_refused(tmp_path, monkeypatch, capsys):
    steps = (gpu.Step("one", script(tmp_path, "")), gpu.Step("two", script(tmp_path, "raise SystemExit(1)")))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "one"])
    assert gpu.main(steps) == 0
    assert "two" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "three"])
    with pytest.raises(SystemExit):
        gpu.main(steps)
    assert "--only has three; allowed: one, two" in capsys.readouterr().err


def test_the_parts_of_a_step_run_side_by_side_and_one_that_fails_counts(tmp_path):
    # Each waits for the other's file: one after the other they would not end.
    text = (
        "import pathlib, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "part = sys.argv[sys.argv.index('--table') + 1][0]\n"
        "(folder / part).touch()\n"
        "while len(list(folder.glob('[0-9]'))) < 2: time.sleep(0.05)\n"
        "sys.exit(part == '2')\n"
    )
    step = gpu.Step("parts", script(tmp_path, text), parts=2)
    assert gpu.run(step, 1, timeout=60).startswith("FAILED: exit status 1")


def test_a_step_that_hangs_is_ended_and_has_failed(tmp_path):
    step = gpu.Step("hangs", script(tmp_path, "import time; time.sleep(100)"))
    assert gpu.run(step, 1, timeout=1).startswith("FAILED: not done after")


def test_between_gpus_there_is_a_rank_on_each_up_to_eight():
    step = gpu.Step("ranks", "x.py", gpus=2)
    (command,) = step.commands(4)
    assert command[command.index("--nproc-per-node") + 1] == "4"
    (command,) = step.commands(16)
    assert command[command.index("--nproc-per-node") + 1] == "8"


def test_a_step_that_needs_a_tool_is_skipped_without_it(monkeypatch):
    monkeypatch.setattr(gpu, "find_sanitizer", lambda: None)
    step = gpu.Step("tool", "x.py", sanitized=True)
    assert "needs compute-sanitizer" in gpu.run(step, 1)
    monkeypatch.setattr(gpu, "find_sanitizer", lambda: "/a/tool")
    assert step.missing(1) is None
