"""The first call of a candidate between ranks: watched, and what fails on one rank is known on all of them."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchseam.kernels.launch import OneShot
from torchseam.kernels.tuned import ONE_SHOT, Shape
from torchseam.tuning.search import CannotLaunch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from torchseam.kernels.channel import UNWATCHED, Watch
from torchseam.tuning import benches, timing

SHAPE = Shape(ONE_SHOT, 2, "fp8_static", "bfloat16", 256, 3)
SHIPPED, OTHER = OneShot(1), OneShot(1, pushers=4, ahead=2)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """One rank on a GPU that is not there. calls: (launch, watch) of each; other: what the other rank says, in turn,
    alike where it is empty; fails: the launches that this rank refuses."""
    state = types.SimpleNamespace(calls=[], other=[], fails=(), record=0)
    zeros, sets = torch.zeros, timing.operand_sets
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(timing, "operand_sets", lambda quant, h, t, dtype, device: sets(quant, h, t, dtype, "cpu"))

    def replays(calls: list[Callable[[], object]], calls_per_graph: int, count: int, together: object) -> list[float]:
        calls[0]()
        return [5.0]

    monkeypatch.setattr(timing, "replays", replays)
    channel = types.SimpleNamespace(multiprocessors=132, slot_bytes=2**20)
    bench = benches.OneShotBench("g", None, channel, torch.device("cuda", 0))  # type: ignore[arg-type]

    def run(
        seam: object, operands: object, channel: object, *, launch: OneShot, watch: Watch = UNWATCHED
    ) -> list[Tensor]:
        state.calls.append((launch, watch))
        if launch in state.fails:
            raise OutOfResources(262160, 232448, "shared memory")
        bench._mailbox.fill_(state.record)
        return [torch.ones(3, 4)]

    def most(values: list[float]) -> list[float]:
        return [max(pair) for pair in zip(values, state.other.pop(0) if state.other else values, strict=True)]

    monkeypatch.setattr(benches.one_shot, "run", run)
    monkeypatch.setattr(bench, "_most", most)
    bench.prepare(SHAPE)
    state.bench = bench
    return state


def test_a_candidate_is_called_watched_first_and_timed_without(rank: types.SimpleNamespace) -> None:
    assert rank.bench.microseconds(SHIPPED) == 5.0
    (_, watch), *others = rank.calls
    assert watch.timeout == 120 and watch.mailbox == rank.bench._mailbox.data_ptr() and not watch.trap
    assert others and all(call == (SHIPPED, UNWATCHED) for call in others)
    rank.calls.clear()
    assert rank.bench.same_bits(OTHER, SHIPPED)
    assert rank.calls[0] == (OTHER, watch) and (SHIPPED, watch) not in rank.calls, "once for each shape"
    rank.calls.clear()
    rank.bench.prepare(SHAPE)
    rank.bench.microseconds(OTHER)
    assert rank.calls[0] == (OTHER, watch)


def test_what_no_rank_can_launch_is_left_out(rank: types.SimpleNamespace) -> None:
    rank.fails = (OTHER,)
    with pytest.raises(CannotLaunch, match="OutOfResources: out of resource: shared memory"):
        rank.bench.same_bits(OTHER, SHIPPED)
    assert rank.bench.microseconds(SHIPPED) == 5.0


@pytest.mark.parametrize("fails_here", [True, False])
def test_what_some_ranks_alone_can_launch_ends_the_search_on_all(rank: types.SimpleNamespace, fails_here: bool) -> None:
    rank.fails = (OTHER,) if fails_here else ()
    rank.other = [[0.0, 1.0] if fails_here else [1.0, 0.0]]
    with pytest.raises(RuntimeError, match="was launched on some ranks only"):
        rank.bench.microseconds(OTHER)


@pytest.mark.parametrize("waits_here", [True, False])
def test_a_wait_in_vain_ends_the_search_on_all_ranks_and_says_who_waited(
    rank: types.SimpleNamespace, waits_here: bool
) -> None:
    record = 7 << 8 | 1 << 4 | 0
    rank.record = record if waits_here else 0
    rank.other = [[0.0, 1.0], [0.0 if waits_here else float(record)]]
    with pytest.raises(RuntimeError, match=r"rank 1 waited in vain for what rank 0 pushes in call 7.*120 s"):
        rank.bench.microseconds(OTHER)
    assert len(rank.calls) == 1, "not also without a watch"


def test_an_error_of_the_gpu_is_not_taken_for_one_of_the_launch() -> None:
    assert not benches.is_of_launch(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert benches.is_of_launch(RuntimeError("Triton Error [CUDA]: too many resources requested for launch"))
