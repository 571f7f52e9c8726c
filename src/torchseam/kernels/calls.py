"""A call of a collective kernel, seen from the host: what its launch computes, and what every such kernel is passed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchseam.formats import fp8
from torchseam.kernels import launch as launches
from torchseam.kernels import local
from torchseam.kernels.channel import Channel, Watch
from torchseam.kernels.launch import PACKET
from torchseam.kernels.rows import as_aligned_rows
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs, norm_dtype_of
from torchseam.seam import Quant, Seam

_PDL_CAPABILITY = (9, 0)  # programmatic dependent launch


@dataclass(frozen=True)
class Call:
    """What one launch computes of a seam, its first quantiser, and where that goes; None: nowhere.

    x: [T, H], rows at multiples of 16 bytes. codes, scales: as they are stored, bytes for one-byte floats.
    """

    seam: Seam
    operands: Operands
    x: Tensor
    quant: Quant | None
    scale: Tensor | None
    reduced: Tensor | None
    residual_out: Tensor | None
    norm_out: Tensor | None
    codes: Tensor | None
    scales: Tensor | None

    @property
    def padded_tokens(self) -> int:
        """Rows of the scales, those of padding too."""
        return self.x.shape[0] if self.scales is None else local.grid(self.x.shape[0], self.quant, self.scales)

    def on_device(self) -> AbstractContextManager[Any]:
        """Where the launch is to be made."""
        return torch.cuda.device(self.x.device) if self.x.is_cuda else contextlib.nullcontext()

    def has_pdl(self) -> bool:
        """Whether the GPU has programmatic dependent launch."""
        return local.speaks_ptx(self.x) and local.capability(self.x.device.index) >= _PDL_CAPABILITY

    def arguments(self, channel: Channel, watch: Watch, parts: int = 1) -> dict[str, Any]:
        """Arguments that the collective kernels share, by name; programs hold rows in `parts` parts."""
        residual = None if self.operands.residual is None else local.as_rows(self.operands.residual)
        inner_weight, weight = self.operands.inner_weight, self.operands.weight
        mailbox, timeout, trap = watch.arguments()
        tokens, hidden = self.x.shape
        ptx = local.speaks_ptx(self.x)
        attributes = local.attributes(hidden, self.seam.inner_norm, self.seam.norm, self.quant, self.seam.residual)
        block = launches.block_of(hidden // parts)
        return {
            **attributes,
            "x_ptr": self.x,
            "residual_ptr": residual,
            "inner_weight_ptr": None if inner_weight is None else inner_weight.contiguous(),
            "weight_ptr": None if weight is None else weight.contiguous(),
            "scale_ptr": self.scale,
            "reduced_ptr": self.reduced,
            "residual_out_ptr": self.residual_out,
            "norm_out_ptr": self.norm_out,
            "codes_ptr": self.codes,
            "scales_ptr": self.scales,
            "buffers_ptr": channel.addresses,
            "counter_ptr": channel.counter,
            "mailbox": mailbox,
            "timeout": timeout,
            "trap": trap,
            "tokens": tokens,
            "padded_tokens": self.padded_tokens,
            "x_stride": self.x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
            "column_stride": self.scales.stride(1) if self.scales is not None and self.scales.dim() == 2 else 0,
            "slot_packets": channel.slot_bytes // PACKET,
            "WORLD": channel.world_size,
            "RANK": channel.rank,
            "BLOCK": block,
            "GROUP": attributes["GROUP"] if self.quant and self.quant.group_size else block,
            "HAS_REDUCED": self.reduced is not None,
            "HAS_RESIDUAL_OUT": self.residual_out is not None,
            "HAS_NORM_OUT": self.norm_out is not None,
            "NATIVE": local.converts_natively(self.x),
            "WATCH": ptx and watch.timeout > 0,
            "PTX": ptx,
        }


def run_seam(seam: Seam, operands: Operands, launch: Callable[[Call], None]) -> list[Tensor]:
    """The outputs of a seam that reduces: one `launch` (none where there are no rows), and one launch of the local
    kernel for each quantiser after the first."""
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
    scale = next(given) if first is not None and first.takes_scale else None
    codes, scales = (*map(local.as_stored, local.take(quantized, first)), None, None)[:2]
    launch(
        Call(
            seam=seam,
            operands=operands,
            x=as_aligned_rows(operands.x),
            quant=first,
            scale=None if scale is None else fp8.one_float32("the scale", scale, operands.x),
            reduced=values.get("reduced"),
            residual_out=values.get("residual"),
            norm_out=norm_out,
            codes=codes,
            scales=scales,
        )
    )
    for quant in others:
        assert norm_out is not None
        scale = next(given) if quant.takes_scale else None
        local.launch_quantizer(None, norm_out, quant, scale, local.take(quantized, quant))
    return outputs
