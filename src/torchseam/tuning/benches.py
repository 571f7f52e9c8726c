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
from torchseam.kernels.channel import UNWATCHED, Channel, Watch, explain
from torchseam.kernels.tuned import DTYPES, Choice, Shape
from torchseam.operands import Operands
from torchseam.seam import Seam
from torchseam.tuning import timing
from torchseam.tuning.candidates import candidates
from torchseam.tuning.search import CannotLaunch

#: As the benchmarks time them.
_LOCAL_CALLS, _LOCAL_REPLAYS = 20, 40
_ONE_SHOT_CALLS, _ONE_SHOT_REPLAYS = 30, 21

#: Seconds that a rank waits for another in the first call of a candidate. A push takes microseconds, but one rank may
#: have the kernel in Triton's cache while another compiles it, which can take a minute.
_PATIENCE = 120.0
#: Of RuntimeErrors that are of a kernel's compilation or size; all others are of the GPU, and may leave it unusable.
_TOO_MUCH = ("PassManager::run failed", "too many resources requested")

Run = Callable[[Operands, Choice], list[Tensor]]


def same_bits(run: Run, operands: Operands, a: Choice, b: Choice) -> bool:
    """Whether two launches of the same call give the same outputs, to the bit."""
    pairs = zip(run(operands, a), run(operands, b), strict=True)
    return all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def is_of_launch(error: Exception) -> bool:
    """Whether it says that a kernel cannot be compiled or launched so, before anything was launched."""
    from triton.errors import TritonError

    return isinstance(error, TritonError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _TOO_MUCH)
    )


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
        try:
            return local.run(self._seam, operands, launch=choice)
        except Exception as error:
            if is_of_launch(error):
                raise CannotLaunch(f"{type(error).__name__}: {error}") from error
            raise


class OneShotBench:
    """The one-shot kernel between the ranks of a channel, of which this is one.

    cpu_group: a gloo group of the same ranks, through which they agree on times.
    """

    def __init__(self, group: str, cpu_group: dist.ProcessGroup, channel: Channel, device: torch.device) -> None:
        self._group, self._cpu_group, self._channel, self._device = group, cpu_group, channel, device
        self._seam: Seam
        self._sets: list[Operands] = []
        #: The choices that were called for this shape, on all ranks.
        self._tried: set[Choice] = set()
        self._mailbox = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def takes(self, shape: Shape) -> bool:
        """Whether the group's workspace has room for the shape."""
        return shape.tokens * shape.hidden * shape.itemsize <= self._channel.slot_bytes

    def candidates(self, shape: Shape) -> list[Choice]:
        """`search.Bench.candidates`."""
        return candidates(shape, self._channel.multiprocessors)

    def prepare(self, shape: Shape) -> None:
        """`search.Bench.prepare`."""
        self._sets = []
        self._tried.clear()
        self._sets = timing.operand_sets(shape.quant, shape.hidden, shape.tokens, DTYPES[shape.dtype], self._device)
        self._seam = timing.seam_of(shape.quant, self._group)
        x = self._sets[0].x
        if why := local.unsupported(x) or rows.unsupported(x):
            raise ValueError(f"H={shape.hidden}, T={shape.tokens}: {why}")

    def same_bits(self, choice: Choice, shipped: Choice) -> bool:
        """`search.Bench.same_bits`: on all ranks."""
        for each in (shipped, choice):
            self._try(each)
        different = not same_bits(self._run, self._sets[0], choice, shipped)
        return self._most([float(different)]) == [0.0]

    def microseconds(self, choice: Choice) -> float:
        """`search.Bench.microseconds`: the median, over the replays, of the slowest rank's time."""
        self._try(choice)
        calls = [functools.partial(self._run, operands, choice) for operands in self._sets]
        return statistics.median(self._most(timing.replays(calls, _ONE_SHOT_CALLS, _ONE_SHOT_REPLAYS, self._together)))

    def _run(self, operands: Operands, choice: Any) -> list[Tensor]:
        return one_shot.run(self._seam, operands, self._channel, launch=choice)

    def _try(self, choice: Choice) -> None:
        """Call it for the first time: watched, so that a wait in vain ends with words, and as it is timed.

        Apart, because a watched kernel is other machine code. RuntimeError, on all ranks, after a wait in vain, and
        where some ranks alone cannot launch it: their workspace has then seen fewer calls than the others'.
        """
        if choice in self._tried:
            return
        if self._device.type == "cuda":
            # No trap: the kernels end, and the ranks can tell.
            self._launch_on_all(choice, Watch(_PATIENCE, self._mailbox.data_ptr(), trap=False))
            torch.cuda.synchronize(self._device)
            (record,) = self._most([float(self._mailbox)])
            if record:
                raise RuntimeError(
                    f"{explain(int(record))} ({_PATIENCE:.0f} s), launched as {choice}; please report it"
                )
        self._launch_on_all(choice)
        self._tried.add(choice)

    def _launch_on_all(self, choice: Any, watch: Watch = UNWATCHED) -> None:
        why = ""
        try:
            if watch == UNWATCHED:
                self._run(self._sets[0], choice)
            else:
                one_shot.run(self._seam, self._sets[0], self._channel, launch=choice, watch=watch)
        except Exception as error:
            if not is_of_launch(error):
                raise
            why = f"{type(error).__name__}: {error}"
        # A launch does not wait for its kernel, so a rank that waits for one that is not there still gets here.
        failed, launched = self._most([float(bool(why)), float(not why)])
        if failed and launched:
            raise RuntimeError(f"{choice} was launched on some ranks only: {why or 'on this one, not on all'}")
        if failed:
            raise CannotLaunch(why)

    def _most(self, values: Sequence[float]) -> list[float]:
        """The greatest over the ranks, one by one; the same on all of them."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._cpu_group)
        return tensor.tolist()

    def _together(self) -> None:
        dist.barrier(group=self._cpu_group)
