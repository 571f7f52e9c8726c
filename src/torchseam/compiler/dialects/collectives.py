"""all_reduce, as functional collectives, in-place `dist.all_reduce` and DTensor all spell it once
Inductor has functionalised the graph: `_c10d_functional.all_reduce` and its `wait_tensor`; and vLLM's operator,
which waits itself and knows its group by a name of vLLM's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class AllReduce:
    """One all_reduce: `start(input, op, group)`, whose result is `node`, the wait (one node in vLLM).

    `group` is torch.distributed's name.
    """

    node: Node
    start: Node
    input: Node
    op: str
    group: str

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.start, self.node)

    @property
    def read_early(self) -> bool:
        """Whether something reads the result of the start, before the wait."""
        return self.start is not self.node and set(self.start.users) != {self.node}


def match_all_reduce(node: Node) -> AllReduce | None:
    """The all_reduce whose finished value is `node`."""
    if _operator(node) == "vllm::all_reduce":
        return _match_vllm(node)
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


def _operator(node: Node) -> str:
    """The qualified name of the operator that a node calls, '' when it calls none."""
    target = node.target
    return target.name() if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) else ""


def _match_vllm(node: Node) -> AllReduce | None:
    given: dict[str, Any] = {**dict(zip(("tensor", "group_name"), node.args, strict=False)), **node.kwargs}
    source, group = given["tensor"], given["group_name"]
    return AllReduce(node, node, source, "sum", vllm_groups().get(group, group))


def vllm_groups() -> dict[str, str]:
    """vLLM's names of the groups of this process ("tp:0") -> torch.distributed's. Imports nothing."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    made = {name: reference() for name, reference in getattr(state, "_groups", {}).items()}
    return {name: group.device_group.group_name for name, group in made.items() if group is not None}


_VLLM_COLLECTIVES = ("vllm::all_reduce", "vllm::all_gather", "vllm::reduce_scatter")


def starts_collective(node: Node) -> bool:
    """Whether a node issues a collective: every rank must issue these in one order."""
    name = _operator(node)
    functional = name.split("::")[0] in ("_c10d_functional", "c10d", "c10d_functional") and "wait" not in name
    return functional or name in _VLLM_COLLECTIVES
