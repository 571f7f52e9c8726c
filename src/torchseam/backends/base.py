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
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
    """A process group as this rank sees it.

    nodes: how many hosts its ranks are on.
    attempt: keeps the talks of one attempt to open a backend apart from all others, so that a rank that left one
        early does not answer its question in the next.
    """

    name: str
    rank: int
    world_size: int
    device: torch.device
    nodes: int = 1
    attempt: str = ""

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
    missing: what this machine lacks for it on any group (`torchseam doctor`, and configurations that name it), or
        None; like `probe` otherwise.
    """

    name: str
    probe: Callable[[Group], str | None]
    open: Callable[[Group], Backend]
    missing: Callable[[], str | None] = lambda: None


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, None of any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def host() -> str:
    """What tells this node from others: nodes may share a host name, and containers of one node have several."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


@functools.cache
def _rounds(group: str, attempt: str) -> itertools.count[int]:
    return itertools.count()


def next_prefix(group: Group) -> str:
    """A part of the group's store that nobody has used. The same on all ranks that ask for it equally often."""
    return f"torchseam/{group.name}/{group.attempt}/{next(_rounds(group.name, group.attempt))}"


def agree(group: Group, answer: Any, timeout: datetime.timedelta | None = None) -> list[Any]:
    """The answers (anything JSON can hold) of all ranks, in rank order, on every rank.

    Goes through the group's key-value store: no device, no stream, and no hang beyond `timeout`, by default
    AGREE_TIMEOUT, after which it raises RuntimeError (of which DistStoreError is a kind). Collective: every rank must
    call it equally often.
    """
    if group.world_size == 1:
        return [answer]
    store = _get_process_group_store(group.process_group)
    prefix = next_prefix(group)
    store.set(f"{prefix}/{group.rank}", json.dumps(answer))
    keys = [f"{prefix}/{rank}" for rank in range(group.world_size)]
    store.wait(keys, timeout or AGREE_TIMEOUT)
    return [json.loads(store.get(key)) for key in keys]


def verdict(group: Group, objection: str | None, timeout: datetime.timedelta | None = None) -> str | None:
    """Whether all ranks may go on: None if none objects, else who objects to what. The same on every rank.

    A rank that does not answer within `timeout`, by default AGREE_TIMEOUT, counts as one that objects. The first rank
    that knows the outcome writes it down and the others keep to it, so a rank that comes late cannot think otherwise.
    Collective, as `agree`; raises only if the store is gone.
    """
    if group.world_size == 1:
        return objection
    timeout = timeout or AGREE_TIMEOUT
    store = _get_process_group_store(group.process_group)
    prefix = next_prefix(group)
    store.set(f"{prefix}/{group.rank}", json.dumps(objection))
    keys = [f"{prefix}/{rank}" for rank in range(group.world_size)]
    try:
        store.wait(keys, timeout)
        answers = [json.loads(store.get(key)) for key in keys]
    except RuntimeError:  # what stores raise when time is up: TCPStore DistStoreError, FileStore this
        late = f"did not answer within {timeout.total_seconds():g} s"
        answers = [json.loads(store.get(key)) if store.check([key]) else late for key in keys]
    outcome = store.compare_set(f"{prefix}/verdict", "", json.dumps(_told(answers)))
    return json.loads(outcome)


def _told(objections: list[str | None]) -> str | None:
    """One line for people: `ranks 1, 3: no multicast; rank 2: ...`; the reason alone when all ranks give it."""
    by_reason: dict[str, list[str]] = {}
    for rank, reason in enumerate(objections):
        if reason is not None:
            by_reason.setdefault(reason, []).append(str(rank))
    if len(by_reason) == 1 and len(by_reason[next(iter(by_reason))]) == len(objections):
        return next(iter(by_reason))
    told = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {reason}" for reason, ranks in by_reason.items()]
    return "; ".join(told) or None
