"""What the kernels that sum over ranks are passed alike."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchseam.formats import fp8
from torchseam.kernels import launch as launches
from torchseam.kernels import local
from torchseam.kernels.calls import Call
from torchseam.kernels.channel import Channel, Watch
from torchseam.kernels.launch import PACKET
from torchseam.kernels.rows import as_aligned_rows


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Where the launch for x is to be made."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def arguments(call: Call, channel: Channel, watch: Watch, num_warps: int, parts: int = 1) -> dict[str, Any]:
    """Arguments that the collective kernels share, by name; programs of `num_warps` hold rows in `parts` parts.

    ValueError for more threads than a part has packets (`launch.check_threads`), before anything is sent.
    """
    seam, operands, quant = call.seam, call.operands, call.quant
    x = as_aligned_rows(operands.x)
    tokens, hidden = x.shape
    launches.check_threads(num_warps, hidden // parts, x.itemsize)
    residual = None if operands.residual is None else local.as_rows(operands.residual)
    codes, scales = (*map(local.as_stored, call.quantized), None, None)[:2]
    mailbox, timeout, trap = watch.arguments()
    ptx = local.speaks_ptx(x)
    attributes = local.attributes(hidden, seam.inner_norm, seam.norm, quant, seam.residual)
    block = launches.block_of(hidden // parts)
    return {
        **attributes,
        "x_ptr": x,
        "residual_ptr": residual,
        "inner_weight_ptr": None if operands.inner_weight is None else operands.inner_weight.contiguous(),
        "weight_ptr": None if operands.weight is None else operands.weight.contiguous(),
        "scale_ptr": None if call.scale is None else fp8.one_float32("the scale", call.scale, x),
        "reduced_ptr": call.reduced,
        "residual_out_ptr": call.residual_out,
        "norm_out_ptr": call.norm_out,
        "codes_ptr": codes,
        "scales_ptr": scales,
        "buffers_ptr": channel.addresses,
        "counter_ptr": channel.counter,
        "mailbox": mailbox,
        "timeout": timeout,
        "trap": trap,
        "tokens": tokens,
        "padded_tokens": local.grid(tokens, quant, scales),
        "x_stride": x.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "column_stride": scales.stride(1) if scales is not None and scales.dim() == 2 else 0,
        "slot_packets": channel.slot_bytes // PACKET,
        "WORLD": channel.world_size,
        "RANK": channel.rank,
        "BLOCK": block,
        "GROUP": attributes["GROUP"] if quant and quant.group_size else block,
        "HAS_REDUCED": call.reduced is not None,
        "HAS_RESIDUAL_OUT": call.residual_out is not None,
        "HAS_NORM_OUT": call.norm_out is not None,
        "NATIVE": local.native_level_of(x),
        "WATCH": ptx and watch.timeout > 0,
        "PTX": ptx,
    }
