"""A seam without a collective, and a quantiser alone: the Triton kernel on CUDA, the reference elsewhere."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from torch import Tensor

from torchseam import reference
from torchseam.backends import flashinfer_local
from torchseam.operands import Operands
from torchseam.seam import Quant, Seam

_log = logging.getLogger(__name__)


def run(seam: Seam, operands: Operands) -> list[Tensor]:
    """A seam that reduces nothing."""
    if flashinfer_local.allowed() and flashinfer_local.takes(seam, operands):
        return flashinfer_local.run(seam, operands)
    kernel = _kernel_for(operands.x, seam.quants)
    if kernel is None:
        return reference.run(seam, operands)
    return kernel.run(seam, operands)


def quantize(y: Tensor, quant: Quant, scale: Tensor | None) -> list[Tensor]:
    """A quantiser alone (arguments: `torchseam.ops.quantize`)."""
    kernel = _kernel_for(y, (quant,))
    if kernel is None:
        return reference.quantize(y, quant, scale)
    return kernel.quantize(y, quant, scale)


def _kernel_for(x: Tensor, quants: tuple[Quant, ...]) -> ModuleType | None:
    """The kernel that takes rows like x's, or None: the reference runs."""
    if not x.is_cuda:
        return None
    if any((q.scale_rule, q.scale_rounding) != ("divide", "none") for q in quants):
        _warn_once("the kernel makes scales by fp32 division only")
        return None
    kernel = _triton_kernel()
    if kernel is None:
        return None
    reason = kernel.unsupported(x)
    if reason is not None:
        _warn_once(reason)
        return None
    return kernel


@functools.cache
def _triton_kernel() -> ModuleType | None:
    try:
        from torchseam.kernels import local
    except Exception as error:  # a broken installation of Triton raises more than ImportError
        _warn_once(f"Triton cannot be imported ({type(error).__name__}: {error})")
        return None
    return local


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("%s: seams run unfused, as plain torch operators", reason)
