"""Put one operator in the place of each planned chain.

Every value that somebody else still reads is emitted by the operator; nodes of the chain that are
needed for other reasons stay and read the emitted values. The order of the graph stays topological.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from torchseam import ops  # noqa: F401  (registers torch.ops.torchseam)
from torchseam.compiler.dialects.views import aten, is_reshape, replay, same_shape, value
from torchseam.compiler.find import Chain, FoundQuant
from torchseam.compiler.plan import internal_nodes
from torchseam.seam import Output, Quant, Reduce, Seam


def _emitted(chain: Chain, nodes: list[Node]) -> set[Node]:
    """Which of the chain's values must leave the operator: those read outside, or by a node that stays."""
    inside = set(nodes)
    exported = {chain.norm.output}
    if chain.reduce is not None:
        exported.add(chain.reduce.node)
    if chain.add is not None:
        exported.add(chain.add)
    results = {r for q in chain.quants for r in q.match.results if r is not None}
    stays: set[Node] = set()
    emitted: set[Node] = set()
    for node in reversed(_in_graph_order(nodes)):
        read = any(user not in inside or user in stays for user in node.users)
        if not read:
            continue
        if node in exported:
            emitted.add(node)
        elif node not in results:
            stays.add(node)
    return emitted


def _in_graph_order(nodes: list[Node]) -> list[Node]:
    return sorted(nodes)  # fx nodes compare by their place in the graph


def _twins(quants: tuple[FoundQuant, ...]) -> list[list[FoundQuant]]:
    """Quantisers grouped so that each group is one recipe with one scale, reading the same rows."""
    groups: dict[tuple[Quant, Node | None], list[FoundQuant]] = {}
    for found in quants:
        groups.setdefault((found.match.quant, found.match.scale), []).append(found)
    return list(groups.values())


def _call(graph: Graph, args: tuple[object, ...]) -> Node:
    """A node that calls the operator, with its fake result."""
    node = graph.call_function(torch.ops.torchseam.seam.default, args)
    fake = [value(a) if isinstance(a, Node) else a for a in args[:4]]
    scales = [value(s) for s in args[4]]
    mode = fake[0].fake_mode
    with mode:
        node.meta["val"] = torch.ops.torchseam.seam.default(*fake, scales, args[5])
    return node


def _item(graph: Graph, call: Node, index: int) -> Node:
    node = graph.call_function(operator.getitem, (call, index))
    node.meta["val"] = call.meta["val"][index]
    return node


def rewrite(graph: Graph, chain: Chain, backend: str, replaced: dict[Node, Node]) -> tuple[Seam, Node]:
    """Replace one chain; returns the seam and the operator's node. The caller sorts and lints.

    `replaced` maps nodes that earlier calls replaced to what stands for them now; this call adds its own.
    """

    def now(node: Node | None) -> Node | None:
        while node is not None and node in replaced:
            node = replaced[node]
        return node

    nodes = internal_nodes(chain)
    emitted = _emitted(chain, nodes)
    twins = _twins(chain.quants)
    names: dict[Output, Node | None] = {
        "reduced": chain.reduce.node if chain.reduce else None,
        "residual": chain.add,
        "norm": chain.norm.output,
    }
    outputs = tuple(name for name, node in names.items() if node in emitted)
    if "norm" not in outputs and not twins:
        outputs = (*outputs, "norm")
    seam = Seam(
        norm=chain.norm.norm,
        reduce=Reduce(chain.reduce.group, backend) if chain.reduce else None,
        inner_norm=chain.inner.norm if chain.inner else None,
        residual=chain.residual is not None,
        quants=tuple(group[0].match.quant for group in twins),
        outputs=outputs,
    )
    scales = [now(g[0].match.scale) for g in twins if g[0].match.quant.takes_scale]
    before = chain.norm.output
    with graph.inserting_before(before):
        source = now(chain.x)
        assert source is not None
        x = replay(graph, source, chain.x_views)
        inner_weight = now(chain.inner.weight) if chain.inner else None
        call = _call(graph, (x, now(chain.residual), inner_weight, now(chain.norm.weight), scales, seam.to_text()))
        for key in ("stack_trace", "nn_module_stack", "seq_nr"):
            if key in chain.norm.output.meta:
                call.meta[key] = chain.norm.output.meta[key]
        index = 0
        for name in outputs:
            old = names[name]
            assert old is not None
            new = _item(graph, call, index)
            if name == "norm":
                new = replay(graph, new, chain.norm_views)
            elif name == "reduced":
                new = _shape_as(graph, new, source) if not same_shape(value(new), value(source)) else new
            _replace(old, new, replaced)
            index += 1
        for group in twins:
            count = 2 if group[0].match.quant.emits_scale else 1
            for position in range(count):
                readers = [(g, g.match.results[position]) for g in group if g.match.results[position] is not None]
                item = _item(graph, call, index) if readers else None
                index += 1
                for found, old in readers:
                    assert item is not None and old is not None
                    quant, is_scale = found.match.quant, position == 1
                    # A layout of its own has two dimensions, whatever the codes have.
                    keeps_rows = not is_scale or quant.scale_layout in ("row_major", "linear")
                    views = (*chain.norm_views, *found.views) if keeps_rows else ()
                    transposed = is_scale and found.match.scales_transposed
                    _replace(old, _in_place_of(graph, item, old, views, transposed), replaced)
    for node in reversed(_in_graph_order(nodes)):
        if not node.users:
            graph.erase_node(node)
    return seam, call


