"""Scenarios for test_flashinfer_faults.py: four gloo ranks, each with a double of FlashInfer, and what goes wrong.

A scenario is run by the ranks it names; what it returns there must be what it says is expected.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from flashinfer_double import PACKED, Double, Faults, all_bytes, install

from torchseam.backends import base, collective, flashinfer, flashinfer_api, select
from torchseam.config import BACKEND_VARIABLE, VLLM_BACKEND_VARIABLE, SeamConfig
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs
from torchseam.seam import Norm, Quant, Reduce, Seam

WORLD_SIZE = 4
GROUPS = ((0, 1), (2, 3), (1, 3), (0, 1, 2), (0, 1, 2, 3))
#: Short, so that a stalled rank is found out while a test waits.
TALK, AGREE = datetime.timedelta(seconds=1), datetime.timedelta(seconds=2)
STALL = 5.0


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class World:
    """What a scenario sees on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.groups = {ranks: getattr(dist.new_group(list(ranks)), "group_name", "") for ranks in GROUPS}
        self.log = Log()
        logging.getLogger("torchseam").addHandler(self.log)
        self.double: Double

    def prepare(self, capability: tuple[int, int] = (9, 0), version: str = "0.7.4") -> None:
        """A new double on a machine as good as new."""
        select.reset()
        select._tell_once.cache_clear()
        self.double = install(version, capability)
        base.host = lambda: "here"  # type: ignore[assignment]
        self.log.records.clear()

    def fault(self, faults: Faults, on: int) -> None:
        if self.rank == on:
            self.double.faults = faults

    def run(
        self,
        ranks: tuple[int, ...],
        backend: str = "auto",
        quant: Quant | None = None,
        tokens: int = 8,
        hidden: int = 1024,
        offset: int = 0,
        norm_out: bool = False,
        weight_dtype: torch.dtype = torch.bfloat16,
    ) -> str:
        """Run one seam; the outcome as text. The values are checked against `collective`."""
        group = self.groups[ranks]
        seam = Seam(
            Norm(1e-6, offset=offset),  # type: ignore[arg-type]
            Reduce(group, backend),
            residual=True,
            quants=(quant,) if quant else (),
            outputs=("residual", "norm") if quant is None or norm_out else ("residual",),
        )
        generator = torch.Generator().manual_seed(7)
        # Multiples of 1/4, so every order of the sum gives the same bits.
        shared = torch.randint(-8, 8, (2, tokens, hidden), generator=generator).bfloat16() / 4
        x = shared[0] + dist.get_rank()
        weight = (torch.rand(hidden, generator=generator) + 0.5).to(weight_dtype)
        scales = (torch.tensor([0.25]),) if quant is not None and quant.takes_scale else ()
        operands = Operands(x, shared[1], weight=weight, scales=scales)
        try:
            outputs = select.run(seam, operands)
        except ValueError as error:
            return f"ValueError: {error}"
        expected = collective.run(seam, operands)
        for ours, theirs, shape in zip(outputs, expected, empty_outputs(seam, operands), strict=True):
            assert ours.shape == theirs.shape == shape.shape and ours.dtype == theirs.dtype
            assert torch.equal(all_bytes(ours), all_bytes(theirs)), "other bits than collective"
        return select.chosen(group) or "nothing chosen"

    def live(self) -> int:
        return self.double.seen.live()


@dataclass(frozen=True)
class Scenario:
    fault: str
    expected: str  # outcome, or the words that it must hold, with | between them
    run: Callable[[World], str]
    ranks: tuple[int, ...] = (0, 1)


def no_fault(world: World) -> str:
    world.prepare()
    outcome = world.run((0, 1), "trtllm")
    assert world.double.seen.patterns[-1] == "kARResidualRMSNorm"
    return outcome


def auto(capability: tuple[int, int], ranks: tuple[int, ...] = (0, 1)) -> Callable[[World], str]:
    def scenario(world: World) -> str:
        world.prepare(capability)
        return world.run(ranks)

    return scenario


def by_two_names(world: World) -> str:
    world.prepare()
    outcomes = {world.run((0, 1), backend) for backend in ("auto", "trtllm")}
    return f"{outcomes}, {world.live()} workspace"


def environment(variable: str) -> Callable[[World], str]:
    """A variable of the environment, and a quantised seam, where vLLM is imported (its variable counts there only)."""

    def scenario(world: World) -> str:
        world.prepare((10, 0))
        with mock.patch.dict(os.environ, {variable: "trtllm"}), mock.patch.dict(sys.modules, vllm=ModuleType("vllm")):
            outcome = world.run((0, 1), SeamConfig().backend, Quant("fp8_static", rule="reciprocal"))
        return f"{outcome}, {world.double.seen.patterns[-1]}"

    return scenario


