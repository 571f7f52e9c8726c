"""Let a seam write into memory that nobody reads afterwards: the residual's, and that of the partial sums.

`rewrite` puts the functional operator in; here it becomes `seam_` where that is safe, in the form that
Inductor has for mutation in a functional graph, `auto_functionalized_v2`. Inductor looks itself whether the
memory is free when it takes that form apart, by the order of the graph, and would copy if it were not. That is not
enough: what it computes itself it may compute later than where it stands (`_read_after`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._inductor.lowering import fallback_node_due_to_unsupported_type
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchseam import ops
from torchseam.compiler.dialects.views import aten, convert, value
from torchseam.seam import Output, Seam

_functionalized = torch.ops.higher_order.auto_functionalized_v2
#: Operators whose result Inductor may keep in the memory of their input though their schemas do not say so.
_PASSED_ON = {aten.lift_fresh_copy.default, aten.copy.default, aten._to_copy.default, aten.cat.default, convert}
if torch.distributed.is_available():
    _PASSED_ON.add(torch.ops._c10d_functional.wait_tensor.default)
#: What Inductor runs where it stands. Anything else it may compute as late as its first reader: an operator that
#: overwrites memory is put in the schedule before those that were to read the old values are looked at.
_RUN_WHERE_THEY_STAND = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    torch.ops.torchseam.quantize.default,
    torch.ops.torchseam.quantize.single,
    torch.ops.torchseam.seam.default,
    torch.ops.torchseam.seam.single,
    _functionalized,
}
#: Nodes that are looked at below a reader; beyond, its memory counts as read. No model comes near.
_MOST_LOOKED_AT = 1000
#: The operator's arguments in order, and what is found in those that may be overwritten.
_ARGUMENTS = ("x", "residual", "inner_weight", "weight", "scales", "seam")
_FOUND_IN: dict[str, Output] = {"x": "reduced", "residual": "residual"}


class _Memory:
    """Which nodes of a graph may lie in the same memory."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._parent: dict[Node, Node] = {}
        self._members: dict[Node, list[Node]] = {}
        by_storage: dict[int, Node] = {}
        for node in self.order:
            self._members[node] = [node]
            for source in _shares_with(node):
                if not isinstance(source.meta.get("val"), torch.types.py_sym_types):  # a size is in nobody's memory
                    self._join(source, node)
            val = value(node)
            if val is not None and torch._C._has_storage(val):
                self._join(by_storage.setdefault(val.untyped_storage()._cdata, node), node)

    def _root(self, node: Node) -> Node:
        while (above := self._parent.get(node)) is not None:
            node = above
        return node

    def _join(self, a: Node, b: Node) -> None:
        a, b = self._root(a), self._root(b)
        if a is b:
            return
        if len(self._members[a]) < len(self._members[b]):
            a, b = b, a
        self._parent[b] = a
        self._members[a] += self._members.pop(b)

    def together(self, node: Node) -> list[Node]:
        """The nodes that may lie in the memory of `node`, itself among them."""
        return self._members[self._root(node)]

    def replace(self, old: Node, new: Node) -> None:
        """`new` stands where `old` stood, with its value."""
        self.order[new] = self.order[old]
        self._members[new] = [new]
        self._join(old, new)


def _shares_with(node: Node) -> Iterable[Node]:
    """The inputs in whose memory a node's result may lie, as far as its operator tells."""
    if node.op != "call_function":
        return ()
    if node.target is operator.getitem:
        source = node.args[0]
        return (source,) if isinstance(source, Node) and any(True for _ in _shares_with(source)) else ()
    if node.target in _PASSED_ON:
        val = value(node)
        return [n for n in node.all_input_nodes if val is None or value(n) is None or value(n).dtype is val.dtype]
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        return node.all_input_nodes
    return ()


def _is_contiguous(val: Tensor) -> bool:
    """Whether a tensor is known to be contiguous; asks nothing that would guard a symbolic size."""
    expected: object = 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def _is_free(node: Node, call: Node, memory: _Memory) -> bool:
    """Whether `call` is the last to read the memory of its argument `node`, and reads it as that argument only."""
    val = value(node)
    if val is None or not torch._C._has_storage(val) or not _is_contiguous(val):
        return False
    together = memory.together(node)
    if sum(argument in together for argument in _arguments(call)) != 1:
        return False
    now = memory.order[call]
    if any(
        member.op != "call_function" or any(user is not call and memory.order[user] >= now for user in member.users)
        for member in together
    ):
        return False
    beside = set(together)
    readers = {user for member in together for user in member.users if user is not call and user not in beside}
    return not any(_read_after(reader, now, memory.order) for reader in readers)


