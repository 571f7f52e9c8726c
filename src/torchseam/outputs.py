"""The outputs of a seam or a quantiser: dtypes, shapes and strides, allocated and not yet filled.

The operators' fake implementations and the kernels' host code allocate here, so that what is traced
and what is returned cannot differ. Values are no business of this module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchseam.formats import layout
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Seam

_E4M3 = torch.float8_e4m3fn
_SCALE_TORCH_DTYPES = {
    "float32": torch.float32,
    "ue8m0_float32": torch.float32,
    "ue8m0": torch.float8_e8m0fnu,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def empty_quantized(y: Tensor, quant: Quant) -> list[Tensor]:
    """Uninitialised [codes] or [codes, scales] for y [..., H].

    The storage of TMA-aligned scales holds the padding of the last column too: TMA reads it.
    """
    *lead, hidden = y.shape
    if quant.scheme == "nvfp4":
        codes = y.new_empty((*lead, hidden // 2), dtype=torch.uint8)
    else:
        codes = y.new_empty(tuple(y.shape), dtype=_E4M3)
    if not quant.emits_scale:
        return [codes]
    dtype = _SCALE_TORCH_DTYPES[quant.scale_dtype or ""]
    columns = 1 if quant.scheme == "fp8_token" else hidden // quant.multiple_of
    tokens = y.numel() // hidden
    if quant.scale_layout == "swizzled":
        return [codes, y.new_empty(layout.swizzled_shape(tokens, columns), dtype=dtype)]
    if quant.scale_layout in ("column_major", "tma_aligned", layout.PACKED):
        shape, strides = layout.group_scale_geometry(tokens, columns, quant.scale_dtype, quant.scale_layout)
        stored = layout.stored_dtype(quant.scale_dtype, quant.scale_layout)
        storage = y.new_empty((shape[1], strides[1]), dtype=stored)
        return [codes, storage.as_strided(shape, strides)]
    return [codes, y.new_empty((*lead, columns), dtype=dtype)]


def norm_dtype(x: torch.dtype, weight: torch.dtype | None, norm: Norm) -> torch.dtype:
    """The dtype of the norm of activations of dtype `x` (see `reference.rms_norm`)."""
    if norm.weight == "after_cast" and weight is not None:
        return torch.promote_types(x, weight)
    return x


def norm_dtype_of(seam: Seam, operands: Operands) -> torch.dtype:
    """The dtype of the seam's norm."""
    return norm_dtype(operands.x.dtype, None if operands.weight is None else operands.weight.dtype, seam.norm)


def empty_outputs(seam: Seam, operands: Operands) -> list[Tensor]:
    """Outputs of `torchseam::seam`, in its order: the memory given for one, else new and uninitialised."""
    x, dtype = operands.x, norm_dtype_of(seam, operands)
    given = {"reduced": operands.reduced_out, "residual": operands.residual_out}
    outputs: list[Tensor] = []
    for name in seam.outputs:
        memory = given.get(name)
        if memory is None:
            memory = x.new_empty(tuple(x.shape), dtype=dtype if name == "norm" else x.dtype)
        outputs.append(memory)
    for quant in seam.quants:
        outputs += empty_quantized(x, quant)
    return outputs
