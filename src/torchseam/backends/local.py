"""A seam without a collective, and a quantiser alone: the Triton kernel on CUDA, the reference elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import logging
from types import ModuleType

from torch import Tensor

from torchseam import reference
from torchseam.backends import flashinfer_local
from torchseam.operands import Operands
from torchseam.seam import Quant, Seam

_log = logging.getLogger(__name__)

#: What of a `Quant` the kernels implement, with every value that it can have. An attribute that is added to `Quant`
#: stays the reference's, wherever it is not its default, until it is added here as well.
_SCHEMES = ("fp8_static", "fp8_token", "fp8_group", "nvfp4")
_ATTRIBUTES = frozenset(
    (
        *("scheme", "group_size", "scale_dtype", "scale_layout", "rule"),
        *("scale_floor", "scale_rule", "scale_rounding", "global_scale"),
    )
)


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


def has_kernel_for(x: Tensor, quants: tuple[Quant, ...]) -> bool:
    """Whether a Triton kernel runs rows like those of x [..., H] with these quantisers."""
    return _kernel_for(x, quants) is not None


@functools.lru_cache(maxsize=4096)
def unsupported_recipe(quant: Quant) -> str | None:
    """What of a recipe the GPU kernels lack, or None. The only place that refuses one."""
    if quant.scheme not in _SCHEMES:
        return f"the GPU kernel has no scheme {quant.scheme!r}"
    for field in dataclasses.fields(quant):
        value = getattr(quant, field.name)
        if field.name not in _ATTRIBUTES and value != field.default:
            return f"the GPU kernel has no {field.name} {value!r}"
    return None


def _kernel_for(x: Tensor, quants: tuple[Quant, ...]) -> ModuleType | None:
    """The kernel that takes rows like x's, or None: the reference runs."""
    if not x.is_cuda:
        return None
    for lacking in filter(None, map(unsupported_recipe, quants)):
        _warn_once(lacking)
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