def raises_on_one_rank(backend: str, when: str) -> Callable[[World], str]:
    def scenario(world: World) -> str:
        world.prepare()
        world.fault(Faults(raise_in_create=when), on=1)
        outcome = world.run((0, 1), backend)
        tries = world.double.seen.created
        assert world.run((0, 1), backend) == outcome and world.double.seen.created == tries, "tried again"
        assert world.live() == 0, "memory left behind"
        warnings = [r for r in world.log.records if r.levelno == logging.WARNING]
        assert len(warnings) == (backend == "auto"), [r.getMessage() for r in warnings]
        return outcome

    return scenario


def raises_twenty_times(world: World) -> str:
    world.prepare()
    world.double.faults = Faults(raise_in_create="late")
    for _ in range(20):
        select.reset()
        assert world.run((0, 1)) == "collective"
        assert world.live() == 0 and not world.double.references, "memory left behind"
    return f"collective, {world.live()} live allocations"


def stalls(backend: str) -> Callable[[World], str]:
    def scenario(world: World) -> str:
        world.prepare()
        world.fault(Faults(stall=STALL), on=1)
        outcome = world.run((0, 1), backend)
        assert world.live() == 0, "memory left behind"
        return outcome

    return scenario


def probe_raises(world: World) -> str:
    world.prepare((10, 0))
    if world.rank == 1:

        def broken(device: torch.device) -> bool:
            raise OSError("driver gone")

        flashinfer.has_multicast = broken  # type: ignore[assignment]
    return world.run((0, 1), "mnnvl")


def boasts(world: World) -> str:
    world.prepare()
    world.fault(Faults(boast=True), on=0)
    flashinfer.TRTLLM_MAX_BYTES[(9, 2)] = 1 << 20
    fits, over = (1 << 20) // 2048, (1 << 20) // 2048 + 1
    outcomes = [world.run((0, 1), "trtllm", tokens=tokens) for tokens in (fits - 1, fits, over)]
    flashinfer.TRTLLM_MAX_BYTES[(9, 2)] = 64 << 20
    on_flashinfer = world.double.seen.patterns.count("kARResidualRMSNorm") - 1  # the self-test
    remarks = select.remarks(world.groups[(0, 1)])
    assert len(remarks) == 1 and f"{over} rows" in remarks[0], remarks
    return f"{outcomes[0]}, {on_flashinfer} of 3 calls there"


def understates(world: World) -> str:
    """One rank has less room than asked for."""
    world.prepare()
    world.fault(Faults(capacity=100), on=1)
    return world.run((0, 1), "trtllm")


def less_for_another_size(world: World) -> str:
    """One rank's workspace holds fewer rows of one hidden size."""
    world.prepare()
    assert world.run((0, 1), "trtllm") == "flashinfer-trtllm"
    world.fault(Faults(capacity=5), on=1)
    for tokens in (5, 6):
        world.run((0, 1), "trtllm", tokens=tokens, hidden=2048)
    calls = [a["input"].shape for a in world.double.seen.arguments if a["input"].shape[1] == 2048]
    return f"{len(calls)} of 2 calls there"


def no_multicast(backend: str) -> Callable[[World], str]:
    def scenario(world: World) -> str:
        world.prepare((10, 0))
        if world.rank == 1:
            flashinfer.has_multicast = lambda device: False  # type: ignore[assignment]
        return world.run((0, 1), backend)

    return scenario


def wrong_result(backend: str) -> Callable[[World], str]:
    def scenario(world: World) -> str:
        world.prepare()
        world.fault(Faults(wrong_by=1.0), on=1)
        outcome = world.run((0, 1), backend)
        assert [r for r in world.log.records if r.levelno == logging.ERROR], "no error was logged"
        assert world.live() == 0 and world.double.seen.destroyed == 1
        return outcome

    return scenario


def two_groups_at_once(world: World) -> str:
    world.prepare()
    mine = (0, 1) if world.rank < 2 else (2, 3)
    outcome = world.run(mine, "trtllm")
    if world.rank in (1, 3):
        assert world.run((1, 3), "trtllm") == "flashinfer-trtllm"
    assert world.live() == (2 if world.rank in (1, 3) else 1)
    return outcome


