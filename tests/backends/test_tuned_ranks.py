"""Every rank of a group launches alike, whatever files of tuned launches its ranks find; and `symmetric` uses them."""

from __future__ import annotations

import json
import time
import types

import pytest
import torch
import torch.multiprocessing as mp
from tuned_ranks import MANY, SCENARIOS, WORLD_SIZE, row, worker

from torchseam.backends import algorithms, symmetric
from torchseam.kernels.launch import OneShot
from torchseam.kernels.tuned import ONE_SHOT, Table
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple[int, int], tuple[str, list[str]]]:
    """(scenario, rank) -> (launch, warnings)."""
    folder = tmp_path_factory.mktemp("tuned")
    ranks = mp.spawn(worker, args=(str(folder),), nprocs=WORLD_SIZE, join=False)
    try:
        limit = time.monotonic() + 120
        while not ranks.join(timeout=1):
            assert time.monotonic() < limit, "the ranks did not finish"
    finally:
        for process in ranks.processes:
            process.kill()
    found = {}
    for rank in range(WORLD_SIZE):
        for line in (folder / str(rank)).read_text().splitlines():
            index, launch, warnings = json.loads(line)
            found[index, rank] = (launch, warnings)
    return found


@pytest.mark.parametrize("index", range(len(SCENARIOS)), ids=[scenario.what for scenario in SCENARIOS])
def test_all_ranks_have_the_same_launch_and_rank_0_says_why_it_is_shipped(outcomes, index):
    scenario = SCENARIOS[index]
    launches = [outcomes[index, rank][0] for rank in range(WORLD_SIZE)]
    assert launches == [repr(scenario.launch)] * WORLD_SIZE
    about = [[w for w in outcomes[index, rank][1] if "different tuned launches" in w] for rank in range(WORLD_SIZE)]
    assert [len(told) for told in about] == [scenario.warnings, 0, 0]
    if scenario.warnings:
        assert "all launch as shipped" in about[0][0] and "rank 2" in about[0][0]


def test_a_corrupt_file_is_told_by_the_rank_that_has_it(outcomes):
    index = [scenario.what for scenario in SCENARIOS].index("a corrupt file on rank 2")
    assert [sum("not JSON" in w for w in outcomes[index, rank][1]) for rank in range(WORLD_SIZE)] == [0, 0, 1]


@pytest.mark.parametrize("tuned", [True, False])
def test_symmetric_launches_what_was_agreed(tuned, monkeypatch):
    from torchseam.kernels import one_shot

    seen: list[object] = []
    monkeypatch.setattr(one_shot, "run", lambda seam, operands, channel, *, launch, watch: seen.append(launch) or [])
    table = Table((row(OneShot(8, 4)),)) if tuned else Table()
    backend = object.__new__(symmetric.Symmetric)  # without the memory that only a GPU has
    backend._tuned = table.chooser(ONE_SHOT, WORLD_SIZE, MANY)
    backend._choose = algorithms.chooser((9, 0), WORLD_SIZE, 2**24)
    backend._workspace = types.SimpleNamespace(channel=None)
    backend._watch = None
    monkeypatch.setattr(symmetric.Symmetric, "_follow_last_call", lambda self: None)
    static = (Quant("fp8_static"),)
    for quants, leading in ((static, (2, 8)), (static, (17,)), ((), (16,))):
        seam = Seam(Norm(1e-6), Reduce("g"), quants=quants, outputs=("norm",))
        backend.run(seam, Operands(torch.ones(*leading, 8192, dtype=torch.bfloat16)))
    assert seen == ([OneShot(8, 4), None, None] if tuned else [None, None, None])
