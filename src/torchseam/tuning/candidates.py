"""The launch choices that are tried for a shape: every one that is legal, of a few values each."""

from __future__ import annotations

import itertools

from torchseam.kernels import launch
from torchseam.kernels.launch import CHOICES, WARP, Launch, OneShot, block_of
from torchseam.kernels.tuned import LOCAL, Choice, Shape, is_legal

#: Elements of a row in each thread, at most: a row is in several arrays at once, and a thread has 255 registers. More
#: compiles for minutes and spills.
_MOST_ELEMENTS = 64
_PARTS = (1, 2, 4, 8, 16)
_PUSHERS = (4, 8, 12, 16, 24)
_AHEAD = (2, 4, 8)


def shipped(shape: Shape, multiprocessors: int) -> Choice:
    """The choice of launch.py."""
    if shape.kernel == LOCAL:
        return launch.choose(shape.hidden)
    return launch.choose_one_shot(shape.tokens, shape.hidden, shape.itemsize, shape.quant, multiprocessors)


def candidates(shape: Shape, multiprocessors: int) -> list[Choice]:
    """What is tried, the shipped choice first."""
    first = shipped(shape, multiprocessors)
    others = _local(shape.hidden) if shape.kernel == LOCAL else _one_shot(shape, multiprocessors)
    return list(dict.fromkeys((first, *others)))


def _local(hidden: int) -> list[Launch]:
    return [choice for choice in CHOICES if block_of(hidden) <= choice.num_warps * WARP * _MOST_ELEMENTS]


def _one_shot(shape: Shape, multiprocessors: int) -> list[OneShot]:
    """Rows whole and in parts, and rows pushed by a few programs where there are more rows than programs.

    A part has as many warps as it has packets for, or half of them.
    """
    tried = [OneShot(warps, parts) for parts, warps in itertools.product(_PARTS, (32, 16, 8, 4, 2, 1))]
    if shape.tokens > multiprocessors:
        tried += [
            OneShot(warps, pushers=pushers, ahead=ahead)
            for warps, pushers, ahead in itertools.product((32, 16, 8, 4, 2, 1), _PUSHERS, _AHEAD)
        ]
    unit = shape.quant.multiple_of
    legal = [c for c in tried if is_legal(c, shape.tokens, shape.hidden, shape.itemsize, unit, multiprocessors)]
    most = {parts: max((c.num_warps for c in legal if c.parts == parts), default=0) for parts in _PARTS}
    return [c for c in legal if c.num_warps == most[c.parts] or (not c.pushers and 2 * c.num_warps == most[c.parts])]
