"""The `symmetric` backend between 3 and 4 real processes over shared memory, in Triton's interpreter.

Which kernel a call takes, what becomes of calls that it refuses, and of a group whose kernels fail their self-test.
Also run by test_kernel_interpreted.py, in a process that has the interpreter switched on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from collective_cases import Call, call_of, same_storage, table
from kernel_cases import Case, poisoned_outputs
from shared_ranks import NO_COMPUTED_BOUNDS, make_channels, run_ranks
from torch import Tensor

from torchseam.backends import algorithms, base, select, symmetric, workspace
from torchseam.backends.algorithms import Model
from torchseam.kernels import one_shot, two_shot
from torchseam.kernels.channel import Channel
from torchseam.kernels.tuned import Table
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

pytestmark = pytest.mark.skipif(NO_COMPUTED_BOUNDS is not None, reason=NO_COMPUTED_BOUNDS or "")

H200 = (9, 0)
#: The interpreter has no time for calls in which a hop pays: here one costs nothing, and fewer bytes are enough.
BYTES_ALONE = Model(alpha=0.0, hop=0.0, least_gain=1.0001)
CPU = torch.device("cpu")


class Memory:
    """A workspace of shared memory."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.closed = channel, False

    def memory(self) -> int:
        return 1234

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch) -> Iterator[None]:
    """As on a GPU: the backend takes seams of CPU tensors. Ranks are forked, and so have this too."""
    monkeypatch.setattr(symmetric.local_backend, "has_kernel_for", lambda x, quants: True)
    yield
    select.reset()


def backend_of(channel: Channel, name: str = "group", **more: Any) -> symmetric.Symmetric:
    group = base.Group(name, channel.rank, channel.world_size, CPU)
    more.setdefault("model", BYTES_ALONE)
    return symmetric.Symmetric(group, Memory(channel), Table(), more.pop("capability", H200), **more)


def recorded(ran: list[str]) -> None:
    """From now on each launch of a kernel, in this process, leaves its name."""
    for module in (one_shot, two_shot):

        def run(*args: Any, of: Any = module, original: Any = module.run, **named: Any) -> list[Tensor]:
            ran.append(of.__name__.rpartition(".")[2])
            return original(*args, **named)

        module.run = run


def run_all(rank: int, channels: Sequence[Channel], calls: Sequence[Call]) -> tuple[list[list[Tensor]], list[str]]:
    """Each call through the backend: its outputs, and the kernels that ran."""
    ran: list[str] = []
    recorded(ran)
    backend = backend_of(channels[rank])
    outputs = []
    for call in calls:
        operands = call.operands_of(call.terms[rank])
        assert backend.refuses(call.seam, operands) is None
        outputs.append(backend.run(call.seam, operands))
    return outputs, ran


@pytest.mark.parametrize("world_size", [3, 4])
def test_each_call_takes_the_kernel_of_fewer_bytes_on_all_ranks(world_size):
    """The bits are the same either way; what is chosen was not passed between the ranks."""
    calls = [c for c in table(one_shot.run, world_size)[world_size::4] if c.terms[0].numel()]
    static = Case(Seam(Norm(1e-6), residual=True, quants=(Quant("fp8_static"),)), None, 256, torch.bfloat16)
    calls += [call_of(one_shot.run, static, world_size, t, seed=t) for t in (1, 2, 9, 16)]
    channels, buffers = make_channels(world_size)
    with poisoned_outputs():
        got = run_ranks(world_size, run_all, channels, calls)
    ran = got[0][1]
    assert all(other == ran for _, other in got)
    # One row of bf16 whose codes alone are gathered: in two-shot its owner pushes 3/2 of one-shot's bytes.
    assert ran[-4] == "one_shot" and ran[-2:] == ["two_shot", "two_shot"]
    assert set(ran[:-4]) == {"one_shot", "two_shot"}
    for index, call in enumerate(calls):
        x, weight = call.terms[0], call.operands.weight
        sent = algorithms.result_bytes(call.seam, x.shape[1], x.dtype, None if weight is None else weight.dtype)
        shape = algorithms.Shape(world_size, x.shape[0], x.shape[1] * x.itemsize, sent)
        fewer = shape.link_bytes("one_shot") > 1.0001 * shape.link_bytes("two_shot")
        assert ran[index] == ("two_shot" if fewer else "one_shot")
        for _, expected in call.expected():
            for outputs, _ in got:
                assert all(same_storage(a, b) for a, b in zip(outputs[index], expected, strict=True)), call
    assert all(bool((b == 0xFF).all()) for b in buffers)


def test_as_shipped_few_rows_take_one_shot():
    static = Seam(Norm(1e-6), Reduce("group"), None, True, (Quant("fp8_static"),), ("residual",))
    channels, _ = make_channels(4, slot_bytes=2**24)
    backend = backend_of(channels[0], model=algorithms.MODEL)
    taken = {}
    for tokens in (1, 8, 64, 128, 1024):
        x = torch.empty(tokens, 8192, dtype=torch.bfloat16, device="meta")
        taken[tokens] = backend.choice(static, Operands(x, weight=x[0])).algorithm
    assert taken == {1: "one_shot", 8: "one_shot", 64: "one_shot", 128: "two_shot", 1024: "two_shot"}


