"""What a quantiser dialect hands back: the quantiser that it names, or why it cannot."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch.fx import Node

from torchseam.seam import Quant


@dataclass(frozen=True)
class QuantMatch:
    """A quantiser: reads `input`; its codes (and scales) are the nodes `results`, in the operator's order.

    A result that nobody reads is None. `nodes` are all of its nodes. `scales_transposed`: the node of
    the scales holds their transpose.
    """

    quant: Quant
    input: Node
    scale: Node | None
    results: tuple[Node | None, ...]
    nodes: tuple[Node, ...]
    scales_transposed: bool = False


@dataclass(frozen=True)
class QuantMiss:
    """Codes that are no recipe we can read; `why` says so. `reads`: what they are computed from, nearest first."""

    node: Node
    why: str
    reads: tuple[Node, ...]


class Unread(Exception):
    """Raised inside a dialect at a step that no recipe has; the message says which."""


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number >= 0 as bf16, fp16 or fp32 has it, by way of fp32 as torch goes.

    Not with a tensor: while a graph is compiled, tensors are fake.
    """
    try:
        (bits,) = struct.unpack("I", struct.pack("f", number))
        if dtype is torch.bfloat16:  # the upper half of the bits, nearest even
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        (single,) = struct.unpack("f", struct.pack("I", bits))
        return struct.unpack("e", struct.pack("e", single))[0] if dtype is torch.float16 else single
    except OverflowError:
        return float("inf")
