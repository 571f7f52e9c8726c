"""The tensors of a seam, as one value: what travels from the operator to whatever runs it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Operands:
    """What a seam reads, and memory that it may write.

    x: [..., H] bf16, fp16 or fp32; this rank's partial sums when the seam reduces.
    residual: as x, when the seam adds one.
    inner_weight, weight: [H] bf16, fp16 or fp32, the weights of the seam's norms that have one.
    scales: one fp32 number for each quantiser that takes one, in the order of `seam.quants`.
    reduced_out, residual_out: contiguous, as x: where the sum over the ranks and what the norm reads may be put. The
        operator gives x itself and the residual itself where nobody reads them afterwards, else None. What runs the
        seam may then overwrite them in any way, and returns as an output the very tensor in which it has put it. It
        need not: the operator copies an output that was returned elsewhere. Only `collective` is given `reduced_out`.
    """

    x: Tensor
    residual: Tensor | None = None
    inner_weight: Tensor | None = None
    weight: Tensor | None = None
    scales: tuple[Tensor, ...] = ()
    reduced_out: Tensor | None = None
    residual_out: Tensor | None = None
