"""torchseam's own operator, `torchseam::quantize`."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from torchseam.compiler.dialects.quant_match import QuantMatch
from torchseam.compiler.dialects.views import is_call
from torchseam.seam import Quant


def match_own(node: Node) -> QuantMatch | None:
    """The quantiser that `node`, a call of our operator, is."""
    if not is_call(node, torch.ops.torchseam.quantize.default):
        return None
    given = {**dict(zip(("y", "scale", "quant"), node.args, strict=False)), **node.kwargs}
    y, scale, text = given["y"], given["scale"], given["quant"]
    quant = Quant.from_json(text)
    results: list[Node | None] = [None] * (2 if quant.emits_scale else 1)
    for user in node.users:
        if user.target is not operator.getitem or results[user.args[1]] is not None:
            return None
        results[user.args[1]] = user
    nodes = (node, *(r for r in results if r is not None))
    return QuantMatch(quant, y, scale, tuple(results), nodes)
