"""What ranks run in test_cli_launch.py. A module of its own, because ranks import it by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from torchseam.cli.launch import launch, terminal


def rank() -> int:
    return int(os.environ["RANK"])


def wait_for_all() -> None:
    """A collective that ends only when every rank takes part."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))


def join_group() -> None:
    """All ranks connected and known to be so."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    wait_for_all()


def tell(first: object, second: object) -> dict[str, Any]:
    """Writes everywhere, and returns what it got and found."""
    print("stdout of a rank")
    print("stderr of a rank", file=sys.stderr)
    os.write(1, b"descriptor 1 of a rank\n")
    print(f"terminal of rank {rank()}", file=terminal())
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {"environment": {name: os.environ.get(name) for name in names}, "args": (first, second)}


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([1.0 + rank()])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def raise_while_others_wait() -> None:
    join_group()
    if rank() == 1:
        raise RuntimeError("the first failure")
    wait_for_all()


def raise_and_make_the_other_raise() -> None:
    """Rank 0 raises something of its own when rank 1's end has closed the connections."""
    join_group()
    if rank() == 1:
        raise RuntimeError("the first failure")
    try:
        wait_for_all()
    except RuntimeError as error:
        raise KeyError("a consequence") from error


def be_killed_while_others_wait() -> None:
    join_group()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_all()


def leave_without_a_word() -> None:
    if rank() == 0:
        print("what was written before", flush=True)
        os._exit(3)
    time.sleep(600)


def return_what_cannot_travel() -> Callable[[], None]:
    return lambda: None


def refuse_in_torchseam() -> None:
    from torchseam import SeamConfig

    SeamConfig(backend="carrier pigeon")


def refuse_in_a_library() -> None:
    int("eleven")


def wait_forever() -> None:
    """Rank 1 in C++, where Python handles no signal; rank 0 in a sleep."""
    join_group()
    print(f"pid {os.getpid()}", file=terminal())
    if rank() == 0:
        time.sleep(600)
    wait_for_all()


def command_that_waits(**_: object) -> None:
    """In the place of run_demo."""
    launch(wait_forever, 2)
