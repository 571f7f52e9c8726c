"""all_reduce, as functional collectives, in-place `dist.all_reduce` and DTensor all spell it once
Inductor has functionalised the graph: `_c10d_functional.all_reduce` and its `wait_tensor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node


@dataclass(frozen=True)
class AllReduce:
    """One all_reduce: `start(input, op, group)`, whose result is `node`, the wait."""

    node: Node
    start: Node
    input: Node
    op: str
    group: str

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.start, self.node)


def match_all_reduce(node: Node) -> AllReduce | None:
    """The all_reduce whose finished value is `node`."""
    functional = getattr(torch.ops, "_c10d_functional", None)
    if functional is None or node.op != "call_function" or node.target is not functional.wait_tensor.default:
        return None
    start = node.args[0]
    if not isinstance(start, Node) or start.op != "call_function":
        return None
    if start.target not in (functional.all_reduce.default, functional.all_reduce_.default):
        return None
    source, op, group = start.args[:3]
    if not isinstance(source, Node) or not isinstance(op, str) or not isinstance(group, str):
        return None
    return AllReduce(node, start, source, op.lower(), group)


def starts_collective(node: Node) -> bool:
    """Whether a node issues a collective: every rank must issue these in one order."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace in ("_c10d_functional", "c10d", "c10d_functional") and "wait" not in target.name()


def all_reduces(graph: Graph) -> list[AllReduce]:
    """Every all_reduce of a graph, in order."""
    found = (match_all_reduce(node) for node in graph.nodes)
    return [a for a in found if a is not None]
