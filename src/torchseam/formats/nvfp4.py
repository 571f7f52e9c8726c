"""NVFP4 in plain aten ops: e2m1 codes, two a byte, an e4m3 scale per 16 neighbours, and back.

The eager meaning that kernels are held to (DESIGN section 4); not for speed. `global_scale` is the
**encode** factor 448*6/amax of the tensor, as FlashInfer, TensorRT-LLM and vLLM pass it, unless
`kind` says `decode` or `none`: then the arithmetic is torchao's, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import layout
from .fp8 import E4M3_MAX, activations_as_float32, one_float32, to_e4m3

#: Largest e2m1 (OCP Microscaling Formats specification, section 5.3.3).
E2M1_MAX = 6.0
#: Neighbours along H that share one block scale.
BLOCK = 16
#: The value of each code: bit 3 is the sign, bits 2..1 the exponent, bit 0 the mantissa.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
LAYOUTS = ("swizzled", "linear")
KINDS = ("encode", "decode", "none")
#: Smallest block scale of torchao: the smallest normal e4m3 (`torch.finfo(torch.float8_e4m3fn).tiny`).
E4M3_TINY = 2.0**-6

_SIGN = 8
_CODE_OF_MAX = 7
# Midpoints between neighbouring magnitudes. A tie goes to the even code: at the first kind that is
# the lower neighbour, so the value must be greater to go up; at the second it is the upper one.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def to_e2m1(x: Tensor) -> Tensor:
    """fp32 of any shape -> e2m1 codes 0..15, uint8, one code a byte.

    Nearest, ties to the even code; beyond +-6 and inf saturate at 6; the sign bit is kept, so -0.0
    and negatives that round to zero are code 8; NaN of either sign is +6, code 7 (PTX ISA,
    cvt.rn.satfinite.e2m1x2.f32). ValueError unless fp32.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"to_e2m1 got {x.dtype}; the recipe rounds once, from float32: convert first")
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for tie in _TIES_DOWN:
        code = code + (magnitude > tie).to(torch.uint8)
    for tie in _TIES_UP:
        code = code + (magnitude >= tie).to(torch.uint8)
    code = code + x.signbit().to(torch.uint8) * _SIGN
    return code.masked_fill(x.isnan(), _CODE_OF_MAX)


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., H], each 0..15 -> uint8 [..., H/2]: the even element in the low nibble.

    ValueError unless uint8 with an even H.
    """
    if codes.dtype != torch.uint8 or codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"pack got {codes.dtype} {tuple(codes.shape)}; it reads uint8 [..., H] with H even")
    low, high = codes.unflatten(-1, (codes.shape[-1] // 2, 2)).unbind(-1)
    return (low | (high << 4)).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: uint8 [..., H/2] -> uint8 codes [..., H]. ValueError unless uint8."""
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise ValueError(f"unpack got {packed.dtype} with {packed.ndim} dims; it must be uint8 [..., H/2]")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantize(
    y: Tensor, global_scale: Tensor | None, scale_layout: str = "swizzled", kind: str = "encode"
) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [..., H/2] and block scales float8_e4m3fn of y [..., H].

    `global_scale` is fp32 with one element on y's device, None for kind `none`. Block scales are
    [..., H/16] when `linear`; when `swizzled`, 2-D [ceil128(T), ceil4(H/16)] with T the product of the
    leading dims and every padding byte 0. All in fp32. Kind `encode`, as vLLM's reference
    (ref_nvfp4_quant) and TensorRT-LLM (cvt_warp_fp16_to_fp4) do, but with exact reciprocals where
    theirs approximate:

        block_scale = e4m3(min(global_scale * (amax * (1/6)), 448))      NaN amax: 448
        code        = e2m1(y * (1 / (block_scale * (1 / global_scale))))  block_scale 0: code 0

    Kinds `decode` and `none` (a global_scale of 1, which is not divided by), as torchao's
    `nvfp4_quantize` does:

        block_scale = e4m3(clamp((amax / 6) / global_scale, 2^-6, 448))  NaN amax: NaN (0x7F)
        code        = e2m1(y * ((1 / global_scale) / block_scale))       NaN: see `_torchao_nan`

    ValueError for an unknown layout or kind, another global_scale, or H no multiple of 16.
    """
    layout.require_choice("scale_layout of NVFP4", scale_layout, LAYOUTS)
    layout.require_choice("kind of NVFP4's global_scale", kind, KINDS)
    values = activations_as_float32(y)
    columns = _scale_columns(y.shape[-1], y)
    given = _global_scale(global_scale, kind, y)
    blocks = values.unflatten(-1, (columns, BLOCK))
    codes, block_scales = (
        _as_torchao(blocks, given) if given is None or kind == "decode" else _with_factor(blocks, given)
    )
    codes = codes.flatten(-2)
    if scale_layout == "swizzled":
        block_scales = layout.swizzle(block_scales.reshape(-1, columns))
    return pack(codes), block_scales


def _with_factor(blocks: Tensor, encode: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, one a byte, and e4m3 scales of blocks [..., 16] with an encode factor."""
    amax = blocks.abs().amax(dim=-1)
    wanted = encode * (amax * (1.0 / E2M1_MAX))
    block_scales = to_e4m3(wanted.masked_fill(wanted.isnan(), E4M3_MAX))
    stored = block_scales.to(torch.float32).unsqueeze(-1)
    codes = to_e2m1(blocks * (stored * encode.reciprocal()).reciprocal())
    return codes.masked_fill(stored == 0, 0), block_scales


