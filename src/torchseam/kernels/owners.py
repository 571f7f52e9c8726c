"""Who owns which rows in the two-shot kernel: `seam.owned_rows`, and the same as the kernel computes it."""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from torchseam.seam import owned_rows

__all__ = ["first_row", "owned_rows", "row_count"]


@triton.jit
def first_row(tokens, rank, WORLD: tl.constexpr):
    """The first of the rows that a rank owns."""
    return rank * (tokens // WORLD) + tl.minimum(tokens % WORLD, rank)


@triton.jit
def row_count(tokens, rank, WORLD: tl.constexpr):
    """How many rows a rank owns."""
    return tokens // WORLD + tl.where(tokens % WORLD > rank, 1, 0)
