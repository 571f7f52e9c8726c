"""`collective`: torch.distributed's all_reduce (NCCL, gloo, ...), then one local operator.

The backend that runs everywhere. The sum is torch.distributed's own, so it has the bits of the
eager model's all_reduce: equal on all ranks, but for more than two ranks its order is that of the
library's algorithm and not the rank order of DESIGN section 4, rule 1 (which holds for our kernels).

Every rank computes every row here, so a sharded residual is gathered before it is read, and one that is emitted has
all its rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchseam.backends import local
from torchseam.operands import Operands
from torchseam.seam import Seam, owned_rows

NAME = "collective"
#: torch 2.13 has another name for it, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def run(seam: Seam, operands: Operands) -> list[Tensor]:
    """Sum x over the ranks of `seam.reduce.group`, then the rest of the seam."""
    assert seam.reduce is not None
    reduced, residual = _summand(operands), operands.residual
    if reduced.numel():
        group = _resolve_process_group(seam.reduce.group)  # type: ignore[arg-type]
        dist.all_reduce(reduced, group=group)
        if residual is not None and seam.reduce.residual_in == "sharded":
            residual = _gathered(residual, group)
    weights = operands.inner_weight, operands.weight
    rest = Operands(reduced, residual, *weights, operands.scales, residual_out=operands.residual_out)
    outputs = local.run(seam.local(), rest)
    return [reduced, *outputs] if "reduced" in seam.outputs else outputs


def _summand(operands: Operands) -> Tensor:
    """x where it may be summed in place: in the memory given for the sum, which may be x's own, else in a copy."""
    x, memory = operands.x, operands.reduced_out
    if memory is None:
        return x.clone(memory_format=torch.contiguous_format)
    return memory if memory.data_ptr() == x.data_ptr() else memory.copy_(x)


def _gathered(residual: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All rows of a residual [..., H] of which each rank has those that it owns. Collective; its bits are not changed.

    Ranks with one row less send a row of zeros, because all must send equally much.
    """
    rank, world_size = group.rank(), group.size()
    rows = residual.reshape(-1, residual.shape[-1])
    owned = [owned_rows(len(rows), r, world_size) for r in range(world_size)]
    most, mine = len(owned[0]), owned[rank]
    sent = rows[mine.start : mine.stop].contiguous()
    if len(mine) < most:
        sent = torch.cat([sent, sent.new_zeros(1, sent.shape[1])])
    received = sent.new_empty(world_size * most, sent.shape[1])
    # As bytes: they are only moved, and gloo does not know every dtype.
    _all_gather(received.view(torch.uint8), sent.view(torch.uint8), group=group)
    if len(rows) < len(received):
        received = torch.cat([received[r * most :][: len(owned[r])] for r in range(world_size)])
    return received.view(residual.shape)
