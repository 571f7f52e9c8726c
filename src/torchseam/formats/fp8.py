"""FP8 (e4m3fn) recipes in plain aten ops: static, per token, per group, and back.

The eager meaning that kernels are held to, so each op here rounds exactly as its recipe says
(DESIGN section 4). Not for speed. A `scale` is the dequantisation multiplier: x ~= code * scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import layout

#: Largest finite float8_e4m3fn (OCP 8-bit Floating Point Specification, table 1: S.1111.110).
E4M3_MAX = 448.0
RULES = ("divide", "reciprocal", "multiply")
SCALE_RULES = ("divide", "reciprocal")
SCALE_ROUNDINGS = ("none", "activation")
GROUP_SIZES = (64, 128)

_ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# fp32: 23 mantissa bits under 8 exponent bits of bias 127. An e8m0 byte is that biased exponent.
_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_EXPONENT_MASK = 0xFF
_E8M0_NAN = 0xFF


def to_e4m3(x: Tensor) -> Tensor:
    """fp32 of any shape -> float8_e4m3fn, nearest-even, clamped to +-448; NaN stays NaN (0x7F / 0xFF).

    The clamp is explicit because a bare cast gives NaN or 448 beyond the range, depending on the
    torch version and device. ValueError unless fp32.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"to_e4m3 got {x.dtype}; recipes round once, from float32: convert first")
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_static(y: Tensor, scale: Tensor, rule: str = "divide") -> Tensor:
    """Codes of y [..., H] with the caller's scale: float8_e4m3fn, same shape, contiguous.

    `scale` is fp32 with one element, on y's device. In fp32, `rule` is `divide`: y / scale,
    `reciprocal`: y * (1 / scale), `multiply`: y * scale (the caller's tensor is the encode factor).
    ValueError for another scale or rule.
    """
    layout.require_choice("rule of quantize_static", rule, RULES)
    values = activations_as_float32(y)
    return to_e4m3(_quotient(values, one_float32("scale", scale, y), rule))


def quantize_token(
    y: Tensor, floor: float, rule: str = "divide", scale_rule: str = "divide", scale_rounding: str = "none"
) -> tuple[Tensor, Tensor]:
    """Codes [..., H] float8_e4m3fn and scales [..., 1] fp32 of y [..., H], both contiguous.

    scale = max(amax(|y|) / 448, floor) of each row, in fp32; a zero row gets the floor (floor 0
    makes its codes NaN, 0/0). NaN in a row gives that row a NaN scale. With `scale_rule`
    `reciprocal` it is amax(|y|) * fp32(1/448); with `scale_rounding` `activation` that is rounded to
    y's dtype before the floor. `rule` is `divide` or `reciprocal`; ValueError for another name.
    """
    layout.require_choice("rule of quantize_token", rule, RULES[:2])
    values = activations_as_float32(y)
    scales = _scale_of(values, floor, scale_rule, _rounded_to(scale_rounding, y))
    return to_e4m3(_quotient(values, scales, rule)), scales


def quantize_group(
    y: Tensor,
    group_size: int,
    floor: float,
    scale_dtype: str = "float32",
    scale_layout: str = "row_major",
    rule: str = "divide",
    scale_rule: str = "divide",
    scale_rounding: str = "none",
) -> tuple[Tensor, Tensor]:
    """Codes and scales of y [..., H] with one scale per `group_size` (64, 128) neighbours along H.

    Codes are float8_e4m3fn [..., H], contiguous, computed with the scale as stored. Each scale is as in
    `quantize_token`, then for `ue8m0` (float8_e8m0fnu) and `ue8m0_float32` (fp32) rounded up to a
    power of two (`ceil_to_power_of_two`). `row_major` scales are [..., G], contiguous; the others have the
    shape and strides of `layout.group_scale_geometry`, with T the product of the leading dims. ValueError for an
    unknown name, a layout that the dtype cannot have, or H no multiple of `group_size`.
    """
    layout.require_choice("rule of quantize_group", rule, RULES[:2])
    layout.stored_dtype(scale_dtype, scale_layout)
    groups = _group_count(y, group_size)
    values = activations_as_float32(y).unflatten(-1, (groups, group_size))
    scales = _scale_of(values, floor, scale_rule, _rounded_to(scale_rounding, y))
    if scale_dtype != "float32":
        scales = ceil_to_power_of_two(scales)
    codes = to_e4m3(_quotient(values, scales, rule)).flatten(-2)
    stored = scales.squeeze(-1)
    if scale_dtype == "ue8m0":
        stored = _biased_exponent(stored).to(torch.uint8).view(torch.float8_e8m0fnu)
    return codes, layout.lay_out_group_scales(stored, scale_dtype, scale_layout)


