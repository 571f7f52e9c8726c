"""A call of a kernel that computes a seam, seen from the host: what its one launch computes, and where that goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from torchseam.operands import Operands
from torchseam.outputs import empty_outputs, norm_dtype_of
from torchseam.seam import Quant, Seam


@dataclass(frozen=True)
class Call:
    """What one launch computes of a seam, its first quantiser, and where that goes; None: nowhere.

    quantized: the first quantiser's [codes] or [codes, scales], [] without one.
    """

    seam: Seam
    operands: Operands
    quant: Quant | None
    scale: Tensor | None
    reduced: Tensor | None
    residual_out: Tensor | None
    norm_out: Tensor | None
    quantized: list[Tensor]


#: Computes (norm, quantiser, its scale or None) into [codes] or [codes, scales].
Quantize = Callable[[Tensor, Quant, Tensor | None, list[Tensor]], None]


def run_seam(seam: Seam, operands: Operands, launch: Callable[[Call], None], quantize: Quantize) -> list[Tensor]:
    """The seam's outputs: one `launch`, and one `quantize` for each quantiser after the first; neither where there
    are no rows."""
    outputs = empty_outputs(seam, operands)
    if operands.x.numel() == 0:
        return outputs
    values = dict(zip(seam.outputs, outputs, strict=False))
    quantized = iter(outputs[len(seam.outputs) :])
    given = iter(operands.scales)
    norm_out = values.get("norm")
    if norm_out is None and len(seam.quants) > 1:
        norm_out = operands.x.new_empty(tuple(operands.x.shape), dtype=norm_dtype_of(seam, operands))
    first, *others = seam.quants or (None,)
    launch(
        Call(
            seam=seam,
            operands=operands,
            quant=first,
            scale=next(given) if first is not None and first.takes_scale else None,
            reduced=values.get("reduced"),
            residual_out=values.get("residual"),
            norm_out=norm_out,
            quantized=_take(quantized, first),
        )
    )
    for quant in others:
        assert norm_out is not None
        quantize(norm_out, quant, next(given) if quant.takes_scale else None, _take(quantized, quant))
    return outputs


def _take(quantized: Iterator[Tensor], quant: Quant | None) -> list[Tensor]:
    """The next [codes] or [codes, scales] of `quant`."""
    return [] if quant is None else [next(quantized) for _ in range(1 + quant.emits_scale)]
