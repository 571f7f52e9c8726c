"""What a backend is, and how the ranks of a group agree on one (DESIGN section 5).

A backend comes to be in two steps. `Kind.probe` says, on this rank alone and without touching the
others, whether it could run; the ranks put their answers together (`agree`); where all said yes,
`Kind.open` makes it on all of them. Nothing here decides which backend is best: that is `select`.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group

from torchseam.operands import Operands
from torchseam.seam import Seam

#: How long one rank waits for another's answer. Ranks reach a seam together but for compilation, which
#: one rank may do while another has it cached.
AGREE_TIMEOUT = datetime.timedelta(minutes=10)


class Unavailable(Exception):
    """A backend cannot be made, and why; raised alike on all ranks of the group."""


@dataclass(frozen=True)
class Group:
    """A process group as this rank sees it."""

    name: str
    rank: int
    world_size: int
    device: torch.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        return _resolve_process_group(self.name)  # type: ignore[arg-type]


class Backend(Protocol):
    """One backend, open on one group."""

    name: str

    def refuses(self, seam: Seam, operands: Operands) -> str | None:
        """Why this call must go to `collective` instead, or None. Equal on all ranks: it looks at
        shapes, dtypes and the seam only."""

    def run(self, seam: Seam, operands: Operands) -> list[Tensor]:
        """The outputs of `reference.run`, on every rank."""

    def memory(self) -> int:
        """Bytes of device memory that this rank holds for it."""

    def close(self) -> None:
        """Give everything back. Called at most once, on all ranks, never while a captured graph may replay."""


@dataclass(frozen=True)
class Kind:
    """How a backend of one name comes to be.

    probe: why this rank could not run it on this group, or None; bounded time, no communication, never raises.
    open: collective; returns on every rank or raises `Unavailable` on every rank.
    """

    name: str
    probe: Callable[[Group], str | None]
    open: Callable[[Group], Backend]


@functools.cache
def _rounds(group: str) -> itertools.count[int]:
    return itertools.count()


def agree(group: Group, answer: Any, timeout: datetime.timedelta = AGREE_TIMEOUT) -> list[Any]:
    """The answers (anything JSON can hold) of all ranks, in rank order, on every rank.

    Goes through the group's key-value store: no device, no stream, and no hang beyond `timeout`, after
    which it raises torch.distributed.DistStoreError. Collective: every rank must call it equally often.
    """
    if group.world_size == 1:
        return [answer]
    store = _get_process_group_store(group.process_group)
    prefix = f"torchseam/{group.name}/{next(_rounds(group.name))}"
    store.set(f"{prefix}/{group.rank}", json.dumps(answer))
    keys = [f"{prefix}/{rank}" for rank in range(group.world_size)]
    store.wait(keys, timeout)
    return [json.loads(store.get(key)) for key in keys]
