"""What a seam means, in float64, written from DESIGN section 4 and sharing no code with torchseam.

Floats in, floats out: values are held as float64 and rounded here, bit by bit, to the format that a rule
names. A sum, product or quotient of two fp32 values that float64 forms and `round_to` rounds to fp32 is
the correctly rounded one (53 >= 2 * 24 + 2 bits); for a sum of bf16 or fp16 the same holds with room to
spare. Not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchseam.seam import Norm, Quant

F32 = torch.float32
E4M3 = torch.float8_e4m3fn
E2M1 = "e2m1"

#: (bits of the significand with the hidden one, exponent of the least normal number, largest number).
FORMATS = {
    torch.float32: (24, -126, (2 - 2.0**-23) * 2.0**127),
    torch.bfloat16: (8, -126, (2 - 2.0**-7) * 2.0**127),
    torch.float16: (11, -14, 65504.0),
    E4M3: (4, -6, 448.0),
    E2M1: (2, 0, 6.0),
}
#: Rule 3 is "all fp32": n carries the error of a mean (halved by the root), a root, a reciprocal and a
#: product, below 4 halves of an fp32 ulp of 2^-23 together.
N_ERROR = 2.0**-22


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def ulp(x: Tensor, dtype: object) -> Tensor:
    """The distance of neighbours in `dtype` at the finite float64 values x."""
    bits, least, _ = FORMATS[dtype]
    exponent = torch.where(x == 0, least, torch.frexp(x.abs().nan_to_num(1.0, 1.0, 1.0))[1] - 1)
    return _power_of_two(exponent.clamp(min=least) - bits + 1)


def round_to(x: Tensor, dtype: object) -> Tensor:
    """float64 -> nearest value of `dtype`, ties to even, as float64; inf beyond the largest."""
    quantum = ulp(x, dtype)
    rounded = torch.round(x / quantum) * quantum
    rounded = torch.where(rounded.abs() > FORMATS[dtype][2], torch.copysign(torch.full_like(x, math.inf), x), rounded)
    return torch.where(x.isfinite(), rounded, x)


def saturate_to(x: Tensor, dtype: object) -> Tensor:
    """`round_to` that ends at the largest number instead of inf; NaN stays NaN."""
    largest = FORMATS[dtype][2]
    return round_to(x.clamp(-largest, largest), dtype)


# --- rules 1 to 4 ----------------------------------------------------------------------------------


def reduce(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Rule 1: fp32 sums in rank order, rounded once at the end."""
    first, *rest = (p.double() for p in parts)
    total = first
    for part in rest:
        total = round_to(total + part, F32)
    return round_to(total, dtype)


