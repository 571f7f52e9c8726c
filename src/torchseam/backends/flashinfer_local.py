"""FlashInfer's add + RMSNorm + NVFP4 in one CuTe kernel, for seams without a collective. Only where it is asked for.

Its numbers are its own, so no seam goes there unasked: it takes the mean of squares of the sum before it is rounded,
and quantises the norm before it is rounded, where eager PyTorch and DESIGN section 4 round first
(cute_dsl/add_rmsnorm_fp4quant.py of 0.6.12 and 0.7.4). TORCHSEAM_FLASHINFER_LOCAL=1 allows it. What its
documentation says of `global_scale`, that the norm is divided by it, is not what it does: it is the encode factor, as
ours (`scale_float = global_scale_val * max_abs * fp4_max_rcp`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchseam import reference
from torchseam.backends import base, flashinfer_api
from torchseam.formats import layout
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs
from torchseam.seam import Norm, Quant, Seam

VARIABLE = "TORCHSEAM_FLASHINFER_LOCAL"
OLDEST_CAPABILITY = (10, 0)
_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_HIDDEN = 64
#: Of the codes of the trial, how many may differ because the kernel rounds less often.
_MOST_CODES_APART = 0.05

#: What came of the trial on each device.
_trust: dict[torch.device, bool] = {}
_log = logging.getLogger("torchseam")
_library = torch.library.Library("torchseam", "FRAGMENT")
_library.define(
    "flashinfer_add_rms_norm_nvfp4(Tensor x, Tensor(a!) residual, Tensor weight, Tensor scale, Tensor(b!) codes, "
    "Tensor(c!) block_scales, Tensor(d!)? norm, float eps, bool swizzled) -> ()"
)


def _real(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    norm: Tensor | None,
    eps: float,
    swizzled: bool,
) -> None:
    """x, residual, norm [T, H]; residual becomes the sum, codes [T, H / 2], block_scales the bytes of their layout."""
    if swizzled:
        layout.zero_padding(block_scales, x.shape[0], x.shape[1] // 16)
    arguments: dict[str, Any] = {"y_out": norm} if norm is not None else {}
    _function()(
        input=x,
        residual=residual,
        weight=weight,
        y_fp4=codes,
        block_scale=(block_scales.view(-1) if swizzled else block_scales).view(torch.float8_e4m3fn),
        global_scale=scale.reshape(1),
        eps=eps,
        is_sf_swizzled_layout=swizzled,
        **arguments,
    )


for _key in ("CPU", "CUDA"):  # on a CPU for tests: FlashInfer itself refuses it
    _library.impl("flashinfer_add_rms_norm_nvfp4", _real, _key)
torch.library.register_fake("torchseam::flashinfer_add_rms_norm_nvfp4", lambda *_: None, lib=_library)


def takes(seam: Seam, operands: Operands) -> bool:
    """Whether a seam without a collective goes to this kernel."""
    if not allowed() or refuses(seam, operands) is not None:
        return False
    device = operands.x.device
    if device not in _trust:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # the trial waits for the device, which a capture forbids
        _trust[device] = _is_right(device)
    return _trust[device]


def allowed() -> bool:
    return os.environ.get(VARIABLE) == "1"


def refuses(seam: Seam, operands: Operands) -> str | None:
    """Why this kernel cannot run a seam, or None."""
    x, weight = operands.x, operands.weight
    if seam.inner_norm is not None or not seam.residual or [q.scheme for q in seam.quants] != ["nvfp4"]:
        return "it is for residual + norm + nvfp4"
    if seam.quants[0].global_scale != "encode":
        return "it takes an encode factor"
    if seam.norm.weight != "before_cast" or seam.norm.offset or weight is None or weight.dtype != x.dtype:
        return "it takes a weight of the activations' dtype, multiplied before the rounding, without offset"
    if x.dtype not in _DTYPES or x.shape[-1] < _LEAST_HIDDEN or not x.numel():
        return f"it takes bf16 and fp16 rows of {_LEAST_HIDDEN} values or more"
    if (base.capability(x.device) or (0, 0)) < OLDEST_CAPABILITY:
        return "it needs compute capability 10.0"
    why = flashinfer_api.missing() or _import_failure()
    if why is None and "norm" in seam.outputs and "y_out" not in inspect.signature(_function()).parameters:
        why = "this version of flashinfer cannot emit the norm"
    return why


def run(seam: Seam, operands: Operands) -> list[Tensor]:
    """The outputs of a seam that `refuses` has nothing against."""
    x, residual = operands.x, operands.residual
    assert residual is not None and operands.weight is not None
    outputs = empty_outputs(seam, operands)
    named = dict(zip(seam.outputs, outputs, strict=False))
    total = named.get("residual")
    if total is None:
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
    total.copy_(residual)
    codes, block_scales = outputs[len(seam.outputs) :]
    swizzled = seam.quants[0].scale_layout == "swizzled"
    torch.ops.torchseam.flashinfer_add_rms_norm_nvfp4(
        _rows(x.contiguous()),
        _rows(total),
        operands.weight.contiguous(),
        operands.scales[0],
        _rows(codes),
        (block_scales if swizzled else _rows(block_scales)).view(torch.uint8),
        _rows(named["norm"]) if "norm" in named else None,
        seam.norm.eps,
        swizzled,
    )
    return outputs


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


@functools.cache
def _function() -> Callable[..., Any]:
    function: Callable[..., Any] = importlib.import_module("flashinfer.norm").add_rmsnorm_fp4quant
    return function


@functools.cache
def _import_failure() -> str | None:
    try:
        _function()
    except Exception as error:  # CuTe looks for a driver and a compiler: it raises what it likes
        return f"flashinfer's kernel cannot be imported ({type(error).__name__}: {error})"
    return None


def _is_right(device: torch.device) -> bool:
    """Whether a small seam comes out as the reference has it, but for its roundings."""
    tokens, hidden = 5, 1024
    values = torch.arange(tokens * hidden, device=device).view(tokens, hidden)
    x, residual = (values.remainder(97) / 16 - 3).bfloat16(), (values.remainder(251) / 64 - 2).bfloat16()
    weight = (values[0].remainder(7) / 4 + 0.5).bfloat16()
    seam = Seam(Norm(1e-6), residual=True, quants=(Quant("nvfp4"),), outputs=("residual",))
    operands = Operands(x, residual, weight=weight, scales=(torch.full((1,), 300.0, device=device),))
    try:
        got, expected = run(seam, operands), reference.run(seam, operands)
        nibbles = [torch.stack((codes & 15, codes >> 4)) for codes in (got[1], expected[1])]
        share = float((nibbles[0] != nibbles[1]).float().mean())
        good = torch.equal(got[0], expected[0]) and share < _MOST_CODES_APART
    except Exception as error:
        _log.error("flashinfer's add_rmsnorm_fp4quant is not used: %s: %s", type(error).__name__, error)
        return False
    if not good:
        _log.error("flashinfer's add_rmsnorm_fp4quant is not used: %.1f %% of its codes are wrong", 100 * share)
    return good
