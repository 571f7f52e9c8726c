"""tests/kernels/sanitize.py without a GPU: what it runs, and that a tool is heard, whatever it finds."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

pytest.importorskip("triton")

import kernel_cases
import one_gpu_cases
import sanitize

from torchseam.kernels import one_shot, two_shot


def tool(tmp_path: Path, says: str, status: int) -> str:
    """A stand-in for compute-sanitizer, which runs nothing and keeps its arguments."""
    script = tmp_path / "compute-sanitizer"
    script.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/arguments\necho '{says}'\nexit {status}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_every_quantiser_and_norm_and_every_launch_is_run():
    cases = sanitize.local_cases()
    assert {c.quant for c in cases if c.seam is None} == set(kernel_cases.quantizers())
    assert {q for c in cases if c.seam for q in c.seam.quants} == set(kernel_cases.quantizers())
    assert {(c.seam.norm.weight, c.seam.norm.offset) for c in cases if c.seam} == {
        (norm.weight, norm.offset) for norm, _ in kernel_cases.norms()
    }
    calls = sanitize.collective_calls()
    assert {call.run for call in calls} == {one_shot.run, two_shot.run}
    assert {call.seam.quants[0] for call in calls} == set(one_gpu_cases.QUANTS)
    many = one_gpu_cases.programs_of_rank(2, sanitize.MULTIPROCESSORS)
    assert {call.launch for call in calls} == {call.launch for call in one_gpu_cases.long_rows(2, many)}
    # Wide rows, and such as leave lanes of their block empty.
    assert {c.hidden for c in cases} == set(sanitize.HIDDENS)


def test_a_tool_that_finds_something_is_a_failure_with_its_report(tmp_path, capsys):
    prefix = sanitize.prefix_of(tool(tmp_path, "Invalid __global__ read", sanitize.FOUND), "memcheck")
    assert sanitize.run_all("memcheck", prefix, 2) is False
    printed = capsys.readouterr().out
    assert "Invalid __global__ read" in printed
    assert "2 of 2 parts FAILED" in printed
    arguments = (tmp_path / "arguments").read_text()
    assert "--tool memcheck" in arguments
    assert "--part 1 --parts 2" in arguments


def test_a_silent_tool_is_clean_but_must_find_the_planted_write(tmp_path, capsys):
    silent = tool(tmp_path, "ERROR SUMMARY: 0 errors", 0)
    assert sanitize.run_all("racecheck", sanitize.prefix_of(silent, "racecheck"), 1) is True
    assert "racecheck: clean ['ERROR SUMMARY: 0 errors']" in capsys.readouterr().out
    assert sanitize.finds_what_is_planted(silent) is False
    assert sanitize.finds_what_is_planted(tool(tmp_path, "Invalid __global__ write of size 4", sanitize.FOUND)) is True


def test_a_hang_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "TIMEOUT", 1)
    script = Path(tool(tmp_path, "waits", 0))
    script.write_text("#!/bin/sh\nsleep 60\n")
    assert sanitize.run_all("memcheck", [str(script)], 1) is False
    assert "a part ended with -9" in capsys.readouterr().out


def test_the_tool_is_found_by_name_or_on_the_path(tmp_path, monkeypatch):
    script = tool(tmp_path, "", 0)
    monkeypatch.delenv("COMPUTE_SANITIZER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.find_sanitizer() == script
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("COMPUTE_SANITIZER", script)
    assert sanitize.find_sanitizer() == script
