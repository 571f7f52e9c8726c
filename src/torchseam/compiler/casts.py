"""Keep the roundings that Inductor before torch 2.13 removes.

A norm that is cast down to bf16 and up again by a quantiser, `(n * w).bfloat16().float()`, loses both casts
in Inductor's joint-graph patterns there: the quantiser then reads values that eager never had, and no norm
is left to be found. `KeepCasts` runs before those patterns and hides such a cast behind an operator of
torchseam; the fusion pass puts the cast back before it looks for seams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.torch_version import TorchVersion

from torchseam import ops  # noqa: F401  (registers torch.ops.torchseam)
from torchseam.compiler.dialects.views import value
from torchseam.compiler.user_passes import as_passes, identities

#: The first release whose pattern (`pointless_convert`) leaves a cast to a narrower dtype alone.
_FIRST_SAFE_TORCH = "2.13"
_convert = torch.ops.prims.convert_element_type.default
_NARROW = (torch.bfloat16, torch.float16)


def needed() -> bool:
    """Whether this torch removes casts that must stay."""
    return TorchVersion(torch.__version__) < TorchVersion(_FIRST_SAFE_TORCH)


def _rounds_between(node: Node) -> bool:
    """Whether a node is a cast down to bf16 or fp16 that is cast up again."""
    if node.op != "call_function" or node.target is not _convert or node.args[1] not in _NARROW:
        return False
    (above,) = node.all_input_nodes
    source = value(above)
    wide_readers = (u for u in node.users if u.op == "call_function" and u.target is _convert)
    return (
        source is not None and source.dtype is torch.float32 and any(u.args[1] is torch.float32 for u in wide_readers)
    )


def hide(graph: Graph) -> int:
    """Replace each cast that a later cast up would swallow; returns how many."""
    nodes = [node for node in graph.nodes if _rounds_between(node)]
    for node in nodes:
        node.target = torch.ops.torchseam.keep_cast.default
    return len(nodes)


def restore(graph: Graph) -> int:
    """Undo `hide`; returns how many casts were put back."""
    nodes = list(graph.find_nodes(op="call_function", target=torch.ops.torchseam.keep_cast.default))
    for node in nodes:
        node.target = _convert
    return len(nodes)


class KeepCasts(CustomGraphPass):
    """Inductor's `joint_custom_pre_pass` for torch releases that need it. `also` are the user's passes, run first."""

    def __init__(self, also: Any = None) -> None:
        self.also = as_passes(also)

    def __call__(self, graph: Graph) -> None:
        for other in self.also:
            other(graph)
        hide(graph)

    def uuid(self) -> Any | None:
        """None if a user's pass has none; the sources are part of the fusion pass's own identity."""
        others = identities(self.also)
        return None if others is None else ("torchseam.compiler.casts", *others)
