"""Process groups that act, in one process, as if several ranks had all given the same summand.

With a real group of one rank an all_reduce changes nothing, and a fused seam that forgot it, did it twice or
took another group's would give the right values. Here a sum multiplies by the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_BACKEND = "pretend"


class _Done(torch._C._distributed_c10d.Work):
    """Work that was finished when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._future.set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        return self._future


class PretendGroup(dist.ProcessGroup):
    """`ranks` ranks with equal tensors: a sum is a multiplication in fp32, an average changes nothing."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, 1)
        self.ranks = ranks

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> _Done:
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        if op == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.copy_((tensor.float() * self.ranks).to(tensor.dtype))
        return _Done()

    def size(self) -> int:
        return self.ranks

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def pretend_group(ranks: int) -> str:
    """The name of a new pretended group. torch.distributed must be initialised, as by the fixture `one_rank`."""
    name = f"{_BACKEND}{ranks}"
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, lambda store, rank, size, timeout: PretendGroup(ranks), devices=["cpu"])
    return dist.new_group([0], backend=name).group_name
