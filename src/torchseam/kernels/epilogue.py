"""Everything after the (reduced) row is in registers: add, norm, quantise, store. DESIGN section 4.

`epilogue` is the whole of it, for a program that holds a whole row of HIDDEN elements (PARTS = 1, WIDTH =
HIDDEN) and for PARTS programs that hold WIDTH neighbours each and exchange what depends on all of them.
Nothing here knows where a row came from. Attributes are constexpr, spelled as in `seam.py`, with ABSENT
for a part that a seam lacks.
Launch with `launch.Launch.options()`: contracted multiply-adds would break the contract.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from torchseam.kernels.casts import add_rounded, round_to, to_float32
from torchseam.kernels.divisions import inverse_root
from torchseam.kernels.packets import exchange
from torchseam.kernels.quantize import quantize_row, within_row

#: A `WEIGHT` that means "no such norm" and a `SCHEME` that means "no quantiser".
ABSENT = "absent"
_ABSENT = tl.constexpr(ABSENT)
#: Values that the parts of a row exchange: two sums of squares and one largest magnitude.
EXCHANGES = 3


# ---- the norm ---------------------------------------------------------------------------------


@triton.jit
def sum_of_squares(
    h,
    slots,
    part,
    call,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    PARTS: tl.constexpr,
    PTX: tl.constexpr,
):
    """The sum of h^2 over the row in fp64, in the canonical order of DESIGN section 4.

    Segments of 8 neighbours are added in fp32 by a fixed tree, ((0+1)+(2+3))+((4+5)+(6+7)), and the
    segments in fp64, which is wide enough to hide their order: a GPU converts fp32 to fp64 at a sixteenth of
    the rate at which it adds, and eight times fewer conversions no longer show.
    """
    wide = within_row(to_float32(h, NATIVE), WIDTH, BLOCK)
    sums = wide * wide
    even, odd = tl.split(tl.reshape(sums, (BLOCK // 2, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCK // 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCK // 8, 2)))
    squares = tl.sum((even + odd).to(tl.float64), axis=0)
    if PARTS > 1:
        squares = tl.sum(exchange(squares, slots, part, call, PARTS, BLOCK // 8, PTX), axis=0)
    return squares


@triton.jit
def normalize(
    h,
    weight,
    squares,
    HIDDEN: tl.constexpr,
    WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """h * rsqrt(squares / HIDDEN + EPS), weighted, in the dtype of `outputs.norm_dtype`.

    h [n] is any part of a row of HIDDEN elements, weight [n] the same part of the weight.
    """
    if HIDDEN & (HIDDEN - 1) == 0:
        mean = squares.to(tl.float32) * (1.0 / HIDDEN)  # a power of two: the same quotient
    else:
        mean = tl.div_rn(squares.to(tl.float32), HIDDEN * 1.0)
    # Not the bare number: Triton makes an fp64 constant of one below 2^-126.
    shifted = mean + tl.full((), EPS, tl.float32)
    n = to_float32(h, NATIVE) * inverse_root(shifted)
    if WEIGHT == "none":
        y = round_to(n, h.dtype, NATIVE)
    elif WEIGHT == "before_cast":
        wide_weight = to_float32(weight, NATIVE)
        if OFFSET:
            wide_weight = 1.0 + wide_weight
        y = round_to(n * wide_weight, h.dtype, NATIVE)
    else:
        product = to_float32(weight, NATIVE) * to_float32(round_to(n, h.dtype, NATIVE), NATIVE)
        # Of bf16, fp16 and fp32, any two that differ are promoted to fp32.
        if weight.dtype == h.dtype:
            y = round_to(product, h.dtype, NATIVE)
        else:
            y = product
    return y


# ---- all of it --------------------------------------------------------------------------------


@triton.jit
def epilogue(
    x,
    residual,
    inner_weight,
    weight,
    scale,
    slots,
    part,
    call,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INNER_WEIGHT: tl.constexpr,
    INNER_OFFSET: tl.constexpr,
    INNER_EPS: tl.constexpr,
    WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    SCHEME: tl.constexpr,
    RULE: tl.constexpr,
    GROUP: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    SCALE_ROUNDING: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PTX: tl.constexpr,
):
    """A row, or its part `part` of PARTS, through [inner norm] -> [+ residual] -> [norm] -> [quantiser].

    x, residual, weights: [BLOCK], each in its own dtype (bf16, fp16, fp32), 0 at and after WIDTH;
    those that the attributes don't ask for are not read and may be None. Where PARTS > 1, `slots` points
    at the row's packets of the first of EXCHANGES exchanges, each SLOTS packets after the one before, and
    `call` is as `packets.exchange` wants it; else they are not read. Returns residual_out (x's
    dtype; x itself when nothing is added), norm_out (`outputs.norm_dtype`), codes and scales as
    `quantize_row` does (norm_out twice without a quantiser). What is not stored costs nothing.
    """
    second, third = slots, slots
    if PARTS > 1:
        second, third = slots + SLOTS * 4, slots + SLOTS * 8
    h = x
    if INNER_WEIGHT != _ABSENT:
        squares = sum_of_squares(h, slots, part, call, WIDTH, BLOCK, NATIVE, PARTS, PTX)
        inner = normalize(h, inner_weight, squares, HIDDEN, INNER_WEIGHT, INNER_OFFSET, INNER_EPS, NATIVE)
        h = inner
        if inner.dtype != x.dtype:
            h = round_to(inner, x.dtype, NATIVE)
    if RESIDUAL:
        h = add_rounded(h, residual, NATIVE)
    if WEIGHT != _ABSENT:
        squares = sum_of_squares(h, second, part, call, WIDTH, BLOCK, NATIVE, PARTS, PTX)
        y = normalize(h, weight, squares, HIDDEN, WEIGHT, OFFSET, EPS, NATIVE)
    else:
        y = h
    if SCHEME != _ABSENT:
        codes, scales = quantize_row(
            y,
            scale,
            third,
            part,
            call,
            WIDTH,
            BLOCK,
            SCHEME,
            RULE,
            GROUP,
            FLOOR,
            SCALE_RULE,
            SCALE_ROUNDING,
            SCALE_DTYPE,
            NATIVE,
            PARTS,
            PTX,
        )
    else:
        codes, scales = y, y
    return h, y, codes, scales
