"""Which kernel the `symmetric` backend runs a call with: one-shot or two-shot.

By a model of their times. Pure: what goes in is the same on all ranks of a group, so what comes out is too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from torchseam.backends import link_model
from torchseam.kernels.launch import PACKET
from torchseam.seam import Seam

Algorithm = Literal["one_shot", "two_shot"]
Source = Literal["measured", "modelled"]


@dataclass(frozen=True)
class Shape:
    """What of a call its time depends on: T rows of `row_bytes` (H * itemsize) on each of W ranks.

    result_bytes: what the owner of a row sends to each other rank in two-shot (kernels/sections.py).
    """

    world_size: int
    tokens: int
    row_bytes: int
    result_bytes: int

    def slot_bytes(self, algorithm: Algorithm) -> int:
        """What a call needs of a slot: the most that a rank pushes to another one."""
        if algorithm == "one_shot":
            return self.tokens * self.row_bytes
        owned = -(-self.tokens // self.world_size)  # ceil, as `owners.owned_rows` deals
        return owned * (self.row_bytes + self.result_bytes)

    def link_bytes(self, algorithm: Algorithm) -> int:
        """The most that a rank pushes to all others."""
        return (self.world_size - 1) * self.slot_bytes(algorithm)


@dataclass(frozen=True)
class Model:
    """Times in us: one-shot alpha + bytes / beta; two-shot one hop more, for the results wait for the partials.

    Fitted for two ranks (`link_model`). A rank of more pushes through the same link, so beta is taken to be the same.

    least_gain: how many times as fast as one-shot two-shot must be, to be chosen: it was not measured, one-shot was.
    least_ranks: two ranks push fewer bytes in two-shot only where nobody reads the residual: not worth the hop.
    """

    alpha: float = link_model.ALPHA
    beta: float = link_model.BETA
    hop: float = link_model.HOP
    least_gain: float = 1.2
    least_ranks: int = 3

    def time(self, algorithm: Algorithm, shape: Shape) -> float:
        """us."""
        hops = self.hop if algorithm == "two_shot" else 0.0
        return self.alpha + hops + shape.link_bytes(algorithm) / self.beta

    def prefers_two_shot(self, shape: Shape) -> bool:
        """Whether it is worth it, where both have room."""
        if shape.world_size < self.least_ranks:
            return False
        return self.time("one_shot", shape) >= self.least_gain * self.time("two_shot", shape)


MODEL = Model()


@dataclass(frozen=True)
class Choice:
    """How a call runs, and what is known of its time; it fits a workspace whose slots have `slot_bytes`."""

    algorithm: Algorithm
    slot_bytes: int
    microseconds: float
    source: Source


def choose(
    capability: tuple[int, int],
    shape: Shape,
    slot_bytes: int,
    *,
    sharded: bool = False,
    two_shot: bool = True,
    like_rows: bool = True,
    model: Model = MODEL,
) -> Choice:
    """The algorithm of a call between GPUs of a compute capability, the lowest of the group.

    slot_bytes: of a slot of the workspace. Two-shot is taken only where it fits; that one-shot fits is for the caller
    to see (`Choice.slot_bytes`).
    sharded: the residual is with the owners of its rows, which is two-shot's alone.
    two_shot: whether it may be taken at all.
    like_rows: whether the call is of the kind that was measured (`is_like_rows`).
    """
    wins = two_shot and model.prefers_two_shot(shape) and shape.slot_bytes("two_shot") <= slot_bytes
    algorithm: Algorithm = "two_shot" if sharded or wins else "one_shot"
    measured = None
    there = (capability, shape.world_size) == (link_model.CAPABILITY, link_model.WORLD_SIZE)
    if there and like_rows and algorithm == "one_shot":
        measured = link_model.MEASURED.get((shape.row_bytes, shape.tokens))
    time = model.time(algorithm, shape) if measured is None else measured
    return Choice(algorithm, shape.slot_bytes(algorithm), time, "modelled" if measured is None else "measured")


def is_like_rows(seam: Seam, dtype: torch.dtype) -> bool:
    """Whether the measured rows are of such seams: bf16, a residual, static FP8."""
    return dtype == torch.bfloat16 and seam.residual and [q.scheme for q in seam.quants] == ["fp8_static"]


def result_bytes(seam: Seam, hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> int:
    """`Shape.result_bytes` of a seam over rows of H elements. ImportError without Triton."""
    from torchseam.kernels.sections import sections

    return PACKET * sections(seam, hidden, dtype, weight_dtype).packets


#: (seam as JSON, T, H, dtype, dtype of the norm's weight) -> the choice.
Chooser = Callable[[str, int, int, torch.dtype, "torch.dtype | None"], Choice]


def chooser(
    capability: tuple[int, int], world_size: int, slot_bytes: int, *, two_shot: bool = True, model: Model = MODEL
) -> Chooser:
    """`choose` for the calls of one group, remembering its answers."""

    @functools.lru_cache(maxsize=4096)
    def remembered(
        seam_json: str, tokens: int, hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype | None
    ) -> Choice:
        seam = Seam.from_json(seam_json)
        sharded = seam.reduce is not None and seam.reduce.sharded
        sent = result_bytes(seam, hidden, dtype, weight_dtype)
        shape = Shape(world_size, tokens, hidden * dtype.itemsize, sent)
        like = is_like_rows(seam, dtype)
        return choose(capability, shape, slot_bytes, sharded=sharded, two_shot=two_shot, like_rows=like, model=model)

    return remembered