# ---- what is refused --------------------------------------------------------------------------


def codes_only(residual: str = "full") -> Seam:
    return Seam(Norm(1e-6, "none"), Reduce("group", residual_in=residual), None, True, (Quant("fp8_token"),), ())


def rows(tokens: int, hidden: int = 256, dtype: torch.dtype = torch.bfloat16) -> Operands:
    x = torch.zeros(tokens, hidden, dtype=dtype)
    return Operands(x, torch.zeros_like(x))


def test_capacity_is_that_of_the_kernel_that_is_chosen():
    # 64 rows of one-shot; in two-shot owners of 4 have 26 each: 512 bytes of partials, 272 of results.
    channels, _ = make_channels(4, slot_bytes=64 * 512)
    both, one = backend_of(channels[0]), backend_of(channels[0], no_two_shot="two-shot is off")
    most = 4 * (64 * 512 // (512 + 256 + 16))
    assert both.refuses(codes_only(), rows(65)) is both.refuses(codes_only(), rows(most)) is None
    assert both.choice(codes_only(), rows(most)).algorithm == "two_shot"
    assert both.refuses(codes_only(), rows(most + 1)) == (
        f"one-shot needs {(most + 1) * 512} bytes of a slot of the workspace, which has {64 * 512}"
    )
    assert one.refuses(codes_only(), rows(64)) is None
    assert "one-shot needs 33280 bytes" in one.refuses(codes_only(), rows(65))


def test_a_sharded_residual_runs_in_two_shot_or_not_at_all():
    channels, _ = make_channels(2, slot_bytes=64 * 512)
    both, one = backend_of(channels[0]), backend_of(channels[0], no_two_shot="two-shot is off")
    assert both.refuses(codes_only("sharded"), rows(1)) is None
    assert both.choice(codes_only("sharded"), rows(1)).algorithm == "two_shot"
    assert both.refuses(codes_only("sharded"), rows(200)).startswith("two-shot needs 78400 bytes")
    assert one.refuses(codes_only("sharded"), rows(1)) == "a sharded residual needs two-shot, and two-shot is off"
    assert one.remarks == ["two-shot is off"] and both.remarks == []


def test_rows_that_no_kernel_takes_are_refused(monkeypatch):
    channels, _ = make_channels(3)
    backend = backend_of(channels[0])
    assert "a row is 504 bytes" in backend.refuses(codes_only(), rows(1, 252))
    monkeypatch.setattr(symmetric.local_backend, "has_kernel_for", lambda x, quants: False)
    assert backend.refuses(codes_only(), rows(1)) == "the Triton kernels cannot take this seam"


# ---- opening, and what select makes of it -----------------------------------------------------


class Heard(logging.Handler):
    """Errors that the backend logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def raising(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the third call of a self-test, once it is launched: the interpreter has no watchdog for what is missing."""
    calls = iter(range(3))

    def run(*args: Any, **named: Any) -> Any:
        outputs = original(*args, **named)
        if next(calls) == 2:
            raise OSError("no more handles")
        return outputs

    return run


def spoiling(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        outputs = original(*args, **named)
        outputs[0].view(torch.uint8)[0, 0] += 1
        return outputs

    return run


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a rank saw: of opening the backend, and of three calls through select."""

    outcome: str
    errors: list[str]
    closed: list[bool]
    ran: list[str]
    outputs: list[list[Tensor]]
    remarks: list[str]
    memory: dict[tuple[str, str], int]


#: H = 256: one row, one that is worth two-shot, and more than the workspace holds either way.
TOKENS = (1, 12, 600)


def terms(tokens: int, world_size: int) -> list[Tensor]:
    """Whole numbers, whose sums are the same in any order."""
    pattern = torch.arange(tokens * 256).reshape(tokens, 256)
    return [(pattern % (5 + rank) - 2).bfloat16() for rank in range(world_size)]


def open_and_run(
    rank: int,
    world_size: int,
    store: Path,
    made: Sequence[Sequence[Channel]],
    fault: tuple[int, str, Callable[..., Any]] | None,
    off: int | None,
) -> Opened:
    """made: the channels of the first workspace, of the second, ... fault: (rank, kernel, what it does to `run`).

    off: the rank that does not allow two-shot.
    """
    os.environ[symmetric.TWO_SHOT_VARIABLE] = "" if off == rank else "1"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    heard = Heard()
    logging.getLogger("torchseam").addHandler(heard)
    memories = [Memory(channels[rank]) for channels in made]
    waiting = iter(memories)
    workspace.create = lambda group: next(waiting)
    symmetric.agreed_table = lambda group: Table()
    symmetric._check_peers = lambda group: H200
    # What `open_on` makes has the shipped model, by which nothing here is worth a hop.
    original = symmetric.Symmetric.__init__
    symmetric.Symmetric.__init__ = lambda self, *args, **named: original(self, *args, **named, model=BYTES_ALONE)
    if fault is not None and fault[0] == rank:
        module = {"one_shot": one_shot, "two_shot": two_shot}[fault[1]]
        module.run = fault[2](module.run)
    select.KINDS["symmetric"] = base.Kind("symmetric", lambda group: None, symmetric.open_on)
    name = dist.group.WORLD.group_name
    seam = dataclasses.replace(codes_only(), reduce=Reduce(name, "symmetric"))
    ran: list[str] = []
    outputs = []
    try:
        select._choose(seam.reduce, CPU)
        recorded(ran)
        for tokens in TOKENS:
            x = terms(tokens, world_size)[rank]
            outputs.append(select.run(seam, Operands(x, torch.ones_like(x))))
        outcome = "ran"
    except ValueError as error:
        outcome = str(error)
    result = Opened(
        outcome, heard.told, [m.closed for m in memories], ran, outputs, select.remarks(name), select.memory()
    )
    dist.barrier()
    select.reset()
    dist.destroy_process_group()
    return result


def opened(
    tmp_path: Path,
    fault: tuple[int, str, Callable[..., Any]] | None,
    world_size: int = 3,
    off: int | None = None,
    on_rank: Callable[..., Opened] = open_and_run,
) -> list[Opened]:
    made = [make_channels(world_size, slot_bytes=2**14) for _ in range(2)]
    channels = [one[0] for one in made]
    return run_ranks(world_size, on_rank, world_size, tmp_path / "store", channels, fault, off)


def check_outputs(got: Sequence[Opened], world_size: int = 3) -> None:
    for index, tokens in enumerate(TOKENS):
        seam, of = codes_only(), terms(tokens, world_size)
        total = torch.stack(of).float().sum(0).bfloat16()
        expected = Call(one_shot.run, seam, tuple(of), Operands(total, torch.ones_like(total))).by_kernel()
        for one in got:
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(one.outputs[index], expected, strict=True)
            )


@pytest.mark.parametrize("world_size", [3, 4])
def test_an_opened_backend_runs_both_kernels_and_leaves_what_is_too_large_to_collective(tmp_path, world_size):
    got = opened(tmp_path, None, world_size)
    for one in got:
        assert (one.outcome, one.errors, one.closed) == ("ran", [], [False, False])
        assert one.ran == ["one_shot", "two_shot"]
        assert one.remarks == [
            "some calls went to collective: "
            f"one-shot needs {600 * 512} bytes of a slot of the workspace, which has {2**14}"
        ]
        assert list(one.memory.values()) == [1234] and [name for _, name in one.memory] == ["symmetric"]
    check_outputs(got, world_size)


def test_a_watchdog_that_one_rank_cannot_read_is_everyones_before_anything_is_shared(tmp_path, monkeypatch):
    def one_sided(rank: int, *args: Any) -> Opened:
        os.environ[symmetric.WATCHDOG_VARIABLE] = "30s" if rank == 1 else "30"
        return open_and_run(rank, *args)

    got = opened(tmp_path, None, on_rank=one_sided)
    for one in got:
        assert "rank 1: TORCHSEAM_WATCHDOG is '30s'; give seconds" in one.outcome
        assert (one.closed, one.ran, one.memory) == ([False, False], [], {})


def test_two_shot_runs_only_where_every_rank_allows_it(tmp_path):
    got = opened(tmp_path, None, off=1)
    for one in got:
        assert (one.outcome, one.errors, one.closed) == ("ran", [], [False, False])
        assert one.ran == ["one_shot", "one_shot"]
        assert any("rank 1: two-shot is off (TORCHSEAM_TWO_SHOT is not 1)" in remark for remark in one.remarks)
    check_outputs(got)


@pytest.mark.parametrize(("spoil", "why"), [(spoiling, "not those of torch.distributed"), (raising, "no more handles")])
def test_where_two_shot_fails_on_one_rank_all_go_on_with_one_shot(tmp_path, spoil, why):
    got = opened(tmp_path, (1, "two_shot", spoil))
    for one in got:
        assert (one.outcome, one.closed) == ("ran", [True, False])
        assert one.ran == ["one_shot", "one_shot"]
        (error,) = one.errors
        assert "two-shot is switched off, its self-test failed (rank 1: " in error and why in error
        assert any("two-shot is switched off" in remark for remark in one.remarks)
    assert len({one.errors[0] for one in got}) == 1
    check_outputs(got)


@pytest.mark.parametrize("spoil", [spoiling, raising])
def test_where_one_shot_fails_on_one_rank_nobody_has_the_backend(tmp_path, spoil):
    got = opened(tmp_path, (2, "one_shot", spoil))
    for one in got:
        assert "cannot run on this group of 3 ranks: its self-test failed (rank 2: " in one.outcome
        assert (one.closed, one.ran, one.memory) == ([True, False], [], {})
