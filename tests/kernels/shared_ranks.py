"""Ranks as processes that share memory: collective kernels in Triton's interpreter, with no GPU.

    channels = make_channels(3)
    results = run_ranks(3, function, channels)        # [function(rank, channels) of rank 0, 1, 2]

Processes are forked: `function` may be a closure, and what was imported is there. Not for CUDA.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing
import random
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.errors import InterpreterError

from torchseam.kernels import channel as channels_module
from torchseam.kernels.channel import Channel
from torchseam.kernels.packets import ABSENT_WORD


@triton.jit
def _count_kernel(out_ptr, count):
    for _ in tl.range(0, count * 2):
        tl.store(out_ptr, tl.load(out_ptr) + 1)


def _no_computed_bounds() -> str | None:
    """Why this interpreter cannot run the collective kernels, or None."""
    counted = torch.zeros(1, dtype=torch.int64)
    try:
        _count_kernel[(1,)](counted, 2)
    except InterpreterError as error:
        versions = f"Triton {triton.__version__} and NumPy {version('numpy')}"
        return f"the interpreter of {versions} has no loops to a computed bound ({error})"
    return None


#: NumPy 2.4 makes no Python number of an array of one number; Triton 3.6 asks it to (triton-lang/triton#9171).
NO_COMPUTED_BOUNDS = _no_computed_bounds() if knobs.runtime.interpret else None
#: Seconds: many times what the longest list of calls takes on a machine that others use too.
TIMEOUT = 240.0


class RankFailed(AssertionError):
    """A rank raised, died or did not end; says which and why."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """function(rank, *args) of each rank, all at once in processes of their own, in rank order.

    Raises `RankFailed` when a rank raises or does not end within `timeout` seconds. All have ended by then.
    """
    context = multiprocessing.get_context("fork")
    processes, pipes = [], {}
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, function, rank, args), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes[mine] = rank
    try:
        return _results(pipes, world_size, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(pipe: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answer = (True, function(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Not `send`, which would put tensors into shared memory of a process that is about to end.
    answer_bytes = io.BytesIO()
    torch.save(answer, answer_bytes)
    pipe.send_bytes(answer_bytes.getbuffer())


def _results(pipes: dict[Connection, int], world_size: int, deadline: float) -> list[Any]:
    results: list[Any] = [None] * world_size
    waiting = dict(pipes)
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} of {world_size} did not end: a deadlock?")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, results[rank] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                raise RankFailed(f"rank {rank} of {world_size} died") from None
            if not succeeded:
                raise RankFailed(f"rank {rank} of {world_size} raised\n{results[rank]}")
    return results


def shared_bytes(size: int) -> Tensor:
    """[size] uint8 that processes forked from now on share."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def make_channels(
    world_size: int, *, slot_bytes: int = 1 << 16, multiprocessors: int = 1
) -> tuple[list[Channel], list[Tensor]]:
    """Each rank's channel, and the ranks' buffers; to be made before the ranks.

    `multiprocessors` is how many programs the launches choose for. The interpreter runs those of a launch one after
    another, so a program may wait for programs of lower or equal numbers only.
    """
    size = channels_module.buffer_bytes(world_size, slot_bytes)
    buffers = [shared_bytes(size).fill_(0xFF) for _ in range(world_size)]
    addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64)
    slots = channels_module.slots_words(multiprocessors)
    made = [
        Channel(
            rank=rank,
            world_size=world_size,
            addresses=addresses,
            counter=torch.zeros(1, dtype=torch.int64),
            slots=torch.full((slots,), ABSENT_WORD, dtype=torch.int32),
            slot_bytes=slot_bytes,
            multiprocessors=multiprocessors,
        )
        for rank in range(world_size)
    ]
    return made, buffers


def run_in_turn(
    rank: int, calls: Sequence[Callable[[int], Any]], longest_sleep: float = 0.0, seed: int = 0
) -> list[Any]:
    """call(rank) of each call; before each, the rank sleeps for up to `longest_sleep` seconds, each its own time.

    A function for `run_ranks`.
    """
    random_sleep = random.Random(f"{seed} {rank}")
    results = []
    for call in calls:
        if longest_sleep:
            time.sleep(random_sleep.random() ** 4 * longest_sleep)
        results.append(call(rank))
    return results
