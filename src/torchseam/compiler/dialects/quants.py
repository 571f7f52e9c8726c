"""Quantisers: every dialect that spells one, asked in turn.

A match starts at the node that ends a quantiser (the cast to codes, or the operator's call) and is read
upwards from there, so one quantiser is found once however many of its nodes read the norm.
"""

from __future__ import annotations

from torch.fx import Node

from torchseam.compiler.dialects.aten_fp8 import match_aten_fp8
from torchseam.compiler.dialects.own import match_own
from torchseam.compiler.dialects.quant_match import QuantMatch, QuantMiss
from torchseam.compiler.dialects.torchao_nvfp4 import match_torchao_nvfp4
from torchseam.compiler.dialects.vllm import match_vllm


def match_quant(node: Node) -> QuantMatch | QuantMiss | None:
    """The quantiser that ends at `node`; None when `node` ends none."""
    return match_own(node) or match_aten_fp8(node) or match_vllm(node) or match_torchao_nvfp4(node)
