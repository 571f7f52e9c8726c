"""The operators: `torchseam::seam` (a whole seam) and `torchseam::quantize` (a quantiser alone).

Attributes travel as one line of JSON (`Seam.to_json`), tensors as arguments, so every seam is the
same operator and no combination has a schema of its own. Inputs are validated here and nowhere
else; the fake implementations give the shape, dtype and stride of the real results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchseam import reference
from torchseam.backends import local, select
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs, empty_quantized
from torchseam.seam import Norm, Quant, Seam

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_library = torch.library.Library("torchseam", "DEF")
_library.define(
    "seam(Tensor x, Tensor? residual, Tensor? inner_weight, Tensor? weight, Tensor[] scales, str seam) -> Tensor[]"
)
_library.define("quantize(Tensor y, Tensor? scale, str quant) -> Tensor[]")
_library.define("keep_cast(Tensor x, ScalarType dtype) -> Tensor")


# ---- validation -------------------------------------------------------------------------------


def _check_activation(name: str, x: Tensor) -> None:
    if x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"{name} has dtype {x.dtype}; allowed: {', '.join(map(str, ACTIVATION_DTYPES))}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; its last dimension, the hidden size, must exist")


def _check_weight(name: str, weight: Tensor | None, norm: Norm | None, hidden: int) -> None:
    wanted = norm is not None and norm.has_weight
    if (weight is not None) != wanted:
        raise ValueError(f"{name} is {'missing' if wanted else 'given'}, but the norm is {norm}")
    if weight is None:
        return
    if weight.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"{name} has dtype {weight.dtype}; allowed: {', '.join(map(str, ACTIVATION_DTYPES))}")
    if tuple(weight.shape) != (hidden,):
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; it must be [{hidden}], the hidden size")


def _check_quant(quant: Quant, scale: Tensor | None, hidden: int) -> None:
    if hidden % quant.multiple_of:
        raise ValueError(
            f"the hidden size is {hidden}; {quant.scheme} with groups of {quant.group_size} needs a multiple of "
            f"{quant.multiple_of}"
        )
    if (scale is not None) != quant.takes_scale:
        raise ValueError(
            f"{quant.scheme} takes {'a scale' if quant.takes_scale else 'no scale'}; the opposite was given"
        )
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        raise ValueError(
            f"the scale of {quant.scheme} has dtype {scale.dtype} and shape {tuple(scale.shape)}; "
            "it must be one float32 number on the device"
        )


def _check_seam(seam: Seam, operands: Operands) -> None:
    x, residual, scales = operands.x, operands.residual, operands.scales
    _check_activation("x", x)
    if (residual is not None) != seam.residual:
        raise ValueError(f"residual is {'missing' if seam.residual else 'given'}, but the seam is {seam.describe()!r}")
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        raise ValueError(
            f"residual is {residual.dtype} {tuple(residual.shape)}; it must be as x: {x.dtype} {tuple(x.shape)}"
        )
    _check_weight("inner_weight", operands.inner_weight, seam.inner_norm, x.shape[-1])
    _check_weight("weight", operands.weight, seam.norm, x.shape[-1])
    if seam.reduce is not None and seam.reduce.residual != "full":
        raise ValueError(f"the residual is {seam.reduce.residual}; no backend runs that yet, only `kernels.two_shot`")
    takers = [q for q in seam.quants if q.takes_scale]
    if len(scales) != len(takers):
        raise ValueError(f"{len(scales)} scales were given; the seam's quantisers take {len(takers)}")
    given = iter(scales)
    for quant in seam.quants:
        _check_quant(quant, next(given) if quant.takes_scale else None, x.shape[-1])


# ---- implementations --------------------------------------------------------------------------


def _seam_real(
    x: Tensor,
    residual: Tensor | None,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    scales: list[Tensor],
    seam: str,
) -> list[Tensor]:
    parsed = Seam.from_json(seam)
    operands = Operands(x, residual, inner_weight, weight, tuple(scales))
    _check_seam(parsed, operands)
    return select.run(parsed, operands)


def _seam_fake(
    x: Tensor,
    residual: Tensor | None,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    scales: list[Tensor],
    seam: str,
) -> list[Tensor]:
    parsed = Seam.from_json(seam)
    operands = Operands(x, residual, inner_weight, weight, tuple(scales))
    _check_seam(parsed, operands)
    return empty_outputs(parsed, operands)


def _quantize_real(y: Tensor, scale: Tensor | None, quant: str) -> list[Tensor]:
    parsed = Quant.from_json(quant)
    _check_activation("y", y)
    _check_quant(parsed, scale, y.shape[-1])
    return local.quantize(y, parsed, scale)


def _quantize_fake(y: Tensor, scale: Tensor | None, quant: str) -> list[Tensor]:
    parsed = Quant.from_json(quant)
    _check_activation("y", y)
    _check_quant(parsed, scale, y.shape[-1])
    return empty_quantized(y, parsed)


def _keep_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, always a new tensor. Stands for a cast that a compiler must not fold (see compiler/casts.py)."""
    return x.to(dtype, copy=True)


for _key in ("CPU", "CUDA"):
    _library.impl("keep_cast", _keep_cast, _key)
    _library.impl("seam", _seam_real, _key)
    _library.impl("quantize", _quantize_real, _key)
torch.library.register_fake("torchseam::seam", _seam_fake, lib=_library)
torch.library.register_fake("torchseam::quantize", _quantize_fake, lib=_library)
torch.library.register_fake("torchseam::keep_cast", _keep_cast, lib=_library)


# ---- for people who call the operators themselves ---------------------------------------------


def seam(
    seam: Seam,
    x: Tensor,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    inner_weight: Tensor | None = None,
    scales: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Run one seam.

    Args:
        seam: which parts, with their attributes, and which values to return.
        x: [..., H] bf16, fp16 or fp32; this rank's partial sums when the seam reduces.
        residual: as x, when the seam adds one.
        weight, inner_weight: [H] bf16, fp16 or fp32 (any mixture with x's dtype), norm weights.
        scales: one fp32 number for each quantiser that takes one, in the order of `seam.quants`.

    Returns:
        The values named in `seam.outputs`, then codes (and scales, where the scheme emits them) of
        each quantiser. No input is changed or aliased.

    Raises:
        ValueError: an argument does not fit the seam; the message says which and what would.
    """
    return torch.ops.torchseam.seam(x, residual, inner_weight, weight, list(scales), seam.to_json())


def quantize(y: Tensor, quant: Quant, scale: Tensor | None = None) -> list[Tensor]:
    """Quantise y [..., H] (bf16, fp16, fp32): [codes], or [codes, scales] where the scheme emits scales.

    `scale`: fp32, one element: the scale of static FP8, the global scale of NVFP4 (see `Quant.global_scale`).
    Raises ValueError when y or the scale do not fit the recipe.
    """
    return torch.ops.torchseam.quantize(y, scale, quant.to_json())


dequantize = reference.dequantize
