"""Quantisers: torchseam's own operator, and static FP8 written in plain aten."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torchseam.compiler.dialects.views import aten, value
from torchseam.formats.fp8 import E4M3_MAX
from torchseam.seam import Quant

_convert = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class QuantMatch:
    """A quantiser: reads `input`; its codes (and scales) are the nodes `results`, in the operator's order.

    A result that nobody reads is None. `nodes` are all of its nodes.
    """

    quant: Quant
    input: Node
    scale: Node | None
    results: tuple[Node | None, ...]
    nodes: tuple[Node, ...]


def match_quant(user: Node) -> QuantMatch | None:
    """The quantiser that begins at `user`, a node that reads the value to be quantised."""
    return _match_own(user) or _match_static_fp8(user)


def _match_own(node: Node) -> QuantMatch | None:
    if node.op != "call_function" or node.target is not torch.ops.torchseam.quantize.default:
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


def _next(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _match_static_fp8(node: Node) -> QuantMatch | None:
    """`(y.float() / scale).clamp(-448, 448).to(float8_e4m3fn)`, or with `* (1 / scale)`, `* encode_scale`."""
    nodes: list[Node] = []
    y = node.args[0] if node.args else None
    if _calls(node, _convert) and node.args[1] is torch.float32:
        nodes.append(node)
        wide, step = node, _next(node)
    else:
        wide, step = y, node
    if not isinstance(y, Node) or not isinstance(wide, Node) or value(wide) is None:
        return None
    if value(wide).dtype is not torch.float32:
        return None
    if not _calls(step, aten.div.Tensor, aten.mul.Tensor):
        return None
    scale = step.args[1] if step.args[0] is wide else step.args[0]
    if step.target is aten.div.Tensor and step.args[0] is not wide:
        return None
    if not isinstance(scale, Node) or value(scale) is None or value(scale).numel() != 1 or scale is wide:
        return None
    nodes.append(step)
    rule, inner = "divide", None
    if step.target is aten.mul.Tensor:
        rule = "multiply"
        if _calls(scale, aten.reciprocal.default):
            rule, inner = "reciprocal", scale
        if inner is not None:
            scale = inner.args[0]
    clamped = _match_clamp(step, nodes)
    if clamped is None:
        return None
    codes = _next(clamped)
    if not _calls(codes, _convert) or codes.args[1] is not torch.float8_e4m3fn:
        return None
    nodes.append(codes)
    if inner is not None:
        nodes.insert(0, inner)
    return QuantMatch(Quant("fp8_static", rule=rule), y, scale, (codes,), tuple(nodes))


def _match_clamp(node: Node, nodes: list[Node]) -> Node | None:
    """The last node of a clamp to +-448 that begins at a reader of `node`; its nodes are appended."""
    first = _next(node)
    if first is None:
        return None
    if _calls(first, aten.clamp.default) and tuple(first.args[1:]) == (-E4M3_MAX, E4M3_MAX):
        nodes.append(first)
        return first
    second = _next(first)
    low, high = (aten.clamp_min.default, -E4M3_MAX), (aten.clamp_max.default, E4M3_MAX)
    for one, two in ((low, high), (high, low)):
        if _calls(first, one[0]) and first.args[1] == one[1] and _calls(second, two[0]) and second.args[1] == two[1]:
            nodes += [first, second]
            return second
    return None
