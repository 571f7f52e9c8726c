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

from torchseam.kernels.casts import (
    divide,
    from_bits,
    from_e4m3,
    from_e8m0,
    magnitude_bits,
    round_to,
    to_e2m1,
    to_e4m3,
    to_e4m3_native,
    to_e8m0,
    to_float32,
)

#: A `WEIGHT` that means "no such norm" and a `SCHEME` that means "no quantiser".
ABSENT = "absent"
_ABSENT = tl.constexpr(ABSENT)


# ---- the norm ---------------------------------------------------------------------------------


@triton.jit
def within_row(values, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """values [BLOCK] with 0 at and after HIDDEN, whatever arithmetic made of the masked lanes."""
    if BLOCK != HIDDEN:
        values = tl.where(tl.arange(0, BLOCK) < HIDDEN, values, 0.0)
    return values


@triton.jit
def add_residual(x, residual):
    """round(fp32(x) + fp32(residual)), in x's dtype."""
    return round_to(to_float32(x) + to_float32(residual), x.dtype)


@triton.jit
def sum_of_squares(h, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of h^2 in fp64, in the canonical order of DESIGN section 4.

    Segments of 8 neighbours are added in fp32 by a fixed tree, ((0+1)+(2+3))+((4+5)+(6+7)), and the
    segments in fp64, which is wide enough to hide their order: a GPU converts fp32 to fp64 at a sixteenth of
    the rate at which it adds, and eight times fewer conversions no longer show.
    """
    wide = within_row(to_float32(h), HIDDEN, BLOCK)
    sums = wide * wide
    even, odd = tl.split(tl.reshape(sums, (BLOCK // 2, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCK // 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCK // 8, 2)))
    return tl.sum((even + odd).to(tl.float64), axis=0)


@triton.jit
def normalize(h, weight, squares, HIDDEN: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, EPS: tl.constexpr):
    """h * rsqrt(squares / HIDDEN + EPS), weighted, in the dtype of `outputs.norm_dtype`.

    h [n] is any part of a row of HIDDEN elements, weight [n] the same part of the weight.
    """
    mean = tl.div_rn(squares.to(tl.float32), HIDDEN * 1.0)
    # Not the bare number: Triton makes an fp64 constant of one below 2^-126.
    shifted = mean + tl.full((), EPS, tl.float32)
    # One number a row: in fp64 the root has one rounding, in fp32 it would have two.
    root = (1.0 / tl.sqrt(shifted.to(tl.float64))).to(tl.float32)
    n = to_float32(h) * root
    if WEIGHT == "none":
        y = round_to(n, h.dtype)
    elif WEIGHT == "before_cast":
        wide_weight = to_float32(weight)
        if OFFSET:
            wide_weight = 1.0 + wide_weight
        y = round_to(n * wide_weight, h.dtype)
    else:
        product = to_float32(weight) * to_float32(round_to(n, h.dtype))
        # Of bf16, fp16 and fp32, any two that differ are promoted to fp32.
        if weight.dtype == h.dtype:
            y = round_to(product, h.dtype)
        else:
            y = product
    return y


# ---- the quantiser ----------------------------------------------------------------------------


@triton.jit
def _static_quotient(values, scale):
    """values / scale for a scale that the caller gives: it may be any number."""
    # Within these bounds `divide` is exact. A zero, a negative or a huge scale takes the long way.
    if (scale >= 1e-24) & (scale <= 1e30):
        quotient = divide(values, scale)
    else:
        quotient = tl.div_rn(values, scale)
    return quotient


@triton.jit
def _quotient(values, scale, RULE: tl.constexpr, FLOOR: tl.constexpr, NATIVE: tl.constexpr):
    if RULE == "divide":
        if NATIVE and FLOOR >= 1e-24:  # above `divide`'s bound of 2^-80; a computed scale is below 2^120
            quotient = divide(values, scale)
        else:
            quotient = tl.div_rn(values, scale)
    elif RULE == "reciprocal":
        quotient = values * tl.div_rn(1.0, scale)
    else:
        quotient = values * scale
    return quotient


@triton.jit
def _scale_of(
    amax, FLOOR: tl.constexpr, SCALE_RULE: tl.constexpr, SCALE_ROUNDING: tl.constexpr, ACTIVATION: tl.constexpr
):
    """max(round(amax / 448), FLOOR), as `formats.fp8` has it for the two attributes; NaN stays NaN.

    ACTIVATION is the dtype that SCALE_ROUNDING `activation` rounds to.
    """
    if SCALE_RULE == "divide":
        scale = tl.div_rn(amax, 448.0)
    else:
        scale = amax * 0.002232142857142857  # 1 / 448; Triton takes the fp32 of it
    if SCALE_ROUNDING == "activation":
        scale = to_float32(round_to(scale, ACTIVATION))
    floor = tl.full((), FLOOR, tl.float32)
    return tl.where(scale < floor, floor, scale)


@triton.jit
def _nvfp4(values, encode, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Packed codes [BLOCK / 2] and e4m3 block scales [BLOCK / GROUP] (0 outside the row), int32."""
    blocks = tl.reshape(values, (BLOCK // GROUP, GROUP))
    amax = from_bits(tl.max(magnitude_bits(blocks), axis=1))
    wanted = encode * (amax * 0.16666666666666666)
    scales = to_e4m3(tl.where(wanted != wanted, 448.0, wanted))
    scales = tl.where(tl.arange(0, BLOCK // GROUP) < HIDDEN // GROUP, scales, 0)
    stored = from_e4m3(scales)
    factor = tl.div_rn(1.0, stored * tl.div_rn(1.0, encode))
    codes = to_e2m1(blocks * factor[:, None])
    codes = tl.where((stored == 0.0)[:, None], 0, codes)
    low, high = tl.split(tl.reshape(codes, (BLOCK // 2, 2)))
    return low | (high << 4), scales


@triton.jit
def _e4m3(values, NATIVE: tl.constexpr):
    if NATIVE:
        codes = to_e4m3_native(values)
    else:
        codes = to_e4m3(values)
    return codes


@triton.jit
def quantize_row(
    y,
    scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    RULE: tl.constexpr,
    GROUP: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    SCALE_ROUNDING: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes and scales of a row y [BLOCK], bf16, fp16 or fp32, of which HIDDEN elements count.

    `scale` is the fp32 scale of fp8_static or the encode factor of nvfp4, anything for the others.
    Codes are int32, [BLOCK], or [BLOCK / 2] packed for nvfp4. Scales are as they are stored: fp32 (one
    for fp8_token, [BLOCK / GROUP] for fp8_group), int32 codes (ue8m0, nvfp4), `scale` for fp8_static.
    NATIVE: the target is an NVIDIA GPU that converts to e4m3 (sm_89 on); the codes are then int8. The
    bits are the same either way.
    """
    values = within_row(to_float32(y), HIDDEN, BLOCK)
    if SCHEME == "fp8_static":
        if NATIVE and RULE == "divide":
            quotient = _static_quotient(values, scale)
        else:
            quotient = _quotient(values, scale, RULE, FLOOR, NATIVE)
        codes = _e4m3(quotient, NATIVE)
        scales = scale
    elif SCHEME == "fp8_token":
        amax = from_bits(tl.max(magnitude_bits(values), axis=0))
        scales = _scale_of(amax, FLOOR, SCALE_RULE, SCALE_ROUNDING, y.dtype)
        codes = _e4m3(_quotient(values, scales, RULE, FLOOR, NATIVE), NATIVE)
    elif SCHEME == "fp8_group":
        groups = tl.reshape(values, (BLOCK // GROUP, GROUP))
        amax = from_bits(tl.max(magnitude_bits(groups), axis=1))
        scales = _scale_of(amax, FLOOR, SCALE_RULE, SCALE_ROUNDING, y.dtype)
        if SCALE_DTYPE == "float32":
            codes = _e4m3(_quotient(groups, scales[:, None], RULE, FLOOR, NATIVE), NATIVE)
        else:
            exponents = to_e8m0(scales)
            powers = from_e8m0(exponents)
            # Dividing by a power of two is multiplying by its inverse, another power of two.
            inverses = tl.div_rn(1.0, powers)
            codes = _e4m3(groups * inverses[:, None], NATIVE)
            if SCALE_DTYPE == "ue8m0":
                scales = exponents
            else:
                scales = powers
        codes = tl.reshape(codes, (BLOCK,))
    else:
        codes, scales = _nvfp4(values, scale, HIDDEN, BLOCK, GROUP)
    return codes, scales


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
        squares = sum_of_squares(h, HIDDEN, BLOCK)
        inner = normalize(h, inner_weight, squares, HIDDEN, INNER_WEIGHT, INNER_OFFSET, INNER_EPS)
        h = round_to(to_float32(inner), x.dtype)
    if RESIDUAL:
        h = add_residual(h, residual)
    if WEIGHT != _ABSENT:
        y = normalize(h, weight, sum_of_squares(h, HIDDEN, BLOCK), HIDDEN, WEIGHT, OFFSET, EPS)
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

    `codes_ptr` is uint8, contiguous rows; `scales_ptr` fp32, or uint8 for one-byte scales, or None.
    `column_stride` is that of column_major and tma_aligned scales.
    """
    if SCHEME == "nvfp4":
        columns = tl.arange(0, BLOCK // 2)
        tl.store(codes_ptr + row * (HIDDEN // 2) + columns, codes.to(tl.uint8), mask=columns < HIDDEN // 2)
    else:
        columns = tl.arange(0, BLOCK)
        tl.store(codes_ptr + row * HIDDEN + columns, codes.to(tl.uint8), mask=columns < HIDDEN)
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
