"""The calls of `one_gpu_check.py`: what they cover, and that all ranks' programs fit on one GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import one_gpu_cases
from collective_builds import MULTIPROCESSORS

from torchseam.kernels import one_shot, two_shot
from torchseam.kernels.launch import check_threads
from torchseam.kernels.owners import owned_rows
from torchseam.kernels.rows import unsupported
from torchseam.seam import SCHEMES


@pytest.fixture(scope="module", params=one_gpu_cases.WORLD_SIZES)
def calls(request):
    return one_gpu_cases.calls(request.param, MULTIPROCESSORS)


def test_programs_of_all_ranks_fit_at_once_and_push_each_packet_once(calls):
    for call in calls:
        world_size, x = len(call.terms), call.terms[0]
        budget = one_gpu_cases.programs_of_rank(world_size, MULTIPROCESSORS)
        if call.run is one_shot.run:
            programs, parts = call.launch.grid(x.shape[0], budget)[0], call.launch.parts
        else:
            rows = len(owned_rows(x.shape[0], 0, world_size))
            programs, parts = call.launch.roles(rows, budget).programs, 1
        assert programs * world_size <= MULTIPROCESSORS, call
        assert not call.launch.launch_pdl, call
        assert unsupported(x) is None
        check_threads(call.launch.num_warps, x.shape[1] // parts, x.itemsize)


def test_calls_fit_in_the_slots(calls):
    for call in calls:
        needed = two_shot.two_shot_bytes(call.seam, call.operands_of(call.terms[0]), len(call.terms))
        assert max(needed, call.terms[0].nbytes) <= one_gpu_cases.SLOT_BYTES


def test_every_scheme_runs_in_both_kernels_and_in_chains_with_a_sharded_residual(calls):
    def schemes(run, *placements):
        adding = [call for call in calls if call.run is run and call.seam.residual]
        chosen = [c for c in adding if (c.seam.reduce.residual_in, c.seam.reduce.residual_out) in placements]
        return {quant.scheme for call in chosen for quant in call.seam.quants}

    assert schemes(one_shot.run, ("full", "full")) == schemes(two_shot.run, ("full", "full")) == set(SCHEMES)
    assert schemes(two_shot.run, *one_gpu_cases.SHARDED) == set(SCHEMES)
    assert all(schemes(two_shot.run, placement) for placement in one_gpu_cases.SHARDED)
    assert not schemes(one_shot.run, *one_gpu_cases.SHARDED)


def test_parts_have_every_call_once_and_share_no_kernel(calls):
    parts = [one_gpu_cases.part(calls, index, 5) for index in range(5)]
    assert sorted(id(call) for part in parts for call in part) == sorted(map(id, calls))
    kernels = [{one_gpu_cases.kernel_of(call) for call in part} for part in parts]
    assert sum(map(len, kernels)) == len(set.union(*kernels))


def test_what_is_mixed_is_in_the_table_too(calls):
    mixed = one_gpu_cases.mixed(len(calls[0].terms), MULTIPROCESSORS)
    assert {call.run for call in mixed} == {one_shot.run, two_shot.run}
    assert set(map(one_gpu_cases.kernel_of, mixed)) <= set(map(one_gpu_cases.kernel_of, calls))