def many_sizes_and_schemes(version: str, backend: str) -> Callable[[World], str]:
    def scenario(world: World) -> str:
        world.prepare((10, 0), version)
        quants = (None, Quant("fp8_static", rule="reciprocal"), Quant("fp8_static"), Quant("fp8_token"))
        quants += (Quant("nvfp4"), Quant("nvfp4", scale_layout="linear"), Quant("fp8_group"), PACKED)
        for hidden in (1024, 2048):
            for quant in quants:
                for tokens, offset, norm_out in ((8, 0, False), (129, 1, True)):
                    outcome = world.run((0, 1), backend, quant, tokens, hidden, offset, norm_out)
                    assert outcome == f"flashinfer-{backend}"
        # Ten groups: the last word of a row has two bytes of padding, and the last column three words.
        assert world.run((0, 1), backend, PACKED, tokens=5, hidden=1280) == f"flashinfer-{backend}"
        assert world.run((0, 1), backend, quants[1], weight_dtype=torch.float32) == f"flashinfer-{backend}"
        assert world.double.seen.created == 1
        return f"1 workspace, patterns {sorted(set(world.double.seen.patterns))}"

    return scenario


def three_ranks(backend: str) -> Callable[[World], str]:
    def scenario(world: World) -> str:
        world.prepare()
        return world.run((0, 1, 2), backend)

    return scenario


def two_nodes(backend: str, capability: tuple[int, int] = (10, 0)) -> Callable[[World], str]:
    def scenario(world: World) -> str:
        world.prepare(capability)
        base.host = lambda: f"node{world.rank // 2}"  # type: ignore[assignment]
        outcome = world.run((0, 1, 2, 3), backend)
        return outcome

    return scenario


def no_tokens(world: World) -> str:
    world.prepare()
    return world.run((0, 1), "trtllm", Quant("fp8_token"), tokens=0)


def configured_differently(world: World) -> str:
    world.prepare()
    return world.run((0, 1), "trtllm" if world.rank else "mnnvl")


def checkpoint(world: World) -> str:
    world.prepare()
    world.run((0, 1), "trtllm")
    (backend,) = select.opened()
    backend.checkpoint_prepare()  # type: ignore[attr-defined]
    backend.checkpoint_restore()  # type: ignore[attr-defined]
    select.reset()
    select.reset()
    assert world.live() == 0 and not world.double.references
    return f"{world.double.seen.destroyed} destroyed"


def leaves_early(world: World) -> str:
    """A backend that breaks its promise: one rank raises while the others ask it something."""
    world.prepare()

    def open_on(group: base.Group) -> base.Backend:
        if world.rank == 1:
            raise OSError("left early")
        base.agree(group, "still there?")
        raise AssertionError

    select.KINDS["symmetric"] = base.Kind("broken", lambda group: None, open_on)
    outcome = world.run((0, 1), "symmetric")
    del select.KINDS["symmetric"]
    assert world.run((0, 1), "trtllm") == "flashinfer-trtllm", "what it left behind is not taken for an answer"
    return outcome


def too_old(world: World) -> str:
    world.prepare()
    flashinfer_api.version = lambda: (0, 6, 11)  # type: ignore[assignment]
    return world.run((0, 1), "trtllm")


