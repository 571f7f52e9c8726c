"""The values of a row, or of a part of one, become codes and scales: the recipes of `formats`, bit for bit.

Attributes are constexpr, spelled as in `seam.py`; NATIVE is what the target has, as `casts` counts it.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from torchseam.kernels.casts import (
    from_bits,
    from_e4m3,
    from_e4m3_native,
    from_e8m0,
    magnitude_bits,
    round_to,
    to_e2m1_pairs,
    to_e4m3,
    to_e4m3_native,
    to_e8m0,
    to_float32,
)
from torchseam.kernels.divisions import (
    divide,
    divide_by_448,
    divide_in_two_parts,
    divide_within,
    divides_in_two_parts,
    reciprocal_native,
)
from torchseam.kernels.packets import exchange

_MINUS_ZERO = tl.constexpr(-(2**31))


@triton.jit
def within_row(values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """values [BLOCK] with 0 at and after WIDTH, whatever arithmetic made of the masked lanes."""
    if BLOCK != WIDTH:
        values = tl.where(tl.arange(0, BLOCK) < WIDTH, values, 0.0)
    return values


@triton.jit
def _quotient_of_row(values, scale, NARROW: tl.constexpr, MADE: tl.constexpr):
    """A number with the code of values / scale, natively; one scale for all, which may be any number.

    NARROW: bf16 or fp16 holds the values. MADE: the scale was made of their amax and a floor of at least 1e-24.
    """
    # Within these bounds the quick ways are exact. A zero, a negative or a huge scale takes the long way.
    if NARROW:
        if divides_in_two_parts(scale):
            quotient = divide_in_two_parts(values, scale)
        elif MADE:
            quotient = divide_within(values, scale)
        else:
            quotient = tl.div_rn(values, scale)
    elif MADE:
        quotient = divide_within(values, scale)
    else:
        if (scale >= 1e-24) & (scale <= 1e30):
            quotient = divide(values, scale)
        else:
            quotient = tl.div_rn(values, scale)
    return quotient


@triton.jit
def _quotient(values, scale, RULE: tl.constexpr):
    if RULE == "divide":
        quotient = tl.div_rn(values, scale)
    elif RULE == "reciprocal":
        quotient = values * tl.div_rn(1.0, scale)
    else:
        quotient = values * scale
    return quotient


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(values, BLOCK: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr):
    """The greatest magnitude of each group of values [BLOCK]; NaN where there is one: [BLOCK / GROUP]."""
    if NATIVE:
        # Eight neighbours are a thread's own: there the float maximum takes magnitudes for free. Between threads
        # integers are quicker, for they can be reduced by one instruction a warp.
        eights = tl.reduce(tl.abs(tl.reshape(values, (BLOCK // 8, 8))), 1, _greater)
        bits = tl.reshape(magnitude_bits(eights), (BLOCK // GROUP, GROUP // 8))
    else:
        bits = tl.reshape(magnitude_bits(values), (BLOCK // GROUP, GROUP))
    return from_bits(tl.max(bits, axis=1))


@triton.jit
def _amax_of_row(
    values,
    slots,
    part,
    call,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    PARTS: tl.constexpr,
    PTX: tl.constexpr,
):
    """The greatest magnitude of the row, of which values [BLOCK] are all or a part; NaN where there is one."""
    largest = from_bits(tl.max(magnitude_bits(_amax(values, BLOCK, BLOCK, NATIVE)), axis=0))
    if PARTS > 1:
        every = exchange(largest.to(tl.float64), slots, part, call, PARTS, BLOCK // 8, PTX)
        largest = from_bits(tl.max(magnitude_bits(every.to(tl.float32)), axis=0))
    return largest


@triton.jit
def _scale_of(
    amax,
    FLOOR: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    SCALE_ROUNDING: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """max(round(amax / 448), FLOOR), as `formats.fp8` has it for the two attributes; NaN stays NaN.

    ACTIVATION is the dtype that SCALE_ROUNDING `activation` rounds to.
    """
    if SCALE_RULE == "divide" and NATIVE and FLOOR >= 1e-24:  # a smaller quotient does not matter then
        scale = divide_by_448(amax)
    elif SCALE_RULE == "divide":
        scale = tl.div_rn(amax, 448.0)
    else:
        scale = amax * 0.002232142857142857  # 1 / 448; Triton takes the fp32 of it
    if SCALE_ROUNDING == "activation":
        scale = to_float32(round_to(scale, ACTIVATION))
    floor = tl.full((), FLOOR, tl.float32)
    return tl.where(scale < floor, floor, scale)


@triton.jit
def _nvfp4(values, encode, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr):
    """Packed codes [BLOCK / 2] and e4m3 block scales [BLOCK / GROUP] (0 outside the row), int32 or int8."""
    wanted = encode * (_amax(values, BLOCK, GROUP, NATIVE) * 0.16666666666666666)
    scales, stored = _block_scales(tl.where(wanted != wanted, 448.0, wanted), WIDTH, BLOCK, GROUP, NATIVE)
    decode = tl.div_rn(1.0, encode)
    factor = _factor(stored * decode, decode, NATIVE)
    # A block whose scale is 0 has codes +0: its values (no inf or NaN among them, whose scale is 448) times 0,
    # + 0. To the others -0 is added, which changes nothing.
    empty = stored == 0.0
    factor = _of_eights(tl.where(empty, 0.0, factor), BLOCK, GROUP)
    zero = _of_eights(from_bits(tl.where(empty, 0, _MINUS_ZERO)), BLOCK, GROUP)
    scaled = tl.fma(tl.reshape(values, (BLOCK // 8, 8)), factor, zero)
    low, high = tl.split(tl.reshape(scaled, (BLOCK // 2, 2)))
    return to_e2m1_pairs(low, high, NATIVE), scales


@triton.jit
def _nvfp4_as_torchao(
    values,
    decode,
    DECODE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """As `_nvfp4`, with a decode factor or (not DECODE) none. What stands under a NaN scale means nothing."""
    wanted = tl.div_rn(_amax(values, BLOCK, GROUP, NATIVE), 6.0)
    if DECODE:
        wanted = tl.div_rn(wanted, decode)
    kept = tl.where(wanted != wanted, wanted, tl.maximum(wanted, 0.015625))  # 2^-6
    scales, stored = _block_scales(kept, WIDTH, BLOCK, GROUP, NATIVE)
    if DECODE:
        factor = tl.div_rn(tl.div_rn(1.0, decode), stored)
    else:
        factor = tl.div_rn(1.0, stored)
    scaled = tl.reshape(values, (BLOCK // 8, 8)) * _of_eights(factor, BLOCK, GROUP)
    low, high = tl.split(tl.reshape(scaled, (BLOCK // 2, 2)))
    return to_e2m1_pairs(low, high, NATIVE), scales


@triton.jit
def _block_scales(wanted, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr):
    """The e4m3 codes of block scales, at most 448 and 0 outside the row, and their values."""
    if NATIVE:
        scales = to_e4m3_native(wanted)
        stored = from_e4m3_native(scales)
    else:
        scales = to_e4m3(wanted)
        stored = tl.where(wanted != wanted, wanted, from_e4m3(scales))
    if BLOCK != WIDTH:  # 0 times or over the global scale, which may be inf or 0
        scales = tl.where(tl.arange(0, BLOCK // GROUP) < WIDTH // GROUP, scales, 0).to(scales.dtype)
    return scales, stored


@triton.jit
def _of_eights(values, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """A value of each group, [BLOCK / GROUP] -> [BLOCK / 8, 1], for eight neighbours each: a thread's own.

    Beside whole groups Triton 3.6 lays the row out anew, by shuffles.
    """
    return tl.reshape(tl.broadcast_to(values[:, None], (BLOCK // GROUP, GROUP // 8)), (BLOCK // 8, 1))


@triton.jit
def _factor(divisor, decode, NATIVE: tl.constexpr):
    """1 / divisor, which is `decode` times 0 or an e4m3 number."""
    if NATIVE:
        if (tl.abs(decode) >= 1e-30) & (tl.abs(decode) <= 1e30):
            factor = reciprocal_native(divisor)
        else:
            factor = tl.div_rn(1.0, divisor)
    else:
        factor = tl.div_rn(1.0, divisor)
    return factor


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

    RULE: how FP8 values are scaled, or what nvfp4's global scale is (`Quant.global_scale`).
    `scale` is the fp32 scale of fp8_static or the global scale of nvfp4, anything where there is none.
    Codes are int32, [BLOCK], or [BLOCK / 2] packed for nvfp4. Scales are as they are stored: fp32 (one
    for fp8_token, [BLOCK / GROUP] for fp8_group), int32 codes (ue8m0, nvfp4), `scale` for fp8_static.
    NATIVE: what the target has, as `casts` counts it; codes (and e4m3 scales) are int8 unless it is 0. The
    bits are the same at every level. `slots`, `part`, `call`, PARTS, PTX: as `epilogue` has them.
    """
    values = within_row(to_float32(y, NATIVE), WIDTH, BLOCK)
    QUICK: tl.constexpr = NATIVE and RULE == "divide"
    MADE: tl.constexpr = FLOOR >= 1e-24  # above the bound of 2^-80; a scale made of an amax is below 2^120
    if SCHEME == "fp8_static":
        if QUICK:
            quotient = _quotient_of_row(values, scale, y.dtype != tl.float32, False)
        else:
            quotient = _quotient(values, scale, RULE)
        codes = _e4m3(quotient, NATIVE)
        scales = scale
    elif SCHEME == "fp8_token":
        amax = _amax_of_row(values, slots, part, call, BLOCK, NATIVE, PARTS, PTX)
        scales = _scale_of(amax, FLOOR, SCALE_RULE, SCALE_ROUNDING, y.dtype, NATIVE)
        if QUICK:
            quotient = _quotient_of_row(values, scales, y.dtype != tl.float32, MADE)
        else:
            quotient = _quotient(values, scales, RULE)
        codes = _e4m3(quotient, NATIVE)
    elif SCHEME == "fp8_group":
        groups = tl.reshape(values, (BLOCK // GROUP, GROUP))
        scales = _scale_of(_amax(values, BLOCK, GROUP, NATIVE), FLOOR, SCALE_RULE, SCALE_ROUNDING, y.dtype, NATIVE)
        if SCALE_DTYPE == "float32":
            if QUICK and MADE:
                quotient = divide_within(groups, scales[:, None])
            else:
                quotient = _quotient(groups, scales[:, None], RULE)
            codes = _e4m3(quotient, NATIVE)
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
    elif RULE == "encode":
        codes, scales = _nvfp4(values, scale, WIDTH, BLOCK, GROUP, NATIVE)
    else:
        codes, scales = _nvfp4_as_torchao(values, scale, RULE == "decode", WIDTH, BLOCK, GROUP, NATIVE)
    return codes, scales