def _read_after(reader: Node, now: int, order: dict[Node, int]) -> bool:
    """Whether what `reader` reads may still be read at `now`: what is computed from it is used then, and Inductor may
    compute it as late as that; or it starts a collective that is waited for then."""
    seen: set[Node] = set()
    stack = [reader]
    while stack:
        node = stack.pop()
        if node in seen or node.target in _RUN_WHERE_THEY_STAND:
            continue
        seen.add(node)
        if len(seen) > _MOST_LOOKED_AT or any(order[user] >= now for user in node.users):
            return True
        stack += node.users
    return False


def _arguments(call: Node) -> list[Node]:
    return [a for a in (*call.args[:4], *call.args[4]) if isinstance(a, Node)]


def reuse(graph: Graph, calls: dict[Node, Seam]) -> dict[Node, Node]:
    """Give each call memory that is free, where there is some. The graph must be in topological order.

    calls: the nodes of `torchseam::seam` in the graph, and the seam of each.
    Returns what stands now for each call that was changed.
    """
    if not calls:
        return {}
    memory = _Memory(graph)
    changed: dict[Node, Node] = {}
    for call in sorted(calls, key=memory.order.__getitem__):
        seam = calls[call]
        # Inductor's patterns pass over a node with a dtype that it cannot compute with (UE8M0 bytes; e4m3 on an old
        # GPU), and one of them is what takes `auto_functionalized_v2` apart.
        if fallback_node_due_to_unsupported_type(call, allow_cpu_inputs=False):
            continue
        given = dict(zip(_ARGUMENTS, call.args, strict=True))
        wanted = {"x": _sums_in_x(seam, call), "residual": "residual" in seam.outputs}
        free = [name for name, wants in wanted.items() if wants and _is_free(given[name], call, memory)]
        if free and ops.returned_beside(seam, free) <= ops.MAX_RETURNED:
            changed[call] = _overwrite(graph, call, seam, free, memory)
    return changed


def _sums_in_x(seam: Seam, call: Node) -> bool:
    """Whether x may be overwritten as far as values go: by `collective` always, by the others as long as nobody reads
    the sum. They send x to other GPUs while they write the sum, which must then be somewhere else."""
    if seam.reduce is None:
        return False
    only_collective = seam.reduce.backend == "collective" or value(call.args[0]).device.type != "cuda"
    return only_collective or "reduced" not in seam.outputs


def _overwrite(graph: Graph, call: Node, seam: Seam, free: list[str], memory: _Memory) -> Node:
    """Put the mutating operator, made functional, in the place of `call`."""
    target = ops.in_place(seam, free)
    kwargs: dict[str, object] = dict(zip(_ARGUMENTS, call.args, strict=True))
    bases = [kwargs.pop(name) for name in free]
    kwargs |= {f"_{name}_base_index": at for at, name in enumerate(free)}
    kwargs["_all_bases"] = bases
    vals: list[Tensor] = list(call.meta["val"])
    # `auto_functionalized_v2` gives what the operator returns, then the new values of the bases.
    found = [seam.outputs.index(_FOUND_IN[name]) if _FOUND_IN[name] in seam.outputs else None for name in free]
    order = [*(i for i in range(len(vals)) if i not in found), *found]
    with graph.inserting_before(call):
        new = graph.call_function(_functionalized, (target,), kwargs)
        new.meta.update({key: entry for key, entry in call.meta.items() if key != "tensor_meta"})
        new.meta["val"] = tuple(_like(call.args[0]) if i is None else vals[i] for i in order)
        memory.replace(call, new)
        for item in list(call.users):
            moved = graph.call_function(operator.getitem, (new, order.index(item.args[1])))
            moved.meta.update(item.meta)
            memory.replace(item, moved)
            item.replace_all_uses_with(moved)
            graph.erase_node(item)
    graph.erase_node(call)
    return new


def _like(node: Node) -> Tensor:
    val = value(node)
    assert val is not None
    with val.fake_mode:
        return torch.empty_like(val)
