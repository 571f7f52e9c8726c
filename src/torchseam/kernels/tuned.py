"""Launch choices that were timed on this machine, as a value; launch.py has those that are shipped.

`torchseam tune` finds them, tuned_file.py keeps them. Which choice is taken never changes a bit of a result.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

from torchseam.kernels.launch import CHOICES, PACKET, WARP, Launch, OneShot, block_of
from torchseam.seam import Quant

LOCAL, ONE_SHOT = "local", "one_shot"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

#: A row serves calls of at most its T and at least a quarter of it: in a table timed at T = 1, 4, 16, ... every T up
#: to the largest has one, and a table of large T alone says nothing about small ones.
REACH = 4

#: Of `OneShot.ahead`: so many rows are held in registers at once, and the kernel's source grows with it. 8 is the most
#: that is tried (tuning/candidates.py).
_MOST_AHEAD = 32

Choice = Launch | OneShot
#: (tokens, hidden, dtype, scheme, what H must be a multiple of) -> the tuned choice, or None: as shipped.
Chooser = Callable[[int, int, torch.dtype, str, int], Choice | None]


@dataclass(frozen=True)
class Shape:
    """What is timed: T rows of H elements, residual + norm + quantise; `world_size` 1 for the local kernel."""

    kernel: str
    world_size: int
    scheme: str
    dtype: str
    hidden: int
    tokens: int

    @property
    def quant(self) -> Quant:
        return Quant(self.scheme)  # type: ignore[arg-type]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Row:
    """The choice for a shape and what it takes, us; `launch` None: the shipped choice is kept."""

    shape: Shape
    launch: Choice | None
    microseconds: float
    shipped_microseconds: float


@dataclass(frozen=True)
class Table:
    """Rows of one machine, each shape at most once."""

    rows: tuple[Row, ...] = ()

    def with_rows(self, rows: Iterable[Row]) -> Table:
        """This table with `rows` added, or put in the place of those of the same shapes."""
        by_shape = {row.shape: row for row in (*self.rows, *rows)}
        return Table(tuple(sorted(by_shape.values(), key=lambda row: tuple(asdict(row.shape).values()))))

    def digest(self, kernel: str, world_size: int) -> str:
        """Equal where the same calls get the same launches of a kernel; empty where all are as shipped."""
        told = [
            [asdict(row.shape), row.launch and asdict(row.launch)]
            for row in Table().with_rows(self.rows).rows
            if (row.shape.kernel, row.shape.world_size) == (kernel, world_size)
        ]
        if not any(launch for _, launch in told):
            return ""
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def chooser(self, kernel: str, world_size: int, multiprocessors: int) -> Chooser | None:
        """What looks a call up, remembering its answers; None where there is nothing to look up.

        The rule: of the rows with the call's H, dtype and scheme that with the least T at or above the call's, if it
        is at most REACH times as much. An illegal choice (a group size that the parts of a row would cut) is none.
        """
        measured: dict[tuple[int, torch.dtype, str], list[tuple[int, Choice | None]]] = {}
        for row in sorted(self.rows, key=lambda row: row.shape.tokens):
            shape = row.shape
            if (shape.kernel, shape.world_size) == (kernel, world_size):
                key = (shape.hidden, DTYPES[shape.dtype], shape.scheme)
                measured.setdefault(key, []).append((shape.tokens, row.launch))
        if not any(launch for rows in measured.values() for _, launch in rows):
            return None

        @functools.lru_cache(maxsize=4096)
        def choose(tokens: int, hidden: int, dtype: torch.dtype, scheme: str, multiple_of: int) -> Choice | None:
            rows = measured.get((hidden, dtype, scheme), [])
            at = bisect_left(rows, tokens, key=lambda row: row[0])
            if at == len(rows) or rows[at][0] > REACH * tokens:
                return None
            launch = rows[at][1]
            if launch is None or not is_legal(launch, tokens, hidden, dtype.itemsize, multiple_of, multiprocessors):
                return None
            return launch

        return choose


def is_legal(launch: Choice, tokens: int, hidden: int, itemsize: int, multiple_of: int, multiprocessors: int) -> bool:
    """Whether a kernel may be launched so for T rows of H elements; then it is also for fewer rows.

    multiple_of: of how many elements each part of a row must be a multiple (`Quant.multiple_of`).
    """
    if isinstance(launch, Launch):
        return launch in CHOICES
    parts, warps = launch.parts, launch.num_warps
    if min(parts, warps, launch.ahead) < 1 or warps & (warps - 1) or launch.pushers < 0 or launch.ahead > _MOST_AHEAD:
        return False
    if hidden % (parts * math.lcm(PACKET // itemsize, multiple_of)):
        return False
    # A lane for each part: `packets.exchange` looks at so many, and sums no others.
    if parts > block_of(hidden // parts) // 8:
        return False
    # Two threads of one packet would both push it.
    if warps > 32 or warps * WARP > block_of(hidden // parts) * itemsize // PACKET:
        return False
    if parts > 1:
        # Every program has one part of one row, and all programs run at once.
        return not launch.pushers and tokens * parts <= multiprocessors
    return launch.pushers < multiprocessors
