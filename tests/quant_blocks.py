"""A seam up to its norm, for tests of what comes after it, and how fused and eager are compared."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from blocks import HIDDEN, LlamaNorm, same_bits
from graphs import trace_fused

TOKENS = 64  # enough rows for a division by 448 and a multiplication by its reciprocal to differ


class Block(torch.nn.Module):
    """all_reduce + residual + norm, then what a test does with (y, h)."""

    def __init__(self, tail) -> None:
        super().__init__()
        weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(7)) + 0.5
        self.norm, self.tail = LlamaNorm(weight.bfloat16()), tail

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        h = funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + residual
        return (*self.tail(self.norm(h), h), h)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


SHARED = "all_reduce + residual + rms_norm"


def check(tail, *schemes: str, x: Tensor | None = None, residual: Tensor | None = None, strict=True, kinds=None):
    """Fused and eager give the same bits, and exactly these schemes are in the seam (or these are the seams).

    Returns the report.

    Not `strict`: whichever NaN, and whatever strides (torch gives empty tensors strange ones).
    """
    block = Block(tail)
    x = rows(TOKENS, HIDDEN) if x is None else x
    residual = rows(*x.shape, seed=1) if residual is None else residual
    want = block(x, residual)
    got = trace_fused(block, x, residual)
    assert got.kinds() == ([" + ".join([SHARED, *schemes])] if kinds is None else kinds)
    assert len(want) == len(got.results)
    for i, (a, b) in enumerate(zip(want, got.results, strict=True)):
        if strict:
            assert same_bits(a, b), f"output {i} differs"
        else:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert torch.equal(a.float().nan_to_num(nan=-1e30), b.float().nan_to_num(nan=-1e30)), f"output {i} differs"
    return got.report
