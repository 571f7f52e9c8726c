"""Take sums apart that Inductor has moved into a matrix product.

`all_reduce(x) + a @ b` is `addmm(all_reduce(x), a, b)` when torchseam's pass begins: one rounding fewer than eager, and
no addition is left to be a seam's residual.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from torchseam.compiler.dialects.collectives import match_all_reduce
from torchseam.compiler.dialects.views import aten, same_shape, strip, value


def _was_a_sum(node: Node) -> bool:
    """Whether an addmm adds the result of an all_reduce and was an addition in the user's model."""
    added, total = node.args[0], value(node)
    # By name: Inductor deep-copies what it notes of a node.
    if node.kwargs or str(node.meta.get("original_aten")) != str(aten.add.Tensor) or not isinstance(added, Node):
        return False
    val = value(added)
    if val is None or total is None or val.dtype is not total.dtype or not same_shape(val, total):
        return False
    return match_all_reduce(strip(added)[0]) is not None


def take_apart(graph: Graph) -> int:
    """Make such an addmm a product and a sum again, as the model has them; returns how many there were."""
    nodes = [n for n in graph.find_nodes(op="call_function", target=aten.addmm.default) if _was_a_sum(n)]
    for node in nodes:
        added, a, b = node.args
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (a, b))
        product.meta.update({key: entry for key, entry in node.meta.items() if key != "original_aten"})
        node.target = aten.add.Tensor
        node.args = (product, added)
    return len(nodes)
