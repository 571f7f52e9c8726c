"""The two kernels on the GPUs at hand, as `search.Bench`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchseam.kernels import local, one_shot, rows
from torchseam.kernels.channel import Channel
from torchseam.kernels.tuned import DTYPES, Choice, Shape
from torchseam.operands import Operands
from torchseam.seam import Seam
from torchseam.tuning import timing
from torchseam.tuning.candidates import candidates

#: As the benchmarks time them.
_LOCAL_CALLS, _LOCAL_REPLAYS = 20, 40
_ONE_SHOT_CALLS, _ONE_SHOT_REPLAYS = 30, 21

Run = Callable[[Operands, Choice], list[Tensor]]


def same_bits(run: Run, operands: Operands, a: Choice, b: Choice) -> bool:
    """Whether two launches of the same call give the same outputs, to the bit."""
    pairs = zip(run(operands, a), run(operands, b), strict=True)
    return all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class LocalBench:
    """The local kernel on one device."""

    def __init__(self, device: torch.device, multiprocessors: int) -> None:
        self._device, self._multiprocessors = device, multiprocessors
        self._seam: Seam
        self._sets: list[Operands] = []

    def candidates(self, shape: Shape) -> list[Choice]:
        """`search.Bench.candidates`."""
        return candidates(shape, self._multiprocessors)

    def prepare(self, shape: Shape) -> None:
        """`search.Bench.prepare`."""
        self._sets = []
        self._sets = timing.operand_sets(shape.quant, shape.hidden, shape.tokens, DTYPES[shape.dtype], self._device)
        self._seam = timing.seam_of(shape.quant)
        if why := local.unsupported(self._sets[0].x):
            raise ValueError(f"H={shape.hidden}, T={shape.tokens}: {why}")

    def same_bits(self, choice: Choice, shipped: Choice) -> bool:
        """`search.Bench.same_bits`."""
        return same_bits(self._run, self._sets[0], choice, shipped)

    def microseconds(self, choice: Choice) -> float:
        """`search.Bench.microseconds`."""
        calls = [functools.partial(self._run, operands, choice) for operands in self._sets]
        return timing.microseconds(calls, _LOCAL_CALLS, _LOCAL_REPLAYS)

    def _run(self, operands: Operands, choice: Any) -> list[Tensor]:
        return local.run(self._seam, operands, launch=choice)


class OneShotBench:
    """The one-shot kernel between the ranks of a channel, of which this is one.

    cpu_group: a gloo group of the same ranks, through which they agree on times.
    """

    def __init__(self, group: str, cpu_group: dist.ProcessGroup, channel: Channel, device: torch.device) -> None:
        self._group, self._cpu_group, self._channel, self._device = group, cpu_group, channel, device
        self._seam: Seam
        self._sets: list[Operands] = []

    def takes(self, shape: Shape) -> bool:
        """Whether the group's workspace has room for the shape."""
        return shape.tokens * shape.hidden * shape.itemsize <= self._channel.slot_bytes

    def candidates(self, shape: Shape) -> list[Choice]:
        """`search.Bench.candidates`."""
        return candidates(shape, self._channel.multiprocessors)

    def prepare(self, shape: Shape) -> None:
        """`search.Bench.prepare`."""
        self._sets = []
        self._sets = timing.operand_sets(shape.quant, shape.hidden, shape.tokens, DTYPES[shape.dtype], self._device)
        self._seam = timing.seam_of(shape.quant, self._group)
        x = self._sets[0].x
        if why := local.unsupported(x) or rows.unsupported(x):
            raise ValueError(f"H={shape.hidden}, T={shape.tokens}: {why}")

    def same_bits(self, choice: Choice, shipped: Choice) -> bool:
        """`search.Bench.same_bits`: on all ranks."""
        different = not same_bits(self._run, self._sets[0], choice, shipped)
        return self._most([float(different)]) == [0.0]

    def microseconds(self, choice: Choice) -> float:
        """`search.Bench.microseconds`: the median, over the replays, of the slowest rank's time."""
        calls = [functools.partial(self._run, operands, choice) for operands in self._sets]
        return statistics.median(self._most(timing.replays(calls, _ONE_SHOT_CALLS, _ONE_SHOT_REPLAYS, self._together)))

    def _run(self, operands: Operands, choice: Any) -> list[Tensor]:
        return one_shot.run(self._seam, operands, self._channel, launch=choice)

    def _most(self, values: Sequence[float]) -> list[float]:
        """The greatest over the ranks, one by one; the same on all of them."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._cpu_group)
        return tensor.tolist()

    def _together(self) -> None:
        dist.barrier(group=self._cpu_group)
