"""`collective`: torch.distributed's all_reduce (NCCL, gloo, ...), then one local operator.

The backend that runs everywhere. The sum is torch.distributed's own, so it has the bits of the
eager model's all_reduce: equal on all ranks, but for more than two ranks its order is that of the
library's algorithm and not the rank order of DESIGN section 4, rule 1 (which holds for our kernels).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchseam.backends import local
from torchseam.operands import Operands
from torchseam.seam import Seam

NAME = "collective"


def run(seam: Seam, operands: Operands) -> list[Tensor]:
    """Sum x over the ranks of `seam.reduce.group`, then the rest of the seam."""
    assert seam.reduce is not None
    reduced = _summand(operands)
    if reduced.numel():
        group = _resolve_process_group(seam.reduce.group)  # type: ignore[arg-type]
        dist.all_reduce(reduced, group=group)
    weights = operands.inner_weight, operands.weight
    rest = Operands(reduced, operands.residual, *weights, operands.scales, residual_out=operands.residual_out)
    outputs = local.run(seam.local(), rest)
    return [reduced, *outputs] if "reduced" in seam.outputs else outputs


def _summand(operands: Operands) -> Tensor:
    """x where it may be summed in place: in the memory given for the sum, which may be x's own, else in a copy."""
    x, memory = operands.x, operands.reduced_out
    if memory is None:
        return x.clone(memory_format=torch.contiguous_format)
    return memory if memory.data_ptr() == x.data_ptr() else memory.copy_(x)
