"""Ranks as real processes: what they get and give, and that they all end, however one or the parent does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import launch_functions as functions
import pytest
import torch.distributed.launcher.api  # noqa: F401 (here, not in a test: it keeps the standard error that it finds)

from torchseam.cli.launch import RankError, launch

#: The issue: when one rank fails, all have stopped within this many seconds.
STOPPED_WITHIN = 30


def failure_of(function: Callable[[], object], ranks: int = 2) -> RankError:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(function, ranks)
    assert time.monotonic() - started < STOPPED_WITHIN
    return caught.value


def test_the_value_of_rank_0_comes_back_and_output_goes_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    result = launch(functions.tell, 2, "$local_rank", {"a": 1})
    found = result["environment"]
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == ("0", "0", "2")
    assert found["MASTER_ADDR"]
    assert int(found["MASTER_PORT"]) > 0
    assert result["args"] == ("$local_rank", {"a": 1})
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert sorted(stderr.splitlines()) == ["terminal of rank 0", "terminal of rank 1"]


def test_output_that_is_asked_for_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    launch(functions.tell, 1, None, None, show_output=True)
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    for line in ("stdout of a rank", "stderr of a rank", "descriptor 1 of a rank", "terminal of rank 0"):
        assert line in stderr


def test_ranks_can_talk_and_signal_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert launch(functions.sum_of_ranks, 3) == 1 + 2 + 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("function", [functions.raise_while_others_wait, functions.raise_and_make_the_other_raise])
def test_the_first_rank_to_raise_is_the_one_reported(
    function: Callable[[], object], capfd: pytest.CaptureFixture[str]
) -> None:
    error = failure_of(function)
    assert (error.rank, str(error), error.bad_input) == (1, "RuntimeError: the first failure", False)
    assert error.details.startswith("Traceback")
    assert function.__name__ in error.details
    assert capfd.readouterr() == ("", "")


def test_a_killed_rank_is_reported_with_a_hint(capfd: pytest.CaptureFixture[str]) -> None:
    error = failure_of(functions.be_killed_while_others_wait)
    assert error.rank == 1
    assert "SIGKILL" in str(error)
    assert "memory" in str(error)
    assert not error.bad_input
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_leaves_without_a_word_is_reported_with_the_log() -> None:
    error = failure_of(functions.leave_without_a_word)
    assert error.rank == 0
    assert "exit code 3" in str(error)
    assert "what was written before" in error.details


def test_a_result_that_cannot_travel_is_an_error() -> None:
    error = failure_of(functions.return_what_cannot_travel, ranks=1)
    assert "pickle" in str(error)
    assert error.details.startswith("Traceback")


@pytest.mark.parametrize(
    ("function", "message", "bad_input"),
    [
        (functions.refuse_in_torchseam, "backend is 'carrier pigeon'", True),
        (functions.refuse_in_a_library, "ValueError: invalid literal", False),
    ],
)
def test_only_our_own_value_errors_are_for_the_user(
    function: Callable[[], object], message: str, bad_input: bool
) -> None:
    error = failure_of(function, ranks=1)
    assert str(error).startswith(message)
    assert error.bad_input is bad_input


# -- A command that is interrupted, or killed ------------------------------------------------------------

COMMAND = (
    "from torchseam.cli import app, demo; import launch_functions; "
    "demo.run_demo = launch_functions.command_that_waits; app.main()"
)


@contextlib.contextmanager
def waiting_command(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A torchseam command with two ranks that wait, in a process group of its own; and the ranks' ids."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "demo"],
        cwd=Path(__file__).parent,
        env=dict(os.environ, TMPDIR=str(folder)),  # where a killed command leaves its log
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        assert process.stderr is not None
        while len(pids) < 2:
            line = process.stderr.readline()
            assert line.startswith("pid "), line + process.stderr.read()
            pids.append(int(line.split()[1]))
        yield process, pids
    finally:
        for pid in (process.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def all_end(pids: list[int]) -> bool:
    limit = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    return not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("to_all", [True, False], ids=["Ctrl-C", "kill -INT"])
def test_an_interrupt_ends_everything_quietly(tmp_path: Path, to_all: bool) -> None:
    with waiting_command(tmp_path) as (process, pids):
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=STOPPED_WITHIN)
        assert (process.returncode, stdout, stderr) == (130, "", "torchseam: interrupted\n")
        assert all_end(pids)
        assert list(tmp_path.glob("torchseam-*")) == []


def test_a_terminated_command_ends_its_ranks(tmp_path: Path) -> None:
    with waiting_command(tmp_path) as (process, pids):
        process.terminate()
        stdout, stderr = process.communicate(timeout=STOPPED_WITHIN)
        assert (process.returncode, stdout, stderr) == (128 + signal.SIGTERM, "", "")
        assert all_end(pids)


def test_ranks_end_when_the_command_is_killed(tmp_path: Path) -> None:
    with waiting_command(tmp_path) as (process, pids):
        process.kill()
        process.wait()
        assert all_end(pids)