ALL = (0, 1, 2, 3)
_WHOLE = "FP4Quant|FP8Quant|kAllReduce|kARResidualRMSNormDynamicFP8Quant"
SCENARIOS = (
    Scenario("none, trtllm", "flashinfer-trtllm", no_fault),
    Scenario("none, auto on sm_90", "flashinfer-trtllm", auto((9, 0))),
    Scenario("none, auto and trtllm on one group", "{'flashinfer-trtllm'}, 1 workspace", by_two_names),
    *(
        Scenario(f"none, {name}=trtllm", "flashinfer-trtllm, kARResidualRMSNormFP8Quant", environment(name))
        for name in (BACKEND_VARIABLE, VLLM_BACKEND_VARIABLE)
    ),
    Scenario("none, auto on sm_100", "flashinfer-mnnvl", auto((10, 0))),
    Scenario("none, auto on 4 ranks of sm_90 (not measured)", "collective", auto((9, 0), ALL), ALL),
    Scenario("none, auto on sm_80", "collective", auto((8, 0))),
    Scenario("creation raises on one rank, auto", "collective", raises_on_one_rank("auto", "early")),
    Scenario("the same, trtllm", "ValueError|rank 1: RuntimeError: no memory", raises_on_one_rank("trtllm", "early")),
    Scenario("raises after allocating on one rank, auto", "collective", raises_on_one_rank("auto", "late")),
    Scenario("raises after allocating, 20 times", "collective, 0 live allocations", raises_twenty_times),
    Scenario(f"one rank stalls {STALL:g} s, auto", "collective", stalls("auto")),
    Scenario("the same, trtllm", "ValueError|rank", stalls("trtllm")),
    Scenario("the probe raises on one rank", "ValueError|rank 1: its probe raised OSError", probe_raises),
    Scenario("one rank's workspace says yes to any size", "flashinfer-trtllm, 2 of 3 calls there", boasts),
    Scenario("one rank's workspace is smaller than asked", "ValueError|rank 1|holds 100", understates),
    Scenario("one rank's workspace holds less of one size", "1 of 2 calls there", less_for_another_size),
    Scenario("no multicast on one rank, mnnvl", "ValueError|rank 1: missing: NVLink multicast", no_multicast("mnnvl")),
    Scenario("the same, auto", "collective", no_multicast("auto")),
    Scenario("wrong result in the self-test on one rank, auto", "collective", wrong_result("auto")),
    Scenario("the same, trtllm", "ValueError|are wrong", wrong_result("trtllm")),
    Scenario("groups {0,1} and {2,3} at once, then {1,3}", "flashinfer-trtllm", two_groups_at_once, ALL),
    Scenario("all schemes, two hidden sizes, 0.7.4 trtllm", _WHOLE, many_sizes_and_schemes("0.7.4", "trtllm")),
    Scenario("the same, 0.7.4 mnnvl", _WHOLE, many_sizes_and_schemes("0.7.4", "mnnvl")),
    Scenario("the same, 0.6.12 trtllm", "FP4Quant|FP8PackedQuant", many_sizes_and_schemes("0.6.12", "trtllm")),
    Scenario(
        "the same, 0.6.12 mnnvl",
        "1 workspace, patterns ['kARResidualRMSNorm', 'kAllReduce']",
        many_sizes_and_schemes("0.6.12", "mnnvl"),
    ),
    Scenario(
        "3 ranks, trtllm", "ValueError|3 ranks; its kernels are made for 2, 4, 8", three_ranks("trtllm"), (0, 1, 2)
    ),
    Scenario("3 ranks, auto", "collective", three_ranks("auto"), (0, 1, 2)),
    Scenario("2 nodes, trtllm", "ValueError|within one node|'mnnvl'", two_nodes("trtllm"), ALL),
    Scenario("2 nodes, mnnvl", "flashinfer-mnnvl", two_nodes("mnnvl"), ALL),
    Scenario("2 nodes of sm_90, mnnvl", "ValueError|compute capability 10.0", two_nodes("mnnvl", (9, 0)), ALL),
    Scenario("2 nodes, auto", "flashinfer-mnnvl", two_nodes("auto"), ALL),
    Scenario("2 nodes of sm_90, auto", "collective", two_nodes("auto", (9, 0)), ALL),
    Scenario("4 ranks, trtllm", "flashinfer-trtllm", lambda w: (w.prepare(), w.run(ALL, "trtllm"))[1], ALL),
    Scenario("no rows", "flashinfer-trtllm", no_tokens),
    Scenario("ranks configured differently", "ValueError|rank 0 'mnnvl', rank 1 'trtllm'", configured_differently),
    Scenario("checkpoint, restore, destroy", "1 destroyed", checkpoint),
    Scenario("a backend's one rank raises, the other asks", "ValueError|rank 1: OSError: left early", leaves_early),
    Scenario("flashinfer 0.6.11", "ValueError|0.6.11 is too old; 0.6.12", too_old),
)


def worker(rank: int, store: str, out: str) -> None:
    """Run all scenarios; one line of JSON for each in OUT/rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    flashinfer_api.TALK_TIMEOUT, base.AGREE_TIMEOUT = TALK, AGREE
    select.KINDS.pop("symmetric", None)  # it wants CUDA, and would be tried first
    world = World(rank)
    with (Path(out) / str(rank)).open("w") as lines:
        for index, scenario in enumerate(SCENARIOS):
            dist.barrier()
            if rank not in scenario.ranks:
                continue
            started = time.monotonic()
            try:
                outcome = scenario.run(world)
            except Exception:
                outcome = traceback.format_exc()
            print(json.dumps([index, outcome, time.monotonic() - started]), file=lines, flush=True)
    dist.barrier()
    dist.destroy_process_group()
