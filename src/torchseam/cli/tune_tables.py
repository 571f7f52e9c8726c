"""What people see of `torchseam tune`: the times of each choice, and what is in the files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchseam.config import TUNED_VARIABLE
from torchseam.kernels import tuned_file
from torchseam.kernels.launch import Launch
from torchseam.kernels.tuned import Choice, Row, Shape
from torchseam.tuning.search import MARGIN, Timed

#: Columns of text beside the times, and of each time with its borders: as many T as fit stand in one table.
_LABEL, _CELL = 34, 12
_LEGEND = "us; * chosen, s shipped, ! other bits than shipped: not used, x cannot be launched on this GPU"


def label(choice: Choice) -> str:
    """A choice in words."""
    words = [f"{choice.num_warps} warp{'s' * (choice.num_warps > 1)}"]
    if not isinstance(choice, Launch):
        words += [f"{choice.parts} parts"] if choice.parts > 1 else []
        words += [f"{choice.pushers} pushers, {choice.ahead} ahead"] if choice.pushers else []
    return ", ".join(words)


def title_of(shape: Shape) -> str:
    where = f", {shape.world_size} ranks" if shape.world_size > 1 else ""
    return f"{shape.kernel}{where}, {shape.scheme}, {shape.dtype}, H={shape.hidden}"


def _without_tokens(shape: Shape) -> tuple[object, ...]:
    return shape.kernel, shape.world_size, shape.scheme, shape.dtype, shape.hidden


def show_search(machine: tuned_file.Machine, found: Sequence[Timed], path: Path, left_out: Sequence[Shape]) -> None:
    """The times of a search, and what was written where."""
    console = Console()
    console.print(escape(f"{machine.gpu}, torch {machine.torch}, Triton {machine.triton}"))
    for _, group in itertools.groupby(found, key=lambda timed: _without_tokens(timed.shape)):
        columns = list(group)
        many = max(1, (console.width - _LABEL) // _CELL)
        for first in range(0, len(columns), many):
            console.print()
            console.print(escape(title_of(columns[first].shape)), style="italic")
            console.print(_times(columns[first : first + many]))
    console.print(_LEGEND)
    for shape in left_out:
        console.print(escape(f"{title_of(shape)}, T={shape.tokens}: more than the group's workspace takes; not timed"))
    if not found:
        console.print("nothing was timed, and nothing is written")
        return
    console.print(f"{_summary(found)} The results have the same bits.")
    used = "processes that start from now on use it" if tuned_file.in_use() else f"not used while {_setting()} is set"
    console.print(f"written to {escape(str(path))}; {escape(used)}", soft_wrap=True)


def _summary(found: Sequence[Timed]) -> str:
    changed = sum(timed.row.launch is not None for timed in found)
    faster = f"more than {(1 - MARGIN) * 100:.0f} % faster, twice in a row"
    told = f"{changed} of {len(found)} shapes get another launch than shipped"
    if changed == len(found):
        return f"{told}: it was {faster}."
    return f"{told}; {'the others' if changed else 'all'} keep it: nothing was {faster}."


def _setting() -> str:
    return f"{TUNED_VARIABLE}={os.environ.get(TUNED_VARIABLE)}"


def _times(columns: Sequence[Timed]) -> Table:
    """Choices down, T across."""
    table = Table()
    table.add_column("launch", no_wrap=True)
    for timed in columns:
        table.add_column(f"T={timed.shape.tokens}", justify="right", no_wrap=True)
    for choice in dict.fromkeys(choice for timed in columns for choice, _ in timed.times):
        table.add_row(label(choice), *(_cell(timed, choice) for timed in columns))
    return table


def _cell(timed: Timed, choice: Choice) -> str:
    times = dict(timed.times)
    if choice not in times:
        return "-"
    us = times[choice]
    marks = ("*" if choice == timed.chosen else "") + ("s" if choice == timed.shipped else "")
    mark = "x " if choice in timed.failed else "! "
    text = f"{us:.2f} {marks:2}" if us is not None else mark
    return f"[bold green]{text}[/]" if choice == timed.chosen else text


def show_file(own: Mapping[Path, str]) -> None:
    """What is in every file; `own`: those that this machine's GPUs read, with the name of each GPU."""
    console = Console()
    files = tuned_file.files()
    folder = escape(str(tuned_file.folder()))
    try:
        tuned_file.check_setting()
    except ValueError as error:
        console.print(escape(f"{error}; it counts as on"), soft_wrap=True)
    without = [gpu for path, gpu in own.items() if path not in files]
    if len(without) == len(own):
        console.print(f"no tuned launches for this machine in {folder}", soft_wrap=True)
        console.print("launches are as shipped; `torchseam tune` times others (it needs a CUDA GPU)", soft_wrap=True)
    else:
        for gpu in without:
            console.print(f"no tuned launches for {escape(gpu)} in {folder}: there they are as shipped", soft_wrap=True)
    for path in files:
        used = "another machine's, or of other versions" if path not in own else "in use"
        if path in own and not tuned_file.in_use():
            used = f"not in use: {_setting()}"
        console.print(f"{escape(str(path))} ({escape(used)})", soft_wrap=True)
        try:
            machine, table = tuned_file.read(path)
        except (tuned_file.Unreadable, OSError) as error:
            console.print(escape(f"ignored: {error}"), soft_wrap=True)
            continue
        if path in own and path != tuned_file.path_of(machine):
            console.print(escape(f"ignored: it was made for {machine}"), soft_wrap=True)
            continue
        console.print(
            escape(f"{machine.gpu}, torch {machine.torch}, Triton {machine.triton}, kernels {machine.kernels}")
        )
        console.print(_rows(table.rows))


def _rows(rows: Iterable[Row]) -> Table:
    table = Table()
    for name in ("seam", "T", "launch"):
        table.add_column(name)
    for name in ("us", "shipped"):
        table.add_column(name, justify="right")
    for row in rows:
        launch = "as shipped" if row.launch is None else label(row.launch)
        us = f"{row.microseconds:.2f}", f"{row.shipped_microseconds:.2f}"
        table.add_row(title_of(row.shape), str(row.shape.tokens), launch, *us)
    return table