#: The overload for a single result, of operators that return a list.
_SINGLE = {
    torch.ops.torchseam.seam.default: torch.ops.torchseam.seam.single,
    torch.ops.torchseam.quantize.default: torch.ops.torchseam.quantize.single,
}


def without_lists_of_one(graph: Graph) -> None:
    """Let each operator of ours that returns one tensor return it in no list (`ops` says why)."""
    for target, single in _SINGLE.items():
        for node in graph.find_nodes(op="call_function", target=target):
            vals = node.meta.get("val", ())
            if len(vals) != 1 or any(user.target is not operator.getitem for user in node.users):
                continue
            node.target = single
            (node.meta["val"],) = vals
            for item in list(node.users):
                item.replace_all_uses_with(node)
                graph.erase_node(item)


def _shape_as(graph: Graph, reduced: Node, like: Node) -> Node:
    """The sum over the ranks in the shape that the all_reduce had (the operator works in the norm's)."""
    shape = value(like).shape
    sizes: list[object] = []
    for dim, size in enumerate(shape):
        if isinstance(size, int):
            sizes.append(size)
        else:
            node = graph.call_function(torch.ops.aten.sym_size.int, (like, dim))
            node.meta["val"] = size
            sizes.append(node)
    node = graph.call_function(torch.ops.aten.reshape.default, (reduced, sizes))
    val = value(reduced)
    with val.fake_mode:
        node.meta["val"] = val.reshape(shape)
    return node


def _in_place_of(graph: Graph, new: Node, old: Node, views: tuple[Node, ...], transposed: bool) -> Node:
    """Codes or scales in the shape and dtype in which the quantiser gave them; layouts of their own are left.

    A quantiser in plain aten may keep a last dimension of 1 that the operator does not return, or lack it;
    vLLM keeps e4m3 scales as int32 words or bytes, and may hold on to the transpose of column-major ones.
    """
    if value(new).dtype is not value(old).dtype:
        new = _then(graph, aten.view.dtype, new, value(old).dtype)
    if views and not same_shape(value(new), value(old)):
        new = replay(graph, new, views)
    if transposed:
        return _then(graph, aten.permute.default, new, [1, 0])
    longer = value(new).dim() - value(old).dim()
    if longer in (1, -1) and (value(new) if longer == 1 else value(old)).shape[-1] == 1:
        new = _then(graph, aten.squeeze.dim if longer == 1 else aten.unsqueeze.default, new, -1)
    if not same_shape(value(new), value(old)) and value(new).is_contiguous():
        new = _in_rows_of(graph, new, old)
    return new


def _in_rows_of(graph: Graph, new: Node, old: Node) -> Node:
    """The same numbers in the shape of `old`, which is a reshape when more than one of its sizes is symbolic."""
    shape = value(old).shape
    sizes = old.args[1] if is_reshape(old) else [size if isinstance(size, int) else -1 for size in shape]
    node = graph.call_function(aten.reshape.default, (new, sizes))
    with value(new).fake_mode:
        node.meta["val"] = value(new).reshape(shape)
    return node


def _then(graph: Graph, target: torch._ops.OpOverload, node: Node, argument: object) -> Node:
    new = graph.call_function(target, (node, argument))
    with value(node).fake_mode:
        new.meta["val"] = target(value(node), argument)
    return new


def _replace(old: Node, new: Node, replaced: dict[Node, Node]) -> None:
    for key, entry in old.meta.items():
        if key not in ("val", "tensor_meta"):
            new.meta.setdefault(key, entry)
    old.replace_all_uses_with(new)
    replaced[old] = new