def add(s: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """Rule 2: one rounding of the exact sum."""
    return round_to(s.double() + residual.double(), dtype)


@dataclass(frozen=True)
class NormResult:
    """float64 [..., H]: the unrounded norm, what fp32 arithmetic may make of it, and its dtype."""

    exact: Tensor
    low: Tensor
    high: Tensor
    dtype: torch.dtype

    def error(self, y: Tensor) -> Tensor:
        """|y - exact| in ulp of the dtype."""
        return (y.double() - self.exact).abs() / ulp(self.exact, self.dtype)

    def allows(self, y: Tensor) -> bool:
        """Whether y lies within 1 ulp of the float64 result (of rule 3 as fp32 may compute it)."""
        slack = ulp(torch.maximum(self.low.abs(), self.high.abs()), self.dtype)
        wide = y.double()
        inside = (wide >= self.low - slack) & (wide <= self.high + slack)
        return bool((inside | (wide.isnan() & self.exact.isnan())).all())


def rms_norm(h: Tensor, weight: Tensor | None, norm: Norm) -> NormResult:
    """Rules 3 and 4 for the rounded h [..., H]; h's dtype is that of the activations."""
    wide = h.double()
    n = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    dtype = h.dtype
    if norm.weight == "after_cast" and weight is not None and weight.dtype != dtype:
        dtype = torch.float32  # bf16 with fp16, or either with fp32: torch promotes to fp32

    def weighted(n: Tensor) -> Tensor:
        if norm.weight == "none":
            return n
        if norm.weight == "after_cast":
            return weight.double() * round_to(n, h.dtype)
        return n * (norm.offset + weight.double())

    ends = weighted(n * (1 - N_ERROR)), weighted(n * (1 + N_ERROR))
    return NormResult(weighted(n), torch.minimum(*ends), torch.maximum(*ends), dtype)


# --- rule 5 ----------------------------------------------------------------------------------------


def encode(x: Tensor, dtype: object) -> Tensor:
    """Values of a format of 8 or fewer bits -> their code, uint8; NaN (e4m3 only) is 0x7F."""
    bits, least, _ = FORMATS[dtype]
    magnitude = x.abs().nan_to_num(0.0)
    quantum = ulp(magnitude, dtype)
    steps = 1 << (bits - 1)
    # Below the least normal number the quantum is constant, so the code is the number of quanta.
    binade = (torch.log2(quantum).round() - (least - bits + 1)).clamp(min=0)
    code = (magnitude / quantum + binade * steps).to(torch.int64)
    sign = 0x80 if dtype == E4M3 else 0x8
    code = code + sign * torch.signbit(x).to(torch.int64)
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def _f32(x: Tensor) -> Tensor:
    return round_to(x, F32)


def _quotient(y: Tensor, scale: Tensor, rule: str) -> Tensor:
    if rule == "divide":
        return _f32(y / scale)
    return _f32(y * (_f32(1 / scale) if rule == "reciprocal" else scale))


def _amax(x: Tensor) -> Tensor:
    """Over the last dim, kept; NaN if there is one."""
    largest = x.abs().nan_to_num(0.0, math.inf).amax(-1, keepdim=True)
    return torch.where(x.isnan().any(-1, keepdim=True), math.nan, largest)


def _ceil_to_power_of_two(scale: Tensor) -> Tensor:
    """By exponent; 2^-126 below, 2^127 above, NaN stays."""
    fraction, exponent = torch.frexp(scale.nan_to_num(1.0, 2.0**127))
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(-126, 127)
    exponent = torch.where(scale == 0, -126, exponent)
    return torch.where(scale.isnan(), math.nan, _power_of_two(exponent))


@dataclass(frozen=True)
class Quantized:
    """Of y [T, H]: codes uint8 (NVFP4: one a byte), scales float64 [T, columns] or None, values fp32 as float64."""

    codes: Tensor
    scales: Tensor | None
    values: Tensor


def quantize(y: Tensor, quant: Quant, scale: Tensor | None = None) -> Quantized:
    """Rule 5 for the rounded y [..., H] of any float dtype, leading dims flattened."""
    wide = y.double().reshape(-1, y.shape[-1])
    given = None if scale is None else scale.double().reshape(())
    if quant.scheme == "fp8_static":
        q = saturate_to(_quotient(wide, given, quant.rule), E4M3)
        # The tensor that `multiply` is given is the encode factor: decoding divides by it.
        return Quantized(encode(q, E4M3), None, _f32(q / given if quant.rule == "multiply" else q * given))
    if quant.scheme == "nvfp4":
        return _quantize_nvfp4(wide, given)
    tokens, hidden = wide.shape
    columns = 1 if quant.scheme == "fp8_token" else hidden // quant.group_size
    parts = wide.reshape(tokens, columns, hidden // columns)
    floor = float(_f32(torch.tensor(quant.scale_floor, dtype=torch.float64)))
    scales = _f32(_amax(parts) / 448.0)
    scales = torch.where(scales < floor, floor, scales)
    if quant.scale_dtype != "float32":
        scales = _ceil_to_power_of_two(scales)
    q = saturate_to(_quotient(parts, scales, quant.rule), E4M3)
    codes, values = encode(q, E4M3), _f32(q * scales)
    return Quantized(codes.reshape(wide.shape), scales.squeeze(-1), values.reshape(wide.shape))


def _quantize_nvfp4(wide: Tensor, factor: Tensor) -> Quantized:
    blocks = wide.reshape(wide.shape[0], wide.shape[1] // 16, 16)
    sixth = _f32(torch.tensor(1 / 6, dtype=torch.float64))
    wanted = _f32(factor * _f32(_amax(blocks) * sixth))
    scales = saturate_to(wanted.nan_to_num(448.0, math.inf), E4M3)
    multiplier = _f32(1 / _f32(scales * _f32(1 / factor)))
    q = saturate_to(_f32(blocks * multiplier), E2M1)
    codes = torch.where(q.isnan(), 7, encode(q, E2M1))
    codes = torch.where(scales == 0, 0, codes).to(torch.uint8)
    q = torch.where(scales == 0, 0.0, q)
    values = _f32(_f32(q * scales) / factor)
    return Quantized(codes.reshape(wide.shape), scales.squeeze(-1), values.reshape(wide.shape))


# --- bytes -----------------------------------------------------------------------------------------


def read_codes(codes: Tensor, quant: Quant) -> Tensor:
    """Codes as an operator returns them -> uint8 [T, H], one a byte; e4m3's two NaNs are both 0x7F."""
    if quant.scheme == "nvfp4":
        assert codes.dtype == torch.uint8
        packed = codes.reshape(-1, codes.shape[-1])
        return torch.stack((packed % 16, packed // 16), dim=-1).reshape(packed.shape[0], 2 * packed.shape[1])
    assert codes.dtype == E4M3
    raw = codes.reshape(-1, codes.shape[-1]).view(torch.uint8)
    return torch.where(raw % 128 == 127, 127, raw)


def read_scales(scales: Tensor, quant: Quant, lead: tuple[int, ...], hidden: int) -> Tensor:
    """Scales as an operator returns them for [*lead, H] -> float64 [T, columns], by the layout rules.

    Fails when shape, strides, dtype or a padding byte is not what DESIGN section 4 says.
    """
    tokens = math.prod(lead)
    columns = 1 if quant.scheme == "fp8_token" else hidden // quant.group_size
    dtype = {
        "float32": torch.float32,
        "ue8m0_float32": torch.float32,
        "ue8m0": torch.float8_e8m0fnu,
        "float8_e4m3fn": E4M3,
    }[quant.scale_dtype]
    if quant.scale_layout == "tma_aligned_packed":
        return _read_packed(scales, tokens, columns)
    assert scales.dtype == dtype
    if quant.scale_layout in ("row_major", "linear"):
        assert scales.is_contiguous() and tuple(scales.shape) == (*lead, columns)
        return _decode(scales).reshape(tokens, columns)
    if quant.scale_layout == "swizzled":
        rows, padded = -(-tokens // 128) * 128, -(-columns // 4) * 4
        assert scales.is_contiguous() and tuple(scales.shape) == (rows, padded)
        flat = scales.reshape(-1)
        m, k = torch.arange(tokens)[:, None], torch.arange(columns)[None, :]
        at = ((m // 128) * (padded // 4) + k // 4) * 512 + (m % 32) * 16 + ((m // 32) % 4) * 4 + k % 4
        padding = torch.ones(rows * padded, dtype=torch.bool)
        padding[at.flatten()] = False
        assert not flat.view(torch.uint8)[padding].any(), "swizzle padding is not 0"
        return _decode(flat)[at]
    alignment = 16 // dtype.itemsize if quant.scale_layout == "tma_aligned" else 1
    column = -(-tokens // alignment) * alignment
    assert tuple(scales.shape) == (tokens, columns) and scales.stride() == (1, column)
    return _decode(scales)


def _read_packed(scales: Tensor, tokens: int, columns: int) -> Tensor:
    """The byte of group k of token m is byte k % 4 of word k // 4 * ceil4(T) + m; all other bytes are 0."""
    words, column = -(-columns // 4), -(-tokens // 4) * 4
    assert scales.dtype == torch.int32
    assert tuple(scales.shape) == (tokens, words) and scales.stride() == (1, column)
    every = torch.empty(0, dtype=torch.uint8).set_(scales.untyped_storage())
    assert every.numel() == 4 * words * column
    m, k = torch.arange(tokens)[:, None], torch.arange(columns)[None, :]
    at = (k // 4 * column + m) * 4 + k % 4
    padding = torch.ones(every.numel(), dtype=torch.bool)
    padding[at.flatten()] = False
    assert not every[padding].any(), "padding is not 0"
    return _decode(every[at].view(torch.float8_e8m0fnu))


def _decode(scales: Tensor) -> Tensor:
    """e8m0 by its exponent, the rest by conversion (exact)."""
    if scales.dtype != torch.float8_e8m0fnu:
        return scales.double()
    raw = scales.view(torch.uint8).to(torch.int64)
    return torch.where(raw == 255, math.nan, _power_of_two(raw - 127))
