"""The two-shot kernel between 2, 3 and 4 real processes over shared memory, in Triton's interpreter.

Also run by test_kernel_interpreted.py, in a process that has the interpreter switched on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest

pytest.importorskip("triton")

import torch
from collective_cases import Call, call_of, check, payloads, same_storage, shuffled, table
from kernel_cases import Case, poisoned_outputs, storage
from shared_ranks import NO_COMPUTED_BOUNDS, make_channels, run_ranks

from torchseam.kernels import one_shot, owners, two_shot
from torchseam.kernels.launch import OneShot, TwoShot
from torchseam.operands import Operands
from torchseam.seam import OUTPUTS, Norm, Quant, Reduce, Seam

pytestmark = pytest.mark.skipif(NO_COMPUTED_BOUNDS is not None, reason=NO_COMPUTED_BOUNDS or "")

#: Every program does all; pushers, reducers and gatherers, three programs for two of each role's rows.
LAUNCHES = (TwoShot(1), TwoShot(1, pushers=1, reducers=2, ahead=2))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_scheme_gives_the_bits_of_the_sum_in_rank_order(world_size):
    calls = table(two_shot.run, world_size, LAUNCHES)[world_size - 2 :: 3]
    assert check(calls, multiprocessors=4) == []


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_rows_is_dealt(world_size):
    seam = Seam(Norm(1e-6), residual=True, quants=(Quant("nvfp4"),), outputs=("residual",))
    case = Case(seam, None, 464, torch.bfloat16)
    dealt = zip((1, 2, 3, 4, 5, 9, 17, 130 if world_size == 2 else 8), itertools.cycle(LAUNCHES), strict=False)
    calls = [call_of(two_shot.run, case, world_size, t, seed=t, launch=launch) for t, launch in dealt]
    assert check(calls, multiprocessors=4, slot_bytes=1 << 18) == []


def test_more_ranks_than_are_read_at_once():
    seam = Seam(Norm(1e-6, "none"), residual=True, quants=(Quant("fp8_token"),), outputs=("residual",))
    case = Case(seam, None, 256, torch.bfloat16)
    calls = [call_of(run, case, 7, t, seed=t) for run, t in ((two_shot.run, 9), (one_shot.run, 2), (two_shot.run, 3))]
    assert check(calls) == []


def test_every_set_of_outputs_is_gathered():
    emitted = [o for n in range(4) for o in itertools.combinations(OUTPUTS, n)]
    calls = []
    for index, outputs in enumerate(emitted):
        for quants in ((), (Quant("fp8_token"),), (Quant("nvfp4"), Quant("fp8_static"))):
            if quants or "norm" in outputs:
                own = tuple(o for o in outputs if o != "reduced")
                seam = Seam(Norm(1e-6, "after_cast"), None, None, True, quants, own)
                case = Case(seam, None, 256, torch.bfloat16, torch.float32)
                calls.append(call_of(two_shot.run, case, 2, 3, reduced="reduced" in outputs, seed=index))
    assert check(calls) == []


def test_both_algorithms_share_one_channel_and_ranks_may_come_late():
    calls = table(two_shot.run, 3, LAUNCHES)[::4] + table(one_shot.run, 3, (OneShot(1),))[1::4]
    assert check(shuffled(calls, seed=2), multiprocessors=4, longest_sleep=0.5) == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_payloads_that_look_like_nothing_arrive_with_the_same_bytes_on_all_ranks(world_size):
    assert check(payloads(two_shot.run, world_size)) == []


def test_codes_that_look_like_nothing_arrive():
    """Eight times -6 and its neighbours, and per-group scales that are NaN, in every place of a packet."""
    minus_six = -torch.ones(9, 256)
    for row in range(1, 8):
        minus_six[row, 4 * row :: 8 + row] = 0.5
    minus_six[8, 8:] = 1.0
    spoilt = torch.linspace(-3, 3, 256).repeat(9, 1)
    spoilt[::2, :64] = float("nan")
    spoilt[3] = float("nan")
    calls = []
    for rows, quant in ((minus_six, Quant("nvfp4")), (spoilt, Quant("fp8_group", 64, "ue8m0"))):
        x = rows.bfloat16()
        scales = (torch.tensor([448.0]),) if quant.takes_scale else ()
        seam = Seam(Norm(0.0, "none"), Reduce("group"), None, False, (quant,), ())
        calls.append(Call(two_shot.run, seam, (x, torch.zeros_like(x)), Operands(x, scales=scales)))
    # The codes do have that word.
    codes = calls[0].expected()[0][1][0]
    assert int((codes.view(torch.int32) == -1).sum()) > 100
    assert check(calls, alike=same_storage) == []


@pytest.mark.parametrize(("world_size", "tokens"), [(2, 1), (3, 2), (3, 8), (4, 4)])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_sharded_residual_stays_with_its_owners(world_size, tokens, in_place):
    """A chain of four seams gives what it gives with all rows; others' rows are neither read nor written in between."""
    full = Seam(Norm(1e-6, "none"), Reduce("group"), None, True, (Quant("fp8_static"),), ("residual",))
    case = Case(dataclasses.replace(full, reduce=None), None, 256, torch.bfloat16)
    call = call_of(two_shot.run, case, world_size, tokens)
    placements = list(itertools.pairwise(("full", "sharded", "sharded", "sharded", "full")))
    chain = [dataclasses.replace(full, reduce=Reduce("group", "auto", into, out)) for into, out in placements]
    channels, buffers = make_channels(world_size)

    def run_chain(rank: int) -> list[list[torch.Tensor]]:
        residual = call.operands.residual.clone()
        outputs = []
        for seam in chain:
            if seam.reduce.residual_in == "sharded":
                residual[others(tokens, rank, world_size)] = float("nan")
            memory = residual if in_place else None
            operands = dataclasses.replace(call.operands, x=call.terms[rank], residual=residual, residual_out=memory)
            residual, codes = two_shot.run(seam, operands, channels[rank])
            outputs.append([residual.clone(), codes])
        return outputs

    # Poison would be put into memory that is given, too.
    with contextlib.nullcontext() if in_place else poisoned_outputs():
        got = run_ranks(world_size, run_chain)
    step = call
    for index, seam in enumerate(chain):
        expected_residual, expected_codes = step.expected()[0][1]
        for rank, (residual, codes) in enumerate(outputs[index] for outputs in got):
            assert same_storage(codes, expected_codes)
            if seam.reduce.residual_out == "full":
                assert same_storage(residual, expected_residual)
                continue
            owned = owners.owned_rows(tokens, rank, world_size)
            assert same_storage(residual[owned].clone(), expected_residual[owned].clone())
            untouched = residual[others(tokens, rank, world_size)]
            if not in_place:
                assert bool((storage(untouched.clone()) == 0x7F).all())
            elif index == 0:
                assert same_storage(untouched, call.operands.residual[others(tokens, rank, world_size)])
            else:
                assert bool(untouched.isnan().all())
        step = dataclasses.replace(step, operands=dataclasses.replace(step.operands, residual=expected_residual))
    assert all(bool((b == 0xFF).all()) for b in buffers)