def _as_torchao(blocks: Tensor, decode: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same by torchao's recipe, with its per-tensor scale or without one."""
    wanted = blocks.abs().amax(dim=-1) / E2M1_MAX
    if decode is not None:
        wanted = wanted / decode
    block_scales = wanted.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    stored = block_scales.to(torch.float32)
    factor = 1.0 / stored if decode is None else (1.0 / decode) / stored
    scaled = blocks * factor.unsqueeze(-1)
    return torch.where(scaled.isnan(), _torchao_nan(scaled), to_e2m1(scaled)), block_scales


def _torchao_nan(x: Tensor) -> Tensor:
    """What torchao's integer rounding makes of NaN, uint8: 2, 3 or 4 and the sign, from the payload.

    Such a code stands under a NaN scale, or under a global scale of 0 or inf: it means nothing, and is
    here only so that no bit differs.
    """
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> 22) & 1  # 22 of the 23 mantissa bits of fp32 go
    rounded = (magnitude - (126 << 23) + ((1 << 21) - 1) + odd) >> 22  # exponent biases 127 and 1
    return rounded.to(torch.uint8) | (bits < 0).to(torch.uint8) * _SIGN


def _global_scale(global_scale: Tensor | None, kind: str, like: Tensor) -> Tensor | None:
    if (global_scale is None) != (kind == "none"):
        raise ValueError(f"global_scale is {'missing' if global_scale is None else 'given'}, but its kind is {kind!r}")
    return None if global_scale is None else one_float32("global_scale", global_scale, like)


def dequantize(
    packed: Tensor,
    block_scales: Tensor,
    global_scale: Tensor | None,
    scale_layout: str = "swizzled",
    kind: str = "encode",
) -> Tensor:
    """fp32 [..., H] = value * block_scale / global_scale, for packed codes uint8 [..., H/2].

    With kind `decode` it is value * (block_scale * global_scale), with `none` value * block_scale.
    `block_scales` (float8_e4m3fn, or its bytes as uint8) are as `quantize` returns them; `linear`
    ones may be [T, H/16] under any leading dims. ValueError when shape, dtype or layout don't fit.
    """
    layout.require_choice("scale_layout of NVFP4", scale_layout, LAYOUTS)
    layout.require_choice("kind of NVFP4's global_scale", kind, KINDS)
    given = _global_scale(global_scale, kind, packed)
    codes = unpack(packed)
    columns = _scale_columns(codes.shape[-1], packed)
    if block_scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"block_scales are {block_scales.dtype}; allowed: float8_e4m3fn, or uint8 (the same bytes)")
    blocks = codes.unflatten(-1, (columns, BLOCK))
    if scale_layout == "swizzled":
        tokens = blocks.reshape(-1, columns, BLOCK).shape[0]
        block_scales = layout.unswizzle(block_scales, tokens, columns)
    elif block_scales.numel() != blocks.numel() // BLOCK:
        raise ValueError(
            f"linear block_scales {tuple(block_scales.shape)} don't fit packed codes {tuple(packed.shape)}: "
            f"there must be {columns} a row (or pass scale_layout='swizzled')"
        )
    scales = block_scales.view(torch.float8_e4m3fn).to(torch.float32).reshape(*packed.shape[:-1], columns, 1)
    # Sign apart from magnitude: torch.compile (2.13) turns the -0.0 of a table into 0.0.
    magnitudes = packed.new_tensor(E2M1_VALUES[:_SIGN], dtype=torch.float32)
    values = magnitudes[(blocks % _SIGN).to(torch.int32)] * (1.0 - 2.0 * (blocks // _SIGN).to(torch.float32))
    if given is not None and kind == "decode":
        return (values * (scales * given)).flatten(-2)
    return (values * scales if given is None else values * scales / given).flatten(-2)


def _scale_columns(hidden: int, given: Tensor) -> int:
    if hidden == 0 or hidden % BLOCK:
        raise ValueError(
            f"a tensor of shape {tuple(given.shape)} has H = {hidden}; NVFP4 needs a positive multiple "
            f"of its block of {BLOCK} (pad H)"
        )
    return hidden // BLOCK
