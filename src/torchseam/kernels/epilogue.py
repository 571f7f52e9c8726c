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
from torchseam.kernels.packets import exchange

#: A `WEIGHT` that means "no such norm" and a `SCHEME` that means "no quantiser".
ABSENT = "absent"
_ABSENT = tl.constexpr(ABSENT)
#: Values that the parts of a row exchange: two sums of squares and one largest magnitude.
EXCHANGES = 3


# ---- the norm ---------------------------------------------------------------------------------


@triton.jit
def within_row(values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """values [BLOCK] with 0 at and after WIDTH, whatever arithmetic made of the masked lanes."""
    if BLOCK != WIDTH:
        values = tl.where(tl.arange(0, BLOCK) < WIDTH, values, 0.0)
    return values


@triton.jit
def add_residual(x, residual):
    """round(fp32(x) + fp32(residual)), in x's dtype."""
    return round_to(to_float32(x) + to_float32(residual), x.dtype)  # left to the compiler, which adds in pairs


@triton.jit
def sum_of_squares(
    h, slots, part, call, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr
):
    """The sum of h^2 over the row in fp64, in the canonical order of DESIGN section 4.

    Segments of 8 neighbours are added in fp32 by a fixed tree, ((0+1)+(2+3))+((4+5)+(6+7)), and the
    segments in fp64, which is wide enough to hide their order: a GPU converts fp32 to fp64 at a sixteenth of
    the rate at which it adds, and eight times fewer conversions no longer show.
    """
    wide = within_row(to_float32(h), WIDTH, BLOCK)
    sums = wide * wide
    even, odd = tl.split(tl.reshape(sums, (BLOCK // 2, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCK // 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCK // 8, 2)))
    squares = tl.sum((even + odd).to(tl.float64), axis=0)
    if PARTS > 1:
        squares = tl.sum(exchange(squares, slots, part, call, PARTS, BLOCK // 8, PTX), axis=0)
    return squares


@triton.jit
def largest_magnitude(values, slots, part, call, BLOCK: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr):
    """max(|values|) over the row, fp32; NaN when one of them is."""
    largest = tl.max(magnitude_bits(values), axis=0)
    if PARTS > 1:
        every = exchange(from_bits(largest).to(tl.float64), slots, part, call, PARTS, BLOCK // 8, PTX)
        largest = tl.max(magnitude_bits(every.to(tl.float32)), axis=0)
    return from_bits(largest)


@triton.jit
def inverse_root(a):
    """1 / sqrt(a) of an fp32 number, rounded once: in fp32 the root and the quotient would be two roundings.

    Two of Newton's steps in fp64 from the GPU's estimate, which has 22 bits: a tenth of the time of an fp64
    root and quotient, and every program waits for it once a row.
    """
    # The estimate takes subnormal numbers for 0.
    small = a < 1.1754943508222875e-38
    estimate = tl.rsqrt(tl.where(small, a * 18446744073709551616.0, a)) * tl.where(small, 4294967296.0, 1.0)
    wide = estimate.to(tl.float64)
    half = a.to(tl.float64) * 0.5
    wide = wide * (1.5 - half * wide * wide)
    wide = wide * (1.5 - half * wide * wide)
    # Of 0 and inf the estimate is the answer, and the steps would make it NaN.
    return tl.where((estimate == 0.0) | (estimate == float("inf")), estimate, wide.to(tl.float32))


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
    n = to_float32(h) * inverse_root(shifted)
    if WEIGHT == "none":
        y = round_to(n, h.dtype, NATIVE)
    elif WEIGHT == "before_cast":
        wide_weight = to_float32(weight)
        if OFFSET:
            wide_weight = 1.0 + wide_weight
        y = round_to(n * wide_weight, h.dtype, NATIVE)
    else:
        product = to_float32(weight) * to_float32(round_to(n, h.dtype, NATIVE))
        # Of bf16, fp16 and fp32, any two that differ are promoted to fp32.
        if weight.dtype == h.dtype:
            y = round_to(product, h.dtype, NATIVE)
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
def _nvfp4(values, encode, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Packed codes [BLOCK / 2] and e4m3 block scales [BLOCK / GROUP] (0 outside the row), int32."""
    blocks = tl.reshape(values, (BLOCK // GROUP, GROUP))
    amax = from_bits(tl.max(magnitude_bits(blocks), axis=1))
    wanted = encode * (amax * 0.16666666666666666)
    scales = to_e4m3(tl.where(wanted != wanted, 448.0, wanted))
    scales = tl.where(tl.arange(0, BLOCK // GROUP) < WIDTH // GROUP, scales, 0)
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
    slots,
    part,
    call,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    RULE: tl.constexpr,
    GROUP: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    SCALE_ROUNDING: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
    PARTS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Codes and scales of a row (or part) y [BLOCK], bf16, fp16 or fp32, of which WIDTH elements count.

    `scale` is the fp32 scale of fp8_static or the encode factor of nvfp4, anything for the others.
    Codes are int32, [BLOCK], or [BLOCK / 2] packed for nvfp4. Scales are as they are stored: fp32 (one
    for fp8_token, [BLOCK / GROUP] for fp8_group), int32 codes (ue8m0, nvfp4), `scale` for fp8_static.
    NATIVE: the target is an NVIDIA GPU that converts to e4m3 (sm_89 on); the codes are then int8. The
    bits are the same either way.
    """
    values = within_row(to_float32(y), WIDTH, BLOCK)
    if SCHEME == "fp8_static":
        if NATIVE and RULE == "divide":
            quotient = _static_quotient(values, scale)
        else:
            quotient = _quotient(values, scale, RULE, FLOOR, NATIVE)
        codes = _e4m3(quotient, NATIVE)
        scales = scale
    elif SCHEME == "fp8_token":
        amax = largest_magnitude(values, slots, part, call, BLOCK, PARTS, PTX)
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
        codes, scales = _nvfp4(values, scale, WIDTH, BLOCK, GROUP)
    return codes, scales


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
        squares = sum_of_squares(h, slots, part, call, WIDTH, BLOCK, PARTS, PTX)
        inner = normalize(h, inner_weight, squares, HIDDEN, INNER_WEIGHT, INNER_OFFSET, INNER_EPS, NATIVE)
        h = round_to(to_float32(inner), x.dtype, NATIVE)
    if RESIDUAL:
        h = add_residual(h, residual)
    if WEIGHT != _ABSENT:
        squares = sum_of_squares(h, second, part, call, WIDTH, BLOCK, PARTS, PTX)
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