def dequantize(codes: Tensor, scales: Tensor, group_size: int | None = None) -> Tensor:
    """fp32 [..., H] = code * scale, for codes float8_e4m3fn [..., H].

    Without `group_size` the scales are static (one element, any shape) or per token (one per row:
    [..., 1] or [T, 1]). With it they are per group, [..., G] or [T, G], of any layout or dtype (int32:
    `tma_aligned_packed`). ValueError when their number doesn't fit the codes.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.ndim == 0:
        raise ValueError(f"dequantize got {codes.dtype} codes with {codes.ndim} dims; it reads float8_e4m3fn [..., H]")
    if group_size is not None and scales.dtype == torch.int32:
        scales = layout.unpack_group_scales(scales, _group_count(codes, group_size))
    values, multipliers = codes.to(torch.float32), scales.to(torch.float32)
    if group_size is None and scales.numel() == 1:
        return values * multipliers.reshape(())
    rows = codes.shape[:-1]
    per_row = 1 if group_size is None else _group_count(codes, group_size)
    expected = math.prod(rows) * per_row
    if scales.numel() != expected:
        raise ValueError(
            f"scales {tuple(scales.shape)} don't fit codes {tuple(codes.shape)} with group_size "
            f"{group_size}: {per_row} a row, {expected} in all"
        )
    multipliers = multipliers.reshape(*rows, per_row)
    if group_size is None:
        return values * multipliers
    return (values.unflatten(-1, (per_row, group_size)) * multipliers.unsqueeze(-1)).flatten(-2)


def ceil_to_power_of_two(scale: Tensor) -> Tensor:
    """fp32 >= 0 -> the least power of two that is not smaller, fp32; NaN stays NaN.

    By exponent bits, as DeepGEMM does (deep_gemm/utils/math.py, ceil_to_ue8m0), with its range:
    2^127 above (inf too), and 2^-126 below (0 too), so the result is a normal fp32 and flushing of
    subnormals on a GPU cannot turn it into 0.
    """
    power = (_biased_exponent(scale) << _MANTISSA_BITS).view(torch.float32)
    return power.masked_fill(scale.isnan(), float("nan"))


def _biased_exponent(scale: Tensor) -> Tensor:
    """The e8m0 code (int32) of `scale` rounded up to a power of two; 0xFF for NaN."""
    bits = scale.view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) & _EXPONENT_MASK
    rounded_up = exponent + ((bits & _MANTISSA_MASK) != 0).to(torch.int32)
    return rounded_up.clamp(1, _E8M0_NAN - 1).masked_fill(scale.isnan(), _E8M0_NAN)


def activations_as_float32(y: Tensor) -> Tensor:
    """y [..., H], H > 0, of a float dtype, as contiguous fp32; ValueError for anything else."""
    if y.dtype not in _ACTIVATION_DTYPES:
        allowed = ", ".join(map(str, _ACTIVATION_DTYPES))
        raise ValueError(f"y is {y.dtype}; a quantiser reads one of {allowed}")
    if y.ndim == 0 or y.shape[-1] == 0:
        raise ValueError(f"y has shape {tuple(y.shape)}; it must be [..., H] with H > 0")
    return y.to(torch.float32).contiguous()


def one_float32(what: str, scale: Tensor, y: Tensor) -> Tensor:
    """`scale` as a 0-dim tensor; ValueError unless fp32, one element, on y's device.

    The device matters for the bits: CUDA divides by a 0-dim CPU tensor by multiplying with its reciprocal.
    """
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != y.device:
        raise ValueError(
            f"{what} is {scale.dtype} {tuple(scale.shape)} on {scale.device}; it must be float32 with "
            f"one element on {y.device}, where y is (per-token and per-group scales are computed, not given)"
        )
    return scale.reshape(())


def _scale_of(values: Tensor, floor: float, scale_rule: str, rounded_to: torch.dtype) -> Tensor:
    """max(amax(|values|) / 448, floor) over the last dim, kept as size 1."""
    layout.require_choice("scale_rule", scale_rule, SCALE_RULES)
    amax = values.abs().amax(dim=-1, keepdim=True)
    if scale_rule == "divide":
        # A tensor on the device, not the number 448: CUDA divides by a number by multiplying with its
        # reciprocal, which is 1 ulp off the recipe's quotient for half of all amax.
        scale = amax / amax.new_full((), E4M3_MAX)
    else:
        scale = amax * (1.0 / E4M3_MAX)
    return scale.to(rounded_to).to(torch.float32).clamp(min=floor)


def _rounded_to(scale_rounding: str, y: Tensor) -> torch.dtype:
    layout.require_choice("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
    return y.dtype if scale_rounding == "activation" else torch.float32


def _quotient(values: Tensor, scale: Tensor, rule: str) -> Tensor:
    if rule == "divide":
        return values / scale
    return values * (scale.reciprocal() if rule == "reciprocal" else scale)


def _group_count(x: Tensor, group_size: int) -> int:
    layout.require_choice("group_size", group_size, GROUP_SIZES)
    if x.ndim == 0 or x.shape[-1] % group_size:
        raise ValueError(
            f"shape {tuple(x.shape)} can't be cut into groups of {group_size}: the last dim must be a "
            f"multiple of it (pad H, or choose another of {GROUP_SIZES})"
        )
    return x.shape[-1] // group_size
