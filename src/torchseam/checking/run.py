"""One backend on one group of ranks: every case, eagerly and in a replayed CUDA graph, against the reference."""

from __future__ import annotations

import dataclasses
import faulthandler
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchseam.backends import collective, local, select
from torchseam.checking.cases import Case, operands
from torchseam.checking.compare import differences, storage
from torchseam.operands import Operands
from torchseam.seam import Reduce

#: What checks seams that reduce nothing.
LOCAL = "local"
#: Those that sum in rank order and quantise bit for bit.
_OWN = (LOCAL, collective.NAME, "symmetric")
_REPLAYS = 3
#: Seconds for one case, its compilation included (FlashInfer compiles for minutes at first); then the rank ends.
_STALLED = 900
#: Mismatches that are told; the others are counted.
_TOLD = 20


@dataclass
class Result:
    """What came of one backend. `skipped` says why it did not run at all, `failed` what ended it half-way.

    cases: how many were run. wrong: how many of them any rank found wrong. told: the first of those, a line each.
    remarks: what went elsewhere than into the backend's own kernel, and why.
    """

    backend: str
    world_size: int
    skipped: str | None = None
    failed: str | None = None
    cases: int = 0
    wrong: int = 0
    seconds: float = 0.0
    told: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        """Whether the backend must not be relied on here."""
        return self.wrong > 0 or self.failed is not None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def check(
    backend: str,
    table: Sequence[Case],
    device: torch.device,
    rank: int,
    world_size: int,
    tick: Callable[[object], None],
) -> Result:
    """Run the table on the default process group (`local`: without one). The same result on every rank.

    A backend that cannot run on this group is skipped, with what the group's choice says. Raises what a case raises
    after that. A rank that makes no progress for a quarter of an hour is ended, with its stack in the log.
    """
    started, result = time.monotonic(), Result(backend, world_size)
    verdicts: list[list[str]] = []
    without_kernel = 0
    try:
        for seed, case in enumerate(table):
            faulthandler.dump_traceback_later(_STALLED, exit=True)
            given = operands(case, device, rank, seed)
            try:
                got = select.run(case.seam, given)
            except ValueError as error:
                if verdicts:
                    raise
                result.skipped = str(error)
                return result
            verdicts.append(_wrong(case, given, got, backend))
            if device.type == "cuda":
                without_kernel += not local.has_kernel_for(given.x, case.seam.quants)
                verdicts[-1] += _captured(case, given, backend, rank, seed)
            tick(None)
        found = _of_all_ranks(verdicts, world_size)
    finally:
        faulthandler.cancel_dump_traceback_later()
    result.cases, result.wrong = len(found), sum(map(bool, found))
    told = [f"{case}: {text}" for case, text in zip(table, found, strict=True) if text]
    result.told = told[:_TOLD]
    result.remarks = [] if backend == LOCAL else select.remarks(_group(table))
    if without_kernel:
        result.remarks.append(f"{without_kernel} cases ran as plain torch operators: no Triton kernel takes them here")
    result.seconds = time.monotonic() - started
    return result


def _group(table: Sequence[Case]) -> str:
    return next(case.seam.reduce.group for case in table if case.seam.reduce is not None)


def _wrong(case: Case, given: Operands, got: list[Tensor], backend: str) -> list[str]:
    """What this rank finds wrong. Collective where the seam reduces."""
    own = backend in _OWN
    exact_sum = own or dist.get_world_size() == 2  # of two, both orders are one
    found = differences(case.seam, given, got, _sum_for(backend), exact_sum=exact_sum, own=own)
    if case.seam.reduce is not None:
        found += [f"output {i} differs from rank 0's" for i, output in enumerate(got) if not _as_on_rank_0(output)]
    return found


def _sum_for(backend: str) -> Callable[[Tensor], Tensor]:
    """What gives the sum that the backend's is held to."""
    return _library_sum if backend == collective.NAME else _sum_in_rank_order


def _library_sum(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def _sum_in_rank_order(x: Tensor) -> Tensor:
    """In fp32, rounded once."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    return total.to(x.dtype)


def _as_on_rank_0(output: Tensor) -> bool:
    mine = storage(output)
    first = mine.clone()
    dist.broadcast(first, 0)
    return torch.equal(mine, first)


def _captured(case: Case, given: Operands, backend: str, rank: int, seed: int) -> list[str]:
    """The same in a CUDA graph, replayed with other inputs."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = select.run(case.seam, given)
    found = []
    for replay in range(_REPLAYS):
        fresh = operands(case, given.x.device, rank, 7919 * (seed + 1) + replay)
        given.x.copy_(fresh.x)
        if given.residual is not None and fresh.residual is not None:
            given.residual.copy_(fresh.residual)
        graph.replay()
        found += [f"replay {replay}: {text}" for text in _wrong(case, given, captured, backend)]
    return found


def _of_all_ranks(verdicts: list[list[str]], world_size: int) -> list[str]:
    """For each case what the ranks found, in words; "" where none found anything."""
    every: list[Any] = [verdicts]
    if world_size > 1:
        every = [None] * world_size
        dist.all_gather_object(every, verdicts)
    told = []
    for texts in zip(*every, strict=True):
        ranks = [f"rank {rank}: {'; '.join(text)}" for rank, text in enumerate(texts) if text]
        told.append("; ".join(ranks))
    return told


def reduce_of(backend: str, group: str) -> Reduce | None:
    """What the cases of a backend reduce by."""
    return None if backend == LOCAL else Reduce(group, backend)
