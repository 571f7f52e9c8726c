"""Who owns which rows in the two-shot kernel: neighbours, in rank order, and the first T % W ranks one row more."""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def first_row(tokens, rank, WORLD: tl.constexpr):
    """The first of the rows that a rank owns."""
    return rank * (tokens // WORLD) + tl.minimum(tokens % WORLD, rank)


@triton.jit
def row_count(tokens, rank, WORLD: tl.constexpr):
    """How many rows a rank owns."""
    return tokens // WORLD + tl.where(tokens % WORLD > rank, 1, 0)


def owned_rows(tokens: int, rank: int, world_size: int) -> range:
    """The rows that a rank owns."""
    each, more = divmod(tokens, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))
