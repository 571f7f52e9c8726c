"""What a norm dialect hands back: the RMSNorm that it names, or why it cannot."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from torchseam.seam import Norm


@dataclass(frozen=True)
class NormMatch:
    """An RMSNorm: `output = norm(input, weight)`; `nodes` are all of its nodes, `output` the last.

    An operator that adds a residual itself reads `input + residual`; `total` holds that sum, None where nobody
    reads it.
    """

    norm: Norm
    input: Node
    weight: Node | None
    output: Node
    nodes: tuple[Node, ...]
    residual: Node | None = None
    total: Node | None = None


@dataclass(frozen=True)
class NormMiss:
    """A norm that is no RMSNorm we can read; `why` says so.

    `partial_row`: the mean is over something else than the last dimension alone.
    """

    node: Node
    why: str
    partial_row: bool = False
