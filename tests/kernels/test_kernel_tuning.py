"""`torchseam tune` with the real kernels in Triton's interpreter: only the clock and the GPU's name are not real."""

from __future__ import annotations

import types

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources, PTXASError
from typer.testing import CliRunner

from torchseam.cli import app, tune
from torchseam.kernels import launch, local, packets, tuned_file
from torchseam.kernels.launch import Launch
from torchseam.tuning import benches, timing

US = {4: 9.0, 8: 10.0, 16: 5.0, 32: 12.0}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A GPU by name only: operands are on the CPU, where the kernels are interpreted."""
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHSEAM_TUNED", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    gpu = types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "gpus", lambda: 1)
    monkeypatch.setattr(tune, "check_compiler", lambda device: None)
    real = benches.LocalBench
    monkeypatch.setattr(benches, "LocalBench", lambda device, many: real(torch.device("cpu"), many))
    tuned_file.forget()
    yield
    monkeypatch.undo()
    tuned_file.forget()


@pytest.fixture
def clock(monkeypatch):
    """Which launches were timed; each is run once, and takes what US says."""
    timed: list[Launch] = []

    def microseconds(calls, calls_per_graph, count, together=lambda: None):
        assert len(calls) >= 1 and calls_per_graph >= 10 and count > timing.WARM_REPLAYS
        choice = calls[0].args[-1]
        assert all(call.args[-1] == choice for call in calls)
        calls[0]()
        timed.append(choice)
        return US[choice.num_warps]

    monkeypatch.setattr(timing, "microseconds", microseconds)
    return timed


OPTIONS = ("tune", "--hidden", "640", "--scheme", "static,nvfp4", "--tokens", "2")


def test_the_fastest_launch_is_found_written_and_used(clock):
    result = CliRunner().invoke(app.app, OPTIONS)
    assert result.exit_code == 0, result.output
    every = [Launch(4), Launch(8), Launch(16), Launch(32)]
    assert launch.choose(640) == Launch(4)
    # And the winner and the shipped one again.
    assert clock == [*every, Launch(16), Launch(4)] * 2
    assert "2 of 2 shapes get another launch than shipped" in result.output
    assert tuned_file.local_launch(0, 2, 640, torch.bfloat16, "nvfp4") == Launch(16)
    assert tuned_file.local_launch(0, 2, 640, torch.bfloat16, "fp8_token") == Launch(4)


def test_a_launch_with_other_bits_is_not_taken(clock, monkeypatch):
    right = local.run

    def wrong(seam, operands, *, launch):
        outputs = right(seam, operands, launch=launch)
        if launch == Launch(16):
            outputs[1].view(torch.uint8)[0, 0] ^= 1
        return outputs

    monkeypatch.setattr(local, "run", wrong)
    result = CliRunner().invoke(app.app, OPTIONS)
    assert result.exit_code == 0, result.output
    assert Launch(16) not in clock
    assert result.output.count("! ") >= 2
    assert "0 of 2 shapes" in result.output


@pytest.mark.parametrize(
    "error",
    [
        OutOfResources(262160, 232448, "shared memory"),
        PTXASError("ptxas died"),
        RuntimeError("PassManager::run failed"),
    ],
)
def test_a_launch_that_the_gpu_has_no_room_for_is_left_out_and_the_search_goes_on(error, clock, monkeypatch):
    right = local.run

    def run(seam, operands, *, launch):
        if launch == Launch(16):
            raise error
        return right(seam, operands, launch=launch)

    monkeypatch.setattr(local, "run", run)
    result = CliRunner().invoke(app.app, OPTIONS)
    assert result.exit_code == 0, result.output
    assert Launch(16) not in clock and Launch(32) in clock
    assert result.output.count("x ") >= 2 and "x cannot be launched on this GPU" in result.output
    # 9 us are what is shipped for 640.
    assert "0 of 2 shapes" in result.output and len(tuned_file.read(tuned_file.files()[0])[1].rows) == 2


def test_a_shape_whose_shipped_launch_fails_ends_the_search_with_what_to_do(clock, monkeypatch):
    def run(seam, operands, *, launch):
        raise OutOfResources(262160, 232448, "shared memory")

    monkeypatch.setattr(local, "run", run)
    result = CliRunner().invoke(app.app, OPTIONS)
    assert result.exit_code == 2, result.output
    assert "the shipped Launch(num_warps=4) cannot be launched" in result.stderr and "leave that out" in result.stderr


def test_the_kernel_asks_for_the_launch_of_its_call(monkeypatch):
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tuned_file, "local_launch", lambda *call: asked.append(call) or Launch(8))
    (operands,) = timing.operand_sets(tune.Quant("fp8_token"), 640, 3, device="cpu")
    given = local.run(timing.seam_of(tune.Quant("fp8_token")), operands, launch=Launch(4))
    assert asked == []
    tuned = local.run(timing.seam_of(tune.Quant("fp8_token")), operands)
    assert asked == [(-1, 3, 640, torch.bfloat16, "fp8_token")]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(given, tuned, strict=True))


@triton.jit
def exchange_kernel(slots_ptr, PARTS: tl.constexpr, LANES: tl.constexpr):
    packets.exchange(tl.full((), 1.0, tl.float64), slots_ptr, 0, tl.full((), 1, tl.int64), PARTS, LANES, False)


def test_an_exchange_with_fewer_lanes_than_parts_is_not_compiled():
    """It would leave the last parts out of the sum."""
    # Every part's packet is there: 1.0 beside the call's number, 1.
    packet = torch.tensor([1, 0, 1, 0x3FF00000], dtype=torch.int32)
    exchange_kernel[(1,)](packet.repeat(16), 16, 16)
    with pytest.raises(Exception, match="a part without a lane"):
        exchange_kernel[(1,)](packet.repeat(32), 32, 16)


def test_a_row_that_no_kernel_takes_is_refused():
    bench = benches.LocalBench(torch.device("cuda", 0), 132)
    shape = tune.Shape("local", 1, "fp8_static", "bfloat16", launch.MAX_HIDDEN + 8, 1)
    with pytest.raises(ValueError, match="rows of at most 32768"):
        bench.prepare(shape)
