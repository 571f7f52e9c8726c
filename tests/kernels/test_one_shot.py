"""The one-shot kernel between 2, 3 and 4 real processes over shared memory, in Triton's interpreter.

Also run by test_kernel_interpreted.py, in a process that has the interpreter switched on.
"""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton")

import collective_cases
import kernel_cases
import torch
from shared_ranks import NO_COMPUTED_BOUNDS, RankFailed, make_channels, run_ranks

from torchseam.kernels import one_shot, rows
from torchseam.kernels.launch import OneShot
from torchseam.seam import Norm, Seam

pytestmark = pytest.mark.skipif(NO_COMPUTED_BOUNDS is not None, reason=NO_COMPUTED_BOUNDS or "")

#: Every program pushes and reduces; two push, two ahead, and the others reduce. The interpreter runs programs one
#: after another, so parts of a row, which wait for each other, are for real GPUs.
LAUNCHES = (OneShot(1), OneShot(1, pushers=2, ahead=2))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_scheme_gives_the_bits_of_the_sum_in_rank_order(world_size):
    calls = collective_cases.table(one_shot.run, world_size, LAUNCHES)[world_size - 2 :: 3]
    assert collective_cases.check(calls, multiprocessors=4) == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_payloads_that_look_like_nothing_arrive(world_size):
    calls = collective_cases.payloads(one_shot.run, world_size)
    assert collective_cases.check(calls, alike=collective_cases.same_storage) == []


def test_ranks_that_come_late_change_nothing():
    calls = collective_cases.shuffled(collective_cases.table(one_shot.run, 3, LAUNCHES)[::4], seed=1)
    assert collective_cases.check(calls, multiprocessors=3, longest_sleep=0.5) == []


def test_a_rank_that_fails_ends_the_others():
    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("on purpose")
        while True:
            pass

    with pytest.raises(RankFailed, match=r"rank 1 of 2 raised(.|\n)*on purpose"):
        run_ranks(2, fail)
    with pytest.raises(RankFailed, match=r"ranks \[0\] of 2 did not end"):
        run_ranks(2, lambda rank: fail(0) if rank == 0 else None, timeout=0.5)


def test_more_threads_than_packets_are_refused_before_anything_is_sent():
    case = kernel_cases.Case(Seam(Norm(1e-6), outputs=("norm",)), None, 464, torch.bfloat16)
    channels, buffers = make_channels(2, multiprocessors=6)
    call = collective_cases.call_of(one_shot.run, case, 2, 3, launch=OneShot(4))
    with pytest.raises(
        ValueError, match=r"4 warps have 128 threads; 464 elements .* 64 packets .* num_warps .* at most 2"
    ):
        call.on(channels[0])
    # Each of two parts has half of the packets.
    halves = dataclasses.replace(call, launch=OneShot(2, parts=2))
    with pytest.raises(
        ValueError, match=r"2 warps have 64 threads; 232 elements .* 32 packets .* num_warps .* at most 1"
    ):
        halves.on(channels[0])
    assert int(channels[0].counter) == 0 and all(bool((b == 0xFF).all()) for b in buffers)


def test_rows_that_are_no_whole_packets_are_refused():
    assert rows.unsupported(torch.empty(1, 252, dtype=torch.bfloat16)) is not None
    assert rows.unsupported(torch.empty(1, 252)) is None
