"""`torchseam doctor --check`: every backend that this machine can run, each kind of seam against the reference."""

from __future__ import annotations

import os
from typing import Any

from torchseam.checking.run import LOCAL, Result
from torchseam.cli.demo import LOG_VARIABLES
from torchseam.cli.errors import BadInput
from torchseam.cli.launch import RankError, launch
from torchseam.cli.preflight import check_compiler, gpus, processors
from torchseam.cli.progress import Steps
from torchseam.cli.tune import MOST_RANKS, NO_MULTICAST

#: In the order in which they are checked: from what all others rest on.
CHECKED = (LOCAL, "collective", "symmetric", "trtllm", "mnnvl")
#: What FlashInfer's backends take, the largest first.
_USUAL_RANKS = (8, 4, 2)
_UNASKED = "its kernels use NVLink multicast, whose state can outlive a process that is killed; ask with --multicast"


def run_checks(*, ranks: int | None, thorough: bool, multicast: bool, debug: bool) -> list[Result]:
    """The checks, one backend after another, each in processes of its own: what one breaks does not reach the next.

    Raises BadInput for a number of ranks that cannot be.
    """
    device = "cuda" if gpus() else "cpu"
    size = _ranks(ranks, device)
    if device == "cuda":
        check_compiler(device)
    for name, value in {} if multicast else NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    show_output = debug or any(name in os.environ for name in LOG_VARIABLES)
    return [_checked(name, device, size, thorough, multicast, show_output) for name in CHECKED]


def _ranks(ranks: int | None, device: str) -> int:
    """How many ranks those backends have that need several; 1 where there cannot be more."""
    there, what = (gpus(), "GPUs") if device == "cuda" else (processors(), "processors")
    if ranks is None:
        return next((n for n in _USUAL_RANKS if n <= there), 1) if device == "cuda" else min(2, there)
    if not 1 <= ranks <= MOST_RANKS:
        raise BadInput(f"--ranks is {ranks}; it may be 1 to {MOST_RANKS}")
    if ranks > there:
        raise BadInput(f"--ranks {ranks} needs {ranks} {what}, there are {there}; use --ranks {there}")
    return ranks


def _checked(name: str, device: str, ranks: int, thorough: bool, multicast: bool, show_output: bool) -> Result:
    from torchseam.backends import select

    size = 1 if name == LOCAL else ranks
    why = None if name == LOCAL else select.missing(name)
    if why is None and name != LOCAL and size < 2:
        why = "there are no two ranks: one processor" if device == "cpu" else "there are no two ranks: one GPU"
    if why is None and name == "mnnvl" and not multicast:
        why = _UNASKED
    if why is not None:
        return Result(name, size, skipped=why)
    steps = Steps()
    try:
        result: Result = launch(check_rank, size, name, device, thorough, show_output=show_output)
        return result
    except RankError as error:
        steps.cut_short()
        end = f"\n{error.details}" if show_output and error.details else ""
        return Result(name, size, failed=f"rank {error.rank}: {error}{end}")
    except BaseException:
        steps.cut_short()
        raise


def check_rank(name: str, device: str, thorough: bool) -> Result:
    """One rank of the check of one backend."""
    import torch
    import torch.distributed as dist

    from torchseam.backends import select
    from torchseam.checking import run
    from torchseam.checking.cases import cases

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
        dist.init_process_group("nccl", device_id=where)
    else:
        torch.set_num_threads(max(1, processors() // size))
        dist.init_process_group("gloo")
    group = dist.distributed_c10d._get_default_group().group_name
    table = list(cases(run.reduce_of(name, group), thorough=thorough))
    with Steps(rank == 0).bar(f"Checking {name}, {size} rank{'s' * (size > 1)}", len(table)) as tick:
        result = run.check(name, table, where, rank, size, tick)
    dist.barrier()
    select.reset()
    dist.destroy_process_group()
    return result


def show(results: list[Result]) -> None:
    """A table for people; what is wrong and what went elsewhere under it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table()
    for title in ("backend", "ranks", "cases", "against the reference"):
        table.add_column(title, overflow="fold")
    for result in results:
        table.add_row(result.backend, str(result.world_size), str(result.cases or "-"), _outcome(result, escape))
    console.print(table)
    for result in results:
        for line in (*result.told, *([result.failed] if result.failed else [])):
            console.print(f"[red]✗[/] {escape(f'{result.backend}: {line}')}", soft_wrap=True)
        for line in result.remarks:
            console.print(escape(f"{result.backend}: {line}"), soft_wrap=True)


def _outcome(result: Result, escape: Any) -> str:
    if result.skipped is not None:
        return f"[yellow]skipped[/]: {escape(result.skipped)}"
    if result.failed is not None:
        return "[red]failed[/]"
    if result.wrong:
        return f"[red]{result.wrong} wrong[/]"
    return f"[green]right[/], {result.seconds:.0f} s"
