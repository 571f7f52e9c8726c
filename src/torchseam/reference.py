"""The eager PyTorch meaning of every seam: the oracle that kernels, backends and rewrites are held to.

Every line here is an aten op that eager models run, in the order in which they run it, so on the
CPU a fused graph gives the very bits of eager. Nothing is tuned; nothing here knows of fx or Triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchseam.formats import fp8, nvfp4
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Seam

#: aten splits a reduction to one single number between threads from this many elements on
#: (at::internal::GRAIN_SIZE), and only then does a row's sum depend on how many rows there are.
_ATEN_GRAIN_SIZE = 32768


def _mean_of_squares(h: Tensor) -> Tensor:
    """mean(h^2) over the last dim, [..., 1]; the same bits for a row alone, in a batch, or strided."""
    if h.stride(-1) != 1:  # aten adds a strided row in another order
        h = h.contiguous()
    squares = h.pow(2)
    if h.device.type == "cpu" and h.shape[-1] >= _ATEN_GRAIN_SIZE and h.numel() == h.shape[-1]:
        pair = squares.reshape(1, -1).expand(2, -1)
        return pair.mean(-1, keepdim=True)[:1].reshape(*h.shape[:-1], 1)
    return squares.mean(-1, keepdim=True)


def _inverse_rms(h: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(h^2) + eps) of h [..., H] fp32: [..., 1]."""
    return torch.rsqrt(_mean_of_squares(h) + eps)


def rms_norm(h: Tensor, weight: Tensor | None, norm: Norm) -> Tensor:
    """RMSNorm of h [..., H] as the model spelled it (DESIGN section 4, rules 3 and 4).

    `weight` is [H] in any float dtype, None for `norm.weight == "none"`. The result has h's dtype;
    with `after_cast` and a weight of another dtype it has torch's promoted dtype, as in eager.
    """
    wide = h.float()
    n = wide * _inverse_rms(wide, norm.eps)
    if norm.weight == "none":
        return n.to(h.dtype)
    assert weight is not None
    if norm.weight == "after_cast":
        return weight * n.to(h.dtype)
    wide_weight = weight.float()
    if norm.offset:
        wide_weight = 1.0 + wide_weight
    return (n * wide_weight).to(h.dtype)


def quantize(y: Tensor, quant: Quant, scale: Tensor | None = None) -> list[Tensor]:
    """Quantise y [..., H]: [codes] or [codes, scales], bytes as DESIGN section 4 says.

    `scale` is the fp32 scale of static FP8 or the fp32 global scale of NVFP4 (one element each), else
    None.
    """
    if quant.scheme == "fp8_static":
        assert scale is not None
        return [fp8.quantize_static(y, scale, quant.rule)]
    if quant.scheme == "fp8_token":
        return list(fp8.quantize_token(y, quant.scale_floor, quant.rule, quant.scale_rule, quant.scale_rounding))
    if quant.scheme == "fp8_group":
        return list(
            fp8.quantize_group(
                y,
                quant.group_size,
                quant.scale_floor,
                quant.scale_dtype,
                quant.scale_layout,
                quant.rule,
                quant.scale_rule,
                quant.scale_rounding,
            )
        )
    return list(nvfp4.quantize(y, scale, quant.scale_layout, quant.global_scale))


def dequantize(codes: Tensor, scales: Tensor | None, quant: Quant, block_scales: Tensor | None = None) -> Tensor:
    """The fp32 values that codes stand for, [..., H].

    FP8: `scales` is the static scale (the encode factor where `quant.rule` is `multiply`), or what the
    quantiser returned. NVFP4: `scales` is the global scale that the quantiser took (None if none) and
    `block_scales` what it returned.
    """
    if quant.scheme == "nvfp4":
        assert block_scales is not None
        return nvfp4.dequantize(codes, block_scales, scales, quant.scale_layout, quant.global_scale)
    assert scales is not None
    if quant.rule == "multiply":
        return codes.float() / scales
    return fp8.dequantize(codes, scales, quant.group_size or None)


def run(
    seam: Seam,
    operands: Operands,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    all_gather: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """What the operator `torchseam::seam` returns, for any seam.

    `all_reduce` sums over the ranks (required when the seam reduces); `all_gather` gives all rows of a residual of
    which each rank has those that it owns (required where `residual_in` is sharded). Returns the values of
    `seam.outputs`, then codes and scales of each quantiser; all rows also of a residual that it may leave sharded.
    """
    values: dict[str, Tensor] = {}
    h = operands.x
    if seam.reduce is not None:
        assert all_reduce is not None
        h = values["reduced"] = all_reduce(h)
    if seam.inner_norm is not None:
        h = rms_norm(h, operands.inner_weight, seam.inner_norm).to(h.dtype)
    if seam.residual:
        residual = operands.residual
        if seam.reduce is not None and seam.reduce.residual_in == "sharded":
            assert all_gather is not None and residual is not None
            residual = all_gather(residual)
        assert residual is not None
        wide = h.float() + residual.float()
        memory = operands.residual_out
        h = values["residual"] = wide.to(h.dtype) if memory is None else memory.copy_(wide)
    y = values["norm"] = rms_norm(h, operands.weight, seam.norm)
    outputs = [values[name].contiguous() for name in seam.outputs]
    given = iter(operands.scales)
    for quant in seam.quants:
        outputs += quantize(y, quant, next(given) if quant.takes_scale else None)
    return outputs
