"""Start one process for each rank with torch's own elastic launcher, and bring errors home.

When a rank fails, the launcher stops the others; the failure that came first is what the caller sees.
What ranks and launcher write goes to a log, not to the terminal, unless asked for.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any, TextIO

from torchseam.cli.errors import describe, is_for_the_user

#: Seconds between the launcher's looks at its ranks: how late a failure may be noticed.
_MONITOR_INTERVAL = 0.2
#: Seconds that a rank waits between noting its exception and ending. An exception may be only the
#: consequence of another rank's being killed; the launcher has then seen that one first.
_LAST_WORDS = 5 * _MONITOR_INTERVAL
#: Lines of the log that tell about a rank which could not speak for itself.
_LOG_LINES = 60
#: The launcher takes these over and does not give them back.
_SIGNALS = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, n))

# Where people look: this process's own standard error, or in a rank that of the process that started it.
_terminal: TextIO | None = None


class RankError(RuntimeError):
    """A rank failed: the first that did.

    `bad_input` tells errors that the user can mend (a ValueError of torchseam's own) from others;
    `details` is the rank's traceback, or the end of the log when it left none.
    """

    def __init__(self, rank: int, message: str, details: str, bad_input: bool) -> None:
        super().__init__(message)
        self.rank, self.details, self.bad_input = rank, details, bad_input


def terminal() -> TextIO:
    """The stream for progress and other words to people; in a rank it does not end in the log."""
    return _terminal or sys.stderr


class _Descriptor:
    """A file descriptor as an argument of a rank; it is duplicated while the process is spawned."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, duplicate: Any) -> None:
        self.number = duplicate.detach()


@dataclass(frozen=True)
class _Job:
    """What a rank gets. One object, because the launcher replaces $local_rank in arguments that are strings."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    folder: str
    terminal: _Descriptor


def _run_rank(job: _Job) -> Any:
    """What a rank runs. Leaves a note of an exception, with its time, before letting it through."""
    global _terminal
    # To end at once, also in the middle of a collective; Python would wait for that to return.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _terminal = os.fdopen(job.terminal.number, "w", encoding=sys.stderr.encoding, errors="replace", buffering=1)
    try:
        result = job.function(*job.args)
        # Pickled here, so that a result that cannot be is an exception like others.
        return bytes(reduction.ForkingPickler.dumps(result)) if os.environ["RANK"] == "0" else None
    except Exception as error:
        rank = int(os.environ["RANK"])
        note = {
            "time": time.time_ns(),
            "rank": rank,
            "message": describe(error),
            "details": traceback.format_exc(),
            "bad_input": is_for_the_user(error),
        }
        draft = Path(job.folder, f"rank{rank}.draft")
        draft.write_text(json.dumps(note), encoding="utf-8")
        draft.rename(draft.with_suffix(".json"))
        time.sleep(_LAST_WORDS)
        raise


def _end_with_parent() -> None:
    """End this process when the one that started it has died."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def launch(function: Callable[..., Any], world_size: int, *args: Any, show_output: bool = False) -> Any:
    """Run `function(*args)` in `world_size` processes and return what rank 0 returned.

    `function` must be importable by name and its result picklable. The ranks find RANK, LOCAL_RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment, as under torchrun. What they and
    the launcher write is dropped, or goes to standard error with `show_output`; `terminal` stays.

    Raises RankError when a rank fails (the others are stopped), KeyboardInterrupt on SIGINT, and
    SystemExit(128 + n) on another signal n that ends processes.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=f"torchseam-{uuid.uuid4().hex[:8]}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # a machine may not be able to resolve its own name
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL,
        start_method="spawn",
    )
    failure: BaseException
    with tempfile.TemporaryDirectory(prefix="torchseam-") as folder:
        log = Path(folder, "log")
        try:
            with _signals_given_back(), _output_to(None if show_output else log) as words:
                job = _Job(function, args, folder, _Descriptor(words))
                return pickle.loads(elastic_launch(config, _run_rank)(job)[0])
        except ChildFailedError as error:
            failure = _first_failure(folder, *error.get_first_failure())
        except SignalException as error:
            failure = KeyboardInterrupt() if error.sigval == signal.SIGINT else SystemExit(128 + error.sigval)
    raise failure


@contextlib.contextmanager
def _signals_given_back() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has handlers, and there the launcher sets none
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _output_to(log: Path | None) -> Iterator[int]:
    """Lead descriptors 1 and 2, which ranks inherit, to `log` (None: both to standard error).

    Yields a descriptor of the standard error that was.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = os.dup(1), os.dup(2)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, stdout)
        stack.callback(os.close, stderr)
        stack.callback(os.dup2, stdout, 1)
        stack.callback(os.dup2, stderr, 2)
        if log is not None:
            with log.open("ab") as target:
                os.dup2(target.fileno(), 2)
        os.dup2(2, 1)
        yield stderr
        sys.stderr.flush()


def _first_failure(folder: str, rank: int, failure: Any) -> BaseException:
    """The failure that came first; `rank` and `failure` are what the launcher saw first."""
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("rank*.json")]
    if failure.exitcode == -signal.SIGINT:
        return KeyboardInterrupt()
    # A rank that raised takes its time to end, so a killed one that is seen first was first.
    if notes and failure.exitcode > 0:
        first = min(notes, key=lambda note: note["time"])
        return RankError(first["rank"], first["message"], first["details"], first["bad_input"])
    log = Path(folder, "log")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return RankError(rank, _how_it_ended(failure.exitcode), "\n".join(lines[-_LOG_LINES:]), False)


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"the process ended with exit code {exitcode} and raised nothing that was seen"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if name == "SIGKILL":
        return (
            "the process was killed (SIGKILL). The usual reason is that the machine ran out of memory: "
            "use fewer ranks or a smaller model, or free memory"
        )
    return f"the process was ended by {name}"