def others(tokens: int, rank: int, world_size: int) -> torch.Tensor:
    """[T] bool: the rows that the rank does not own."""
    rows = torch.ones(tokens, dtype=torch.bool)
    rows[owners.owned_rows(tokens, rank, world_size)] = False
    return rows


def test_one_shot_may_begin_a_chain_but_reads_no_sharded_residual():
    first, second = (Reduce("group", residual_out="sharded"), Reduce("group", residual_in="sharded"))
    seam = Seam(Norm(1e-6, "none"), None, None, True, (Quant("fp8_static"),), ("residual",))
    call = call_of(one_shot.run, Case(seam, None, 256, torch.bfloat16), 2, 3)
    begun = dataclasses.replace(call, seam=dataclasses.replace(call.seam, reduce=first))
    assert check([begun]) == []
    channels, _ = make_channels(2)
    with pytest.raises(ValueError, match="the residual is sharded; one-shot needs all of its rows"):
        one_shot.run(dataclasses.replace(call.seam, reduce=second), call.operands, channels[0])


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    seam = Seam(Norm(1e-6, "none"), Reduce("group"), None, True, (Quant("fp8_static"),), ("residual",))
    x = torch.zeros(9, 256, dtype=torch.bfloat16)
    operands = Operands(x, x, scales=(torch.ones(1),))
    # Five rows: 512 bytes of partials, 512 of residual, 256 of codes.
    assert two_shot.two_shot_bytes(seam, operands, 2) == 5 * (512 + 512 + 256)
    assert two_shot.two_shot_bytes(seam, operands, 4) == 3 * (512 + 512 + 256)
    channels, buffers = make_channels(2, slot_bytes=5 * 1280 - 16)
    with pytest.raises(ValueError, match="6400 bytes of each slot; the workspace's have 6384"):
        two_shot.run(seam, operands, channels[0])
    assert int(channels[0].counter) == 0 and all(bool((b == 0xFF).all()) for b in buffers)


def test_more_threads_than_packets_are_refused_before_anything_is_sent():
    case = Case(Seam(Norm(1e-6), outputs=("norm",)), None, 464, torch.float32)
    channels, buffers = make_channels(2)
    call = call_of(two_shot.run, case, 2, 3, launch=TwoShot(8, pushers=1, reducers=1))
    with pytest.raises(
        ValueError, match=r"8 warps have 256 threads; 464 elements .* 128 packets .* num_warps .* at most 4"
    ):
        call.on(dataclasses.replace(channels[0], multiprocessors=4))
    assert int(channels[0].counter) == 0 and all(bool((b == 0xFF).all()) for b in buffers)


@pytest.mark.parametrize(
    ("quant", "more"),
    [(Quant("fp8_token"), 256 + 16), (Quant("fp8_group", 64), 256 + 16), (Quant("nvfp4"), 128 + 32), (None, 512)],
)
def test_bytes_of_a_call(quant, more):
    seam = Seam(
        Norm(1e-6, "none"), Reduce("group"), quants=(quant,) if quant else (), outputs=() if quant else ("norm",)
    )
    operands = Operands(torch.zeros(2, 256, dtype=torch.bfloat16))
    assert two_shot.two_shot_bytes(seam, operands, 2) == 512 + more
