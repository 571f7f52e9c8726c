"""Take sums apart that Inductor has moved into a matrix product.

`residual + a @ b` is `addmm(residual, a, b)` when torchseam's pass begins: one rounding fewer than eager, and no
addition is left to be a seam's residual. Which of these sums are a part of a seam is known when seams are planned:
all are taken apart before, and the others put together again.
"""

from __future__ import annotations

from collections.abc import Container

from torch.fx import Graph, Node

from torchseam.compiler.dialects.views import aten, value


def _was_a_sum(node: Node) -> bool:
    """Whether an addmm was a product and an addition in the user's model."""
    added, total = node.args[0], value(node)
    # By name: Inductor deep-copies what it notes of a node.
    if node.kwargs or str(node.meta.get("original_aten")) != str(aten.add.Tensor) or not isinstance(added, Node):
        return False
    val = value(added)
    return val is not None and total is not None and val.dtype is total.dtype


def take_apart(graph: Graph) -> list[Node]:
    """Make each addmm that was a sum a product and a sum again, as the model has them; returns the sums."""
    nodes = [node for node in graph.find_nodes(op="call_function", target=aten.addmm.default) if _was_a_sum(node)]
    for node in nodes:
        added, a, b = node.args
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (a, b))
        product.meta.update({key: entry for key, entry in node.meta.items() if key != "original_aten"})
        node.target = aten.add.Tensor
        node.args = (product, added)
    return nodes


def put_together(graph: Graph, sums: list[Node], but: Container[Node]) -> None:
    """Undo `take_apart` for its `sums`, `but` some."""
    for node in sums:
        if node in but:
            continue
        product, added = node.args
        assert isinstance(product, Node)
        node.target = aten.addmm.default
        node.args = (added, *product.args)
        graph.erase_node(product)
