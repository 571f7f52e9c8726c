"""How many packets each result of a row takes on its way from its owner (kernels/results.py says what is in them)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchseam.kernels.launch import PACKET
from torchseam.kernels.packets import WORDS
from torchseam.operands import Operands
from torchseam.outputs import norm_dtype
from torchseam.seam import Quant, Seam

#: Elements of NVFP4 whose codes are one packet.
_NVFP4_PACKET = 2 * PACKET


@dataclass(frozen=True)
class Sections:
    """Packets of each section of a row's results; 0: not sent."""

    reduced: int
    residual: int
    norm: int
    codes: int
    scales: int

    @property
    def packets(self) -> int:
        """Of all sections."""
        return self.reduced + self.residual + self.norm + self.codes + self.scales

    def constants(self) -> dict[str, int]:
        """Where each section begins, as the kernel is told."""
        norm = self.reduced + self.residual
        codes = norm + self.norm
        return {
            "RESIDUAL_AT": self.reduced,
            "NORM_AT": norm,
            "CODES_AT": codes,
            "SCALES_AT": codes + self.codes,
            "RESULT_PACKETS": self.packets,
        }


def sections_of(seam: Seam, operands: Operands) -> Sections:
    """`sections` of a call."""
    x, weight = operands.x, operands.weight
    return sections(seam, x.shape[-1], x.dtype, None if weight is None else weight.dtype)


def sections(seam: Seam, hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Sections:
    """What owners send of a seam that reduces: what it emits, and its norm if a quantiser after the first reads it.

    Rows of H elements of `dtype`; `weight_dtype` is that of the norm's weight, None without one.
    """
    row = _ceil_div(hidden * dtype.itemsize, PACKET)
    gathers_residual = seam.reduce is None or seam.reduce.residual_out == "full"
    sends_norm = "norm" in seam.outputs or len(seam.quants) > 1
    codes, scales = _quantized(hidden, seam.quants[0]) if seam.quants else (0, 0)
    of_norm = norm_dtype(dtype, weight_dtype, seam.norm)
    return Sections(
        reduced=row if "reduced" in seam.outputs else 0,
        residual=row if "residual" in seam.outputs and gathers_residual else 0,
        norm=_ceil_div(hidden * of_norm.itemsize, PACKET) if sends_norm else 0,
        codes=codes,
        scales=scales,
    )


def _quantized(hidden: int, quant: Quant) -> tuple[int, int]:
    """Packets of codes and of scales."""
    if quant.scheme == "nvfp4":
        codes = _ceil_div(hidden, _NVFP4_PACKET)
        return codes, _ceil_div(codes, WORDS)  # a word beside each packet
    scales = {"fp8_static": 0, "fp8_token": 1}.get(quant.scheme, hidden // (quant.group_size or 1))
    return _ceil_div(hidden, PACKET), _ceil_div(scales, WORDS)


def _ceil_div(n: int, d: int) -> int:
    return -(-n // d)
