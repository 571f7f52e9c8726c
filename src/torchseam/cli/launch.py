"""Start one process for each rank with torch's own elastic launcher, and bring errors home.

When a rank raises, the launcher stops the others; the error that came first is what the caller sees.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds between the launcher's looks at its ranks: how late a failure may be noticed.
_MONITOR_INTERVAL = 0.2


class RankError(RuntimeError):
    """A rank failed: the first that did.

    `bad_input` tells errors that the user can mend (a ValueError in the rank) from others;
    `details` is the rank's traceback.
    """

    def __init__(self, rank: int, message: str, details: str, bad_input: bool) -> None:
        super().__init__(message)
        self.rank, self.details, self.bad_input = rank, details, bad_input


def _run_rank(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a rank runs. Leaves a note of an exception, with its time, before letting it through."""
    try:
        return function(*args)
    except Exception as error:
        rank = int(os.environ["RANK"])
        note = {
            "time": time.time_ns(),
            "rank": rank,
            "message": f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error),
            "details": traceback.format_exc(),
            "bad_input": isinstance(error, ValueError),
        }
        Path(folder, f"rank{rank}.json").write_text(json.dumps(note))
        raise


def launch(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Run `function(*args)` in `world_size` processes and return what rank 0 returned.

    `function` must be importable by name and its result picklable. The ranks find RANK, LOCAL_RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment, as under torchrun. Raises
    RankError when one fails; the others are stopped.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=f"torchseam-{uuid.uuid4().hex[:8]}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL,
        start_method="spawn",
    )
    # The launcher logs a failure on its own; the caller tells it better.
    elastic_log = logging.getLogger("torch.distributed.elastic")
    level = elastic_log.level
    elastic_log.setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="torchseam-") as folder:
        try:
            return elastic_launch(config, _run_rank)(folder, function, args)[0]
        except ChildFailedError as error:
            raise _first_failure(folder, error) from None
        finally:
            elastic_log.setLevel(level)


def _first_failure(folder: str, error: Any) -> RankError:
    """The failure that came first: by the ranks' own notes, or else (killed) by the launcher's word."""
    notes = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
    if notes:
        first = min(notes, key=lambda note: note["time"])
        return RankError(first["rank"], first["message"], first["details"], first["bad_input"])
    rank, failure = error.get_first_failure()
    message = f"rank {rank} ended with exit code {failure.exitcode} ({failure.message})"
    return RankError(rank, message, str(error), False)
