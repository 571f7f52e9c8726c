"""Device functions that divide and take roots in few instructions, to the bits of the long way.

What is `_native` or takes NATIVE (as `casts` counts it) has PTX for NVIDIA; each docstring says for which numbers
the bits are those of the correctly rounded result, and why. `tests/kernels/gpu_check.py` compares them on a GPU.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from torchseam.kernels.casts import from_bits

_MANTISSA = tl.constexpr(0x7FFFFF)


@triton.jit
def _negative(x):
    """-x, free in the instruction that takes it. Triton's own minus is 0 - x: that costs one, and makes +0 of +0."""
    return x * -1.0


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
    second = tl.fma(tl.fma(_negative(first), b, a), reciprocal, first)
    return tl.where((second != second) | (first == 0.0), first, second)


@triton.jit
def divide_within(a, b):
    """`divide` where |a| / b < 2^127 unless b is inf or NaN, as for a scale b made of a's amax; native only.

    Without the last choice: the residual is taken with its sign reversed, and so the reciprocal, which keeps the
    sign of a zero; for b inf the residual is taken of 1, so that the quotient is a zero (NaN for a inf).
    """
    finite = tl.where(b == float("inf"), 1.0, b)
    reciprocal = tl.where(b == float("inf"), 0.0, reciprocal_native(finite))
    first = a * reciprocal
    return tl.fma(tl.fma(first, finite, _negative(a)), _negative(reciprocal), first)


@triton.jit
def divides_in_two_parts(b):
    """Whether `divide_in_two_parts` takes the number b."""
    # A mantissa of ones is where the middle of 2^-10 and the next fp32 is a quotient's closest neighbour.
    return (b >= 1e-24) & (b <= 1e23) & ((b.to(tl.int32, bitcast=True) & _MANTISSA) != _MANTISSA)


@triton.jit
def divide_in_two_parts(a, b):
    """A number with the e4m3 code of fp32 a / b, for a that bf16 or fp16 holds, in two instructions an element.

    a * (high + low) rounded once, where high + low is 1 / b to 2^-45. The code differs from the quotient's only
    if a / b is that near to the middle of two fp32 of which one is a tie T of e4m3. As integers of the same
    scale: a = (2^20 T +- 1) b + d, with 16 <= T < 32, b < 2^24, |d| <= 2^4, and a a multiple of 2^38 (8 or
    11 bits). Modulo 2^20 b = c 2^20 +- d, and what is left, (d T - c) 2^20, is 0 only for d = 1, T = c = 16:
    the b that `divides_in_two_parts` leaves out. `low` is never 0, so that inf stays inf, nor negative, so that
    the sign of a zero stays.
    """
    nearest = tl.div_rn(1.0, b)
    above = tl.where(tl.fma(_negative(nearest), b, 1.0) < 0.0, 1, 0)
    high = from_bits(nearest.to(tl.int32, bitcast=True) - above)
    low = tl.maximum(tl.fma(_negative(high), b, 1.0) * high, high * 8.673617379884035e-19)  # 2^-60
    return tl.fma(a, high, a * low)


@triton.jit
def reciprocal_native(b):
    """1 / b, rounded, for 2^-125 <= |b| <= 2^125; the steps of PTX's rcp.rn without its branch for other b."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 first, error;
        rcp.approx.ftz.f32 first, $1;
        neg.f32 error, $1;
        fma.rn.f32 error, error, first, 0f3F800000;
        fma.rn.f32 $0, first, error, first;
        }
        """,
        "=f,f",
        [b],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def divide_by_448(x):
    """x / 448 rounded, for x >= 2^-70 (or 0, or inf, or NaN), in two instructions (all mantissas tried)."""
    high = 0.002232142724096775  # 0x1.249248p-9, 1 / 448 rounded down
    low = 1.3304608803554885e-10  # 0x1.24924ap-33, the rest
    return tl.fma(x, high, x * low)


@triton.jit
def inverse_root(x):
    """fp32 number x >= 0 -> 1 / sqrt(x) in fp32, rounded correctly: in fp32 the root and the quotient round twice.

    One third-order step in fp64 (five operations) from an estimate of 22 bits, with an error of at most 2^-52;
    no fp32's 1 / sqrt is nearer than 2^-51.7 (relative) to the middle between two fp32 (all mantissas tried).
    """
    # The estimate takes subnormal numbers for 0.
    small = x < 1.1754943508222875e-38
    first = tl.rsqrt(tl.where(small, x * 18446744073709551616.0, x)) * tl.where(small, 4294967296.0, 1.0)
    wide = first.to(tl.float64)
    error = tl.fma(-x.to(tl.float64), wide * wide, tl.full((), 1.0, tl.float64))
    half = tl.fma(error, tl.full((), 0.375, tl.float64), tl.full((), 0.5, tl.float64))
    root = tl.fma(wide, error * half, wide).to(tl.float32)
    # Of 0 and inf the estimate is the answer, and the step would make NaN of it.
    return tl.where((first == 0.0) | (first == float("inf")), first, root)
