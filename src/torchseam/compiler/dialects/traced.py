"""Patterns that are traced, not written: what a library's own function becomes in a graph, and where it stands.

`trace` runs the function on fake tensors of the sizes in question (symbolic ones too) through the decompositions
and the joint passes of the installed torch, so the pattern is spelled as Inductor's graphs are. `Walk` lays it over
a graph. What only renames a value (reshapes, copies) may differ; every other operator and argument must be the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchseam.compiler.dialects.views import RESHAPES, aten, is_call, same_shape, value

_RENAMES = (
    *RESHAPES,
    *(aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default),
)


@dataclass(frozen=True)
class Pattern:
    """A function as a graph: the nodes of its tensor inputs and of its outputs."""

    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@contextlib.contextmanager
def _as_if_compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` is True, as it was when the graph in question was captured."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def trace(function: Callable[..., tuple[torch.Tensor, ...]], mode: FakeTensorMode, *fakes: torch.Tensor) -> Pattern:
    """The functional graph of `function(*fakes)`, whose fake tensors are of `mode`. Leaves no guard on their sizes."""
    sizes = mode.shape_env
    quiet = contextlib.nullcontext() if sizes is None else sizes.suppress_guards()
    no_passes = dict.fromkeys(("joint_custom_pre_pass", "joint_custom_post_pass"))
    with torch.no_grad(), quiet, _as_if_compiling(), inductor_config.patch(no_passes):
        module = make_fx(
            torch.func.functionalize(function, remove="mutations"),
            decomposition_table=select_decomp_table(),
            tracing_mode="fake" if sizes is None else "symbolic",
        )(*fakes)
        module.graph.eliminate_dead_code()
        joint_graph_passes(module)
    inputs = tuple(n for n in module.graph.nodes if n.op == "placeholder" and value(n) is not None)
    return Pattern(module, inputs, tuple(module.graph.output_node().args[0]))


def _renamed(node: Any) -> Node | None:
    """The value that a node only renames; None when it is no rename."""
    if is_call(node, *_RENAMES):
        return node.args[0]
    if is_call(node, aten.copy.default) and _alike(node, node.args[1]):
        return node.args[1]
    return None


def _chain(node: Node) -> list[Node]:
    """A node, what it renames, what that renames, ... down to what computes something."""
    chain = [node]
    while (source := _renamed(chain[-1])) is not None:
        chain.append(source)
    return chain


def _alike(a: Node, b: Node) -> bool:
    """Whether two nodes have values of one dtype, shape and device."""
    x, y = value(a), value(b)
    if x is None or y is None:
        return False
    return x.dtype is y.dtype and x.device == y.device and same_shape(x, y)


@dataclass
class Walk:
    """A pattern laid over a graph: `bound` says which node stands where, `nodes` are those it covers.

    Not `sizes`: shapes, devices, integers and constants are not compared.
    """

    sizes: bool = True
    bound: dict[Node, Node] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def up(self, here: Node, wanted: Node) -> bool:
        """Lay the part of the pattern above `wanted` over the part of the graph above `here`."""
        base = _chain(wanted)[-1]
        crossed = _chain(here)
        if base.op == "placeholder":
            at = next((i for i, n in enumerate(crossed) if self._fits(n, base)), None)
            if at is None or self.bound.setdefault(base, crossed[at]) is not crossed[at]:
                return False
            self.nodes += crossed[:at]
            return True
        below = crossed[-1]
        if not self._fits(here, wanted):
            return False
        if base in self.bound:
            return self.bound[base] is below
        self.bound[base] = below
        self.nodes += crossed
        if below.op != "call_function" or below.target is not base.target or not self._fits(below, base):
            return False
        return self._same(below.args, base.args) and self._same(below.kwargs, base.kwargs)

    def down(self, wanted: Node) -> Node | None:
        """The node below those already bound that stands where `wanted` does; None when there is none."""
        base = _chain(wanted)[-1]
        if base not in self.bound and not self._descend(base):
            return None
        found = [self.bound[base]]
        for node in found:
            if self._fits(node, wanted):
                self.nodes += _chain(node)
                return node
            found += [user for user in node.users if _renamed(user) is node]
        return None

    def _descend(self, base: Node) -> bool:
        above = next((node for source in base.all_input_nodes if (node := self.down(source)) is not None), None)
        if above is None:
            return False
        readers = [above]
        for node in readers:
            before = dict(self.bound), list(self.nodes)
            if node is not above and _renamed(node) is None and self.up(node, base):
                return True
            self.bound, self.nodes = before
            readers += [u for u in node.users if u not in readers] if node is above or _renamed(node) else []
        return False

    def _fits(self, here: Node, wanted: Node) -> bool:
        if self.sizes:
            return _alike(here, wanted)
        x, y = value(here), value(wanted)
        return x is not None and y is not None and x.dtype is y.dtype

    def _same(self, here: Any, wanted: Any) -> bool:
        """Whether two arguments are the same: a tensor by what computes it, a size by its number."""
        if isinstance(wanted, Node) and value(wanted) is not None:
            return isinstance(here, Node) and self.up(here, wanted)
        if isinstance(wanted, (list, tuple)):
            if not self.sizes and not any(isinstance(b, Node) and value(b) is not None for b in wanted):
                return True
            alike = isinstance(here, (list, tuple)) and len(here) == len(wanted)
            return alike and all(self._same(a, b) for a, b in zip(here, wanted, strict=True))
        if isinstance(wanted, dict):
            return here.keys() == wanted.keys() and all(self._same(here[k], wanted[k]) for k in wanted)
        a, b = (x.meta.get("val") if isinstance(x, Node) else x for x in (here, wanted))
        if isinstance(a, (int, torch.SymInt)) and isinstance(b, (int, torch.SymInt)):
            return not self.sizes or statically_known_true(a == b)
        return (not self.sizes and isinstance(b, torch.device)) or (type(a) is type(b) and a == b)
