"""Device functions that round: to a dtype, to e4m3fn and e2m1 codes, to powers of two.

By integer arithmetic on the bits, so one rounding (nearest, ties to even) on every architecture, in
every Triton version and in the interpreter: fp8 casts double-round through fp16 on some of them, and
bitcasts of fp8 were miscompiled in Triton 3.6. Codes are int32 values (int8 from what is `_native`).
The meaning is that of `formats.fp8` and `formats.nvfp4`, bit for bit.

NATIVE says what the target has; the bits are the same at every level, in fewer instructions:
0 nothing is known of it (also the interpreter), 1 NVIDIA with conversions to and from e4m3 (sm_89 on),
2 those to e2m1 too (sm_100 on). The PTX is for blocks, with every thread's elements neighbours in pairs.
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
_E2M1_BIAS = tl.constexpr(0x4B000000)  # 2^23
_E8M0_NAN = tl.constexpr(0xFF)


@triton.jit
def to_float32(x, NATIVE: tl.constexpr = 0):
    """bf16, fp16 or fp32 -> fp32, exact."""
    if NATIVE and x.dtype == tl.bfloat16:
        # One instruction an element: Triton takes the pairs of a wide load apart first.
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            shl.b32 low, $2, 16;
            and.b32 high, $2, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }
            """,
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif _INTERPRETED and x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def round_to(x, dtype: tl.constexpr, NATIVE: tl.constexpr = 0):
    """fp32 -> bf16, fp16 or fp32, to nearest, ties to even; NaN stays NaN."""
    if NATIVE and dtype == tl.bfloat16:
        # Two at once: Triton (3.6, 3.9) converts one by one, at a quarter of the rate.
        narrow = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, _NAN >> 16, rounded)
        narrow = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif NATIVE and dtype == tl.float16:
        narrow = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        narrow = x.to(dtype)
    return narrow


@triton.jit
def add_rounded(x, y, NATIVE: tl.constexpr = 0):
    """round(fp32(x) + fp32(y)) in x's dtype.

    The pair's own addition rounds the exact sum once, to the same bits: 24 bits hold at least twice the 8 of bf16
    and 2 more, so the fp32 sum's rounding never shows (S. Figueroa, "When is double rounding innocuous?", 1995).
    """
    if NATIVE and x.dtype == tl.bfloat16 and y.dtype == tl.bfloat16:
        total = tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }",  # add.bf16x2 is sm_90's
            "=r,r,r",
            [x, y],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        total = round_to(to_float32(x, NATIVE) + to_float32(y, NATIVE), x.dtype)  # of fp16 pairs, by the compiler
    return total


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
def from_e4m3(code):
    """e4m3fn code, not NaN -> fp32."""
    magnitude = code & 0x7F
    normal = magnitude_bits(from_bits((magnitude << 20) + (120 << 23)))
    subnormal = magnitude_bits(magnitude.to(tl.float32) * 0.001953125)  # 2^-9
    bits = tl.where(magnitude < 8, subnormal, normal)
    return from_bits(bits | ((code & 0x80) << 24))


@triton.jit
def from_e4m3_native(code):
    """`from_e4m3` of int8 codes by the conversions of sm_89 and later."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 code0, code1, half0, half1, half2, half3;
        .reg .b32 halves0, halves1;
        mov.b32 {code0, code1}, $4;
        cvt.rn.f16x2.e4m3x2 halves0, code0;
        cvt.rn.f16x2.e4m3x2 halves1, code1;
        mov.b32 {half0, half1}, halves0;
        mov.b32 {half2, half3}, halves1;
        cvt.f32.f16 $0, half0;
        cvt.f32.f16 $1, half1;
        cvt.f32.f16 $2, half2;
        cvt.f32.f16 $3, half3;
        }
        """,
        "=f,=f,=f,=f,r",
        [code],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _e2m1_magnitude(x):
    """The e2m1 code of |x| in the low bits, under the constant _E2M1_BIAS; NaN as 6.

    Over 0..6 the code is a concave function of the value, 2x up to 2, x + 2 up to 4 and x / 2 + 4 from there,
    so it is the least of the three lines; each is rounded to an integer, ties to even, by adding 2^23.
    """
    magnitude = tl.minimum(tl.abs(x), 6.0)  # of a NaN and a number the number
    steep = tl.fma(magnitude, 2.0, 8388608.0).to(tl.int32, bitcast=True)
    middle = (magnitude + 8388610.0).to(tl.int32, bitcast=True)
    flat = tl.fma(magnitude, 0.5, 8388612.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(steep, middle), flat)


@triton.jit
def to_e2m1(x):
    """fp32 -> e2m1 code (0..15), saturating at +-6; NaN of either sign -> 7."""
    code = _e2m1_magnitude(x) - _E2M1_BIAS
    code = code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    return tl.where(x != x, _E2M1_OF_NAN, code)


@triton.jit
def to_e2m1_pairs(low, high, NATIVE: tl.constexpr):
    """Two e2m1 codes a byte: that of `low` in the low nibble. fp32 results of arithmetic -> int8 (int32 if 0).

    Results of arithmetic, because only of those is the sign of a NaN known (positive, PTX ISA).
    """
    if NATIVE >= 2:
        packed = tl.inline_asm_elementwise(
            """
            {
            .reg .b8 byte0, byte1, byte2, byte3;
            cvt.rn.satfinite.e2m1x2.f32 byte0, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 byte1, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 byte2, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 byte3, $8, $4;
            mov.b32 $0, {byte0, byte1, byte2, byte3};
            }
            """,
            "=r,f,f,f,f,f,f,f,f",
            [low, high],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    elif NATIVE:
        # Of eight numbers and their codes the nibbles, put together first, and the signs: bit 31 as bit 3 or 7.
        packed = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, codes, signs;
            mad.lo.u32 a, $5, 16, $1;
            mad.lo.u32 b, $6, 16, $2;
            mad.lo.u32 c, $7, 16, $3;
            mad.lo.u32 d, $8, 16, $4;
            prmt.b32 a, a, b, 0x0040;
            prmt.b32 c, c, d, 0x0040;
            prmt.b32 codes, a, c, 0x5410;
            prmt.b32 a, $9, $10, 0x00fb;
            prmt.b32 b, $11, $12, 0x00fb;
            prmt.b32 signs, a, b, 0x5410;
            lop3.b32 codes, codes, signs, 0x08080808, 0xf8;
            prmt.b32 a, $13, $14, 0x0073;
            prmt.b32 b, $15, $16, 0x0073;
            prmt.b32 signs, a, b, 0x5410;
            lop3.b32 $0, codes, signs, 0x80808080, 0xf8;
            }
            """,
            "=r,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
            [_e2m1_magnitude(low), _e2m1_magnitude(high), low, high],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        packed = to_e2m1(low) | (to_e2m1(high) << 4)
    return packed


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
