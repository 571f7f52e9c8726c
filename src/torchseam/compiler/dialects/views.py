"""Nodes that only rename rows: reshapes that leave the last dimension alone, and functional copies."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def value(node: Node) -> torch.Tensor | None:
    """The fake tensor that stands for a node's result, None where there is none."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these operators."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_reshape(node: Any) -> bool:
    """Whether a node reshapes, whatever becomes of the rows."""
    return is_call(node, *RESHAPES)


def last_dim(node: Node) -> Any:
    """Size of the last dimension; None for scalars and non-tensors."""
    val = value(node)
    return val.shape[-1] if val is not None and val.dim() else None


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two shapes are known to be equal; asks nothing that would guard a symbolic size."""
    return a.dim() == b.dim() and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))


def viewed(node: Any) -> Node | None:
    """The value whose rows a node only renames; None when the node is no row view.

    A row view reshapes rows of a fixed length, [.., H] -> [.., H], or is the copy by which an
    in-place operator was made functional (`copy(old, new)` is `new`).
    """
    if not (isinstance(node, Node) and node.op == "call_function"):
        return None
    source: Any = None
    if node.target in RESHAPES:
        source = node.args[0]
    elif node.target is aten.copy.default:
        source = node.args[1]
        here, there = value(node), value(source)
        if here is None or there is None or here.dtype is not there.dtype or not same_shape(here, there):
            return None
    size = last_dim(node)
    if not isinstance(source, Node) or not isinstance(size, int) or size != last_dim(source):
        return None
    return source


def strip(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Go up through row views: (producer, the views from the producer down to `node`)."""
    views: list[Node] = []
    while (source := viewed(node)) is not None:
        views.append(node)
        node = source
    return node, tuple(reversed(views))


def replay(graph: Graph, node: Node, views: tuple[Node, ...]) -> Node:
    """Apply the same row views to another value; its last dimension may differ (codes, scales)."""
    for view in views:
        if view.target not in RESHAPES:
            continue
        size = [*view.args[1][:-1], last_dim(node)]
        before = value(node)
        node = graph.call_function(aten.reshape.default, (node, size))
        shape = [s.meta["val"] if isinstance(s, Node) else s for s in size]
        assert before is not None
        with before.fake_mode:
            node.meta["val"] = before.reshape(shape)
    return node
