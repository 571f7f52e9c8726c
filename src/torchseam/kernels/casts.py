"""Device functions that round: to a dtype, to e4m3fn and e2m1 codes, to powers of two.

By integer arithmetic on the bits, so one rounding (nearest, ties to even) on every architecture, in
every Triton version and in the interpreter: fp8 casts double-round through fp16 on some of them, and
bitcasts of fp8 were miscompiled in Triton 3.6. Where NATIVE, the GPU's own conversion instruction gives
the same codes in a twentieth of the instructions. Codes are int32 values (int8 where NATIVE).
The meaning is that of `formats.fp8` and `formats.nvfp4`, bit for bit.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from triton import knobs

#: Triton's interpreter truncates where fp32 becomes bf16 and mistakes subnormals both ways
#: (triton.runtime.interpreter._convert_float, 3.6 and 3.9), so there bf16 is moved as bits.
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

#: Bits of fp32: sign, 8 of exponent (bias 127), 23 of mantissa. Plain numbers in the shifts below:
#: the interpreter cannot shift an int by a module's constexpr.
_ABS = tl.constexpr(0x7FFFFFFF)
_MANTISSA = tl.constexpr(0x7FFFFF)
_NAN = tl.constexpr(0x7FC00000)
_E4M3_NAN = tl.constexpr(0x7F)
_E2M1_OF_NAN = tl.constexpr(7)
_E8M0_NAN = tl.constexpr(0xFF)


@triton.jit
def to_float32(x):
    """bf16, fp16 or fp32 -> fp32, exact."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def round_to(x, dtype: tl.constexpr, NATIVE: tl.constexpr = False):
    """fp32 -> bf16, fp16 or fp32, to nearest, ties to even; NaN stays NaN. NATIVE: see `to_e4m3_native`."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, _NAN >> 16, rounded)
        narrow = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif NATIVE and dtype == tl.bfloat16:
        # Two at once: one at a time, the GPU converts at a quarter of the rate.
        narrow = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif NATIVE and dtype == tl.float16:
        narrow = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        narrow = x.to(dtype)
    return narrow


@triton.jit
def magnitude_bits(x):
    """fp32 -> the bits of |x| as int32, which order as the magnitudes do, with every NaN above inf."""
    return x.to(tl.int32, bitcast=True) & _ABS


@triton.jit
def from_bits(bits):
    """int32 -> the fp32 of those bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _magnitude_code(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """The code of |x| in a small float format; beyond its largest value, of bits MAX, that one's code."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # A power of two whose fp32 neighbours are as far apart as the format's subnormals: 2^(1-BIAS-MANTISSA).
    ROUNDER: tl.constexpr = 1 << (24 - BIAS - MANTISSA)
    ROUNDER_BITS: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    magnitude = tl.minimum(magnitude_bits(x), MAX)
    half = (1 << (DROPPED - 1)) - 1 + ((magnitude >> DROPPED) & 1)
    normal = ((magnitude + half) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    subnormal = magnitude_bits(from_bits(magnitude) + ROUNDER * 1.0) - ROUNDER_BITS
    return tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def to_e4m3(x):
    """fp32 -> e4m3fn code (0..255), saturating at +-448; NaN -> 0x7F with x's sign."""
    code = _magnitude_code(x, MANTISSA=3, BIAS=7, MAX=0x43E00000)  # 448.0
    code = tl.where(x != x, _E4M3_NAN, code)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def to_e4m3_native(x):
    """`to_e4m3` by the conversion of sm_89 and later (four at a time); int8. NaN -> 0x7F."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f",
        [x],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def divide(a, b):
    """a / b for 2^-80 <= b <= 2^120 (or b inf or NaN), by Markstein's two fused multiply-adds.

    Rounded once for quotients from 2^-10 on, those that give an e4m3 code other than 0: the reciprocal is
    rounded correctly, the residual of the first quotient is exact (a multiple of 2^-33 * 2^-103), and so the
    second is the rounded quotient. Where the second is NaN or has lost the sign of a zero, the first is the
    answer. Below 2^-10 the last place may be off.
    """
    reciprocal = tl.div_rn(1.0, b)
    first = a * reciprocal
    second = tl.fma(tl.fma(-first, b, a), reciprocal, first)
    return tl.where((second != second) | (first == 0.0), first, second)


@triton.jit
def from_e4m3(code):
    """e4m3fn code, not NaN -> fp32."""
    magnitude = code & 0x7F
    normal = magnitude_bits(from_bits((magnitude << 20) + (120 << 23)))
    subnormal = magnitude_bits(magnitude.to(tl.float32) * 0.001953125)  # 2^-9
    bits = tl.where(magnitude < 8, subnormal, normal)
    return from_bits(bits | ((code & 0x80) << 24))


@triton.jit
def to_e2m1(x):
    """fp32 -> e2m1 code (0..15), saturating at +-6; NaN of either sign -> 7."""
    code = _magnitude_code(x, MANTISSA=1, BIAS=1, MAX=0x40C00000)  # 6.0
    code = code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    return tl.where(x != x, _E2M1_OF_NAN, code)


@triton.jit
def to_e8m0(scale):
    """fp32 >= 0 -> the e8m0 code of the least power of two >= scale, kept in 2^-126..2^127; NaN -> 0xFF."""
    bits = magnitude_bits(scale)
    exponent = (bits >> 23) + tl.where((bits & _MANTISSA) != 0, 1, 0)
    exponent = tl.minimum(tl.maximum(exponent, 1), 254)
    return tl.where(scale != scale, _E8M0_NAN, exponent)


@triton.jit
def from_e8m0(code):
    """e8m0 code, not 0 -> fp32."""
    return from_bits(tl.where(code == _E8M0_NAN, _NAN, code << 23))
