"""Everything after the (reduced) row is in registers: add, norm, quantise, store. DESIGN section 4.

`epilogue` is the whole of it for a program that holds a whole row; kernels that split a row over
programs call its parts and add up `sum_of_squares` themselves. Nothing here knows where a row came
from. Attributes are constexpr, spelled as in `seam.py`, with ABSENT for a part that a seam lacks.
Launch with `launch.Launch.options()`: contracted multiply-adds would break the contract.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from torchseam.kernels.casts import add_rounded, round_to, to_float32
from torchseam.kernels.divisions import inverse_root
from torchseam.kernels.quantize import quantize_row, within_row

#: A `WEIGHT` that means "no such norm" and a `SCHEME` that means "no quantiser".
ABSENT = "absent"
_ABSENT = tl.constexpr(ABSENT)


# ---- the norm ---------------------------------------------------------------------------------


@triton.jit
def sum_of_squares(h, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """The sum of h^2 in fp64, in the canonical order of DESIGN section 4.

    Segments of 8 neighbours are added in fp32 by a fixed tree, ((0+1)+(2+3))+((4+5)+(6+7)), and the
    segments in fp64, which is wide enough to hide their order: a GPU converts fp32 to fp64 at a sixteenth of
    the rate at which it adds, and eight times fewer conversions no longer show.
    """
    wide = within_row(to_float32(h, NATIVE), HIDDEN, BLOCK)
    sums = wide * wide
    even, odd = tl.split(tl.reshape(sums, (BLOCK // 2, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCK // 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCK // 8, 2)))
    return tl.sum((even + odd).to(tl.float64), axis=0)


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
    mean = tl.div_rn(squares.to(tl.float32), HIDDEN * 1.0)
    # Not the bare number: Triton makes an fp64 constant of one below 2^-126.
    shifted = mean + tl.full((), EPS, tl.float32)
    n = to_float32(h, NATIVE) * inverse_root(shifted, NATIVE)
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
    HIDDEN: tl.constexpr,
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
):
    """A whole row through [inner norm] -> [+ residual] -> [norm] -> [quantiser].

    x, residual, weights: [BLOCK], each in its own dtype (bf16, fp16, fp32), 0 at and after HIDDEN;
    those that the attributes don't ask for are not read and may be None. Returns residual_out (x's
    dtype; x itself when nothing is added), norm_out (`outputs.norm_dtype`), codes and scales as
    `quantize_row` does (norm_out twice without a quantiser). What is not stored costs nothing.
    """
    h = x
    if INNER_WEIGHT != _ABSENT:
        squares = sum_of_squares(h, HIDDEN, BLOCK, NATIVE)
        inner = normalize(h, inner_weight, squares, HIDDEN, INNER_WEIGHT, INNER_OFFSET, INNER_EPS, NATIVE)
        h = inner
        if inner.dtype != x.dtype:
            h = round_to(inner, x.dtype, NATIVE)
    if RESIDUAL:
        h = add_rounded(h, residual, NATIVE)
    if WEIGHT != _ABSENT:
        squares = sum_of_squares(h, HIDDEN, BLOCK, NATIVE)
        y = normalize(h, weight, squares, HIDDEN, WEIGHT, OFFSET, EPS, NATIVE)
    else:
        y = h
    if SCHEME != _ABSENT:
        codes, scales = quantize_row(
            y,
            scale,
            HIDDEN,
            BLOCK,
            SCHEME,
            RULE,
            GROUP,
            FLOOR,
            SCALE_RULE,
            SCALE_ROUNDING,
            SCALE_DTYPE,
            NATIVE,
        )
    else:
        codes, scales = y, y
    return h, y, codes, scales


# ---- stores -----------------------------------------------------------------------------------


@triton.jit
def _scale_offsets(row, columns, column_stride, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """Where the scales of `row` (int64) at `columns` lie, in elements (`formats.layout`)."""
    if LAYOUT == "swizzled":
        tile = (row // 128) * ((COUNT + 3) // 4) + columns // 4
        offsets = tile * 512 + (row % 32) * 16 + ((row // 32) % 4) * 4 + columns % 4
    elif LAYOUT == "column_major" or LAYOUT == "tma_aligned":
        offsets = columns.to(tl.int64) * column_stride + row
    else:
        offsets = row * COUNT + columns
    return offsets


@triton.jit
def _store_scale_row(
    scales_ptr, scales, row, column_stride, COUNT: tl.constexpr, WIDTH: tl.constexpr, LAYOUT: tl.constexpr
):
    columns = tl.arange(0, WIDTH)
    if LAYOUT == "swizzled":
        written = columns < (COUNT + 3) // 4 * 4
    else:
        written = columns < COUNT
    offsets = _scale_offsets(row, columns, column_stride, COUNT, LAYOUT)
    tl.store(scales_ptr + offsets, scales.to(scales_ptr.dtype.element_ty), mask=written)


@triton.jit
def store_quantized(
    codes_ptr,
    scales_ptr,
    codes,
    scales,
    row,
    column_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Store what `quantize_row` returned for `row` (int64): codes as bytes, scales in their layout.

    `codes_ptr` is uint8, contiguous rows, on an 8-byte boundary; `scales_ptr` fp32, or uint8 for one-byte
    scales, or None. `column_stride` is that of column_major and tma_aligned scales.
    """
    # Said to be aligned less than they are where they are more: so that a thread stores the codes of the eight
    # neighbours that it loaded, and not sixteen bytes, for which rows and codes would go through shared memory.
    PACKED: tl.constexpr = 2 if SCHEME == "nvfp4" else 1
    WIDTH: tl.constexpr = BLOCK // PACKED
    COUNT: tl.constexpr = HIDDEN // PACKED
    ALIGNED: tl.constexpr = 8 // PACKED if HIDDEN % 8 == 0 else 1
    columns = tl.arange(0, WIDTH)
    start = codes_ptr + row * COUNT
    if ALIGNED > 1:
        start = tl.multiple_of(start, ALIGNED)
    tl.store(start + columns, codes.to(tl.uint8), mask=columns < COUNT)
    if SCHEME == "fp8_token":
        tl.store(scales_ptr + row, scales)
    elif SCHEME != "fp8_static":
        _store_scale_row(scales_ptr, scales, row, column_stride, HIDDEN // GROUP, BLOCK // GROUP, LAYOUT)


@triton.jit
def store_padding_row(
    scales_ptr,
    row,
    column_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Zero the scales of a `row` (int64) past the last token, in a layout that has such rows."""
    zeros = tl.zeros((BLOCK // GROUP,), dtype=scales_ptr.dtype.element_ty)
    _store_scale_row(scales_ptr, zeros, row, column_stride, HIDDEN // GROUP, BLOCK // GROUP, LAYOUT)
