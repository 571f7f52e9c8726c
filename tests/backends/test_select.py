"""What `auto` may take, and what is said of backends that cannot run. (Ranks that choose: test_flashinfer_faults.)"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torchseam
from torchseam.backends import base, select
from torchseam.config import BACKENDS
from torchseam.operands import Operands
from torchseam.seam import Norm, Reduce, Seam


@pytest.fixture(autouse=True)
def nothing_chosen():
    select.reset()
    yield
    select.reset()


def test_every_row_of_the_order_names_a_backend_and_says_why():
    assert {row.backend for row in select.ORDER} <= set(BACKENDS)
    assert all(len(row.why) > 20 and row.since < row.before and row.world_sizes for row in select.ORDER)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("nodes", [1, 2])
def test_auto_takes_trtllm_only_where_it_was_measured(capability, world_size, nodes):
    taken = select.candidates(capability, world_size, nodes)
    assert ("trtllm" in taken) == ((capability, world_size, nodes) == ((9, 0), 2, 1))
    assert ("mnnvl" in taken) <= (capability[0] == 10 and world_size > 1)
    assert all(name in select.KINDS for name in taken)


def test_a_backend_that_is_not_there_yet_is_no_candidate():
    assert ("symmetric" in select.candidates((9, 0), 2, 1)) == ("symmetric" in select.KINDS)


def test_what_this_machine_lacks_is_said():
    assert select.missing("auto") is select.missing("collective") is None
    assert "allowed: auto" in select.missing("nccl")
    for name in ("mnnvl", "trtllm"):
        if not torch.cuda.is_available():
            assert select.missing(name) == "there is no CUDA GPU"
            with pytest.raises(ValueError, match=r"no CUDA GPU; what works: 'auto', 'collective'"):
                select.resolve(name)


def test_a_probe_that_raises_is_an_objection(monkeypatch):
    def broken() -> str | None:
        raise OSError("driver gone")

    monkeypatch.setitem(select.KINDS, "trtllm", base.Kind("it", lambda g: None, lambda g: None, broken))  # type: ignore[arg-type,return-value]
    assert select.missing("trtllm") == "its probe raised OSError: driver gone"


@pytest.mark.parametrize("backend", ["auto", "collective", "trtllm"])
def test_one_rank_has_nothing_to_choose(backend, one_rank, monkeypatch):
    monkeypatch.setattr(select, "missing", lambda name: None)
    group = dist.group.WORLD.group_name
    seam = Seam(Norm(1e-6), Reduce(group, backend), outputs=("norm",))
    assert select.chosen(group) is None
    select.run(seam, Operands(torch.ones(2, 64), weight=torch.ones(64)))
    assert select.chosen(group) == select.expected(seam.reduce, "cpu") == "collective"
    torchseam.reset()
    assert select.chosen(group) is None


def test_reports_know_what_is_expected():
    assert select.expected(Reduce("9"), "cpu") == "collective"
    assert select.expected(Reduce("9", "mnnvl"), "cpu") == "flashinfer-mnnvl"
    assert select.expected(Reduce("9", "collective"), "cpu") == "collective"


def test_objections_are_told_by_rank():
    assert base._told([None, None]) is None
    assert base._told(["x", "x"]) == "x"
    assert base._told([None, "x", "y", "x"]) == "ranks 1, 3: x; rank 2: y"
