"""What a seam costs that no fused backend takes: torchseam with `collective` against the same model without torchseam.

Above the size that a fused backend takes, and wherever there is none, a seam is torch.distributed's all_reduce and one
local operator. This prints, for a block of matrix product, all_reduce, residual, norm and static FP8:

    unfused, torchseam   us a call of the compiled block, median of many, taken in turn; and their ratio. On a GPU the
                         calls are replays of CUDA graphs, as engines run them; `eager` has those without a graph
    operator             us of host time of the operator itself (dispatch, validation, choice), with its work left out
    functional           us of host time of the collective that Inductor would call, all_reduce_ and wait_tensor

Without a graph a GPU's host runs ahead: its time shows only while the kernels are shorter than it. On a CPU the
operator's work is the reference, plain aten operators, so there the ratio is about those.

    python benchmarks/unfused_cost.py [--tokens 1 64 1024] [--hidden 1024]
    torchrun --nproc-per-node 2 benchmarks/unfused_cost.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import torchseam
from torchseam import Norm, Quant, Seam, SeamConfig, ops
from torchseam.backends import select
from torchseam.seam import Reduce

EPS = 1e-6
QUANT = Quant("fp8_static")
#: Seconds that one function is timed for at each size, and rounds in which the functions take turns.
SECONDS, ROUNDS = 1.0, 20
#: Columns of what the residual is made of.
_INNER = 64


@dataclass(frozen=True)
class Row:
    """One size; times in microseconds."""

    tokens: int
    hidden: int
    unfused: float
    fused: float
    operator: float
    functional: float
    eager: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        return self.fused / self.unfused


class Block(torch.nn.Module):
    """Row-parallel product, sum over the ranks, residual, norm, static FP8."""

    def __init__(self, hidden: int, group: str, device: torch.device) -> None:
        super().__init__()
        self.matrix = torch.nn.Buffer((torch.randn(hidden, hidden, device=device) / hidden**0.5).bfloat16())
        self.other = torch.nn.Buffer(self.matrix[:, :_INNER].contiguous())
        self.weight = torch.nn.Buffer(torch.ones(hidden, device=device, dtype=torch.bfloat16))
        self.scale = torch.nn.Buffer(torch.tensor(0.01, device=device))
        self.group = group

    def forward(self, x: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
        # The residual is no input, so that it may be overwritten, and comes of what Inductor fuses with nothing.
        h = funcol.all_reduce(small @ self.other.t(), "sum", self.group) + funcol.all_reduce(
            x @ self.matrix, "sum", self.group
        )
        y = torch.nn.functional.rms_norm(h, (h.shape[-1],), self.weight, EPS)
        return (y.float() / self.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), h


def medians(functions: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Microseconds a call of each, the median over rounds in which they take turns; equally many calls on all ranks."""
    calls = []
    for function in functions:
        for _ in range(5):
            function()
        _wait(device)
        started = time.perf_counter()
        for _ in range(10):
            function()
        _wait(device)
        guess = torch.tensor([SECONDS / ROUNDS / (time.perf_counter() - started) * 10], device=device)
        dist.all_reduce(guess, dist.ReduceOp.MIN)
        calls.append(max(1, int(guess)))
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, count, taken in zip(functions, calls, times, strict=True):
            _wait(device)
            started = time.perf_counter()
            for _ in range(count):
                function()
            _wait(device)
            taken.append((time.perf_counter() - started) / count * 1e6)
    return [statistics.median(taken) for taken in times]


def replay(function: Callable[[], Any]) -> Callable[[], Any]:
    """What replays a CUDA graph of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure(tokens: int, hidden: int, device: torch.device) -> Row:
    """One size. Collective: all ranks call it alike."""
    group = dist.group.WORLD.group_name
    torch._dynamo.reset()
    block = Block(hidden, group, device)
    x, stream = (torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(2))
    small = stream[:, :_INNER].contiguous()
    plain = torch.compile(block)
    fused = torchseam.compile(block, config=SeamConfig(backend="collective"))
    blocks: list[Callable[[], Any]] = [lambda: plain(x, small), lambda: fused(x, small)]
    unfused_time, fused_time = medians(blocks, device)
    eager = None
    if device.type == "cuda":
        eager = unfused_time, fused_time
        unfused_time, fused_time = medians([replay(function) for function in blocks], device)
    report = torchseam.report(fused)
    assert report.fused == 1, str(report)

    norm = Norm(EPS, weight="before_cast")
    seam = Seam(norm, Reduce(group, "collective"), residual=True, quants=(QUANT,), outputs=("residual",))
    operator = ops.in_place(seam, ("x", "residual"))
    arguments = (x.clone(), stream.clone(), None, block.weight, [block.scale], seam.to_text())
    done = [arguments[1], torch.empty_like(x, dtype=torch.float8_e4m3fn)]
    functional = torch.ops._c10d_functional
    scratch = torch.zeros_like(x)
    with mock.patch.object(select, "run", lambda seam, operands: done):
        (operator_time,) = medians([lambda: operator(*arguments)], device)
    (functional_time,) = medians(
        [lambda: functional.wait_tensor.default(functional.all_reduce_.default(scratch, "sum", group))], device
    )
    return Row(tokens, hidden, unfused_time, fused_time, operator_time, functional_time, eager)


def table(rows: Sequence[Row]) -> str:
    """What was measured, as text."""
    lines = [
        f"{'T':>6} {'H':>6} {'unfused':>9} {'torchseam':>10} {'ratio':>6} {'operator':>9} {'functional':>11}  eager"
    ]
    for r in rows:
        lines.append(
            f"{r.tokens:>6} {r.hidden:>6} {r.unfused:>9.1f} {r.fused:>10.1f} {r.ratio:>6.3f} {r.operator:>9.2f} "
            f"{r.functional:>11.2f}  {'' if r.eager is None else '{:.1f} {:.1f}'.format(*r.eager)}".rstrip()
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024])
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        alone = {} if "RANK" in os.environ else {"init_method": f"file://{folder}/store", "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if on_gpu else "gloo", **alone)
        try:
            torch.manual_seed(dist.get_rank())
            rows = [measure(tokens, hidden, device) for hidden in given.hidden for tokens in given.tokens]
            if dist.get_rank() == 0:
                where = torch.cuda.get_device_name(device) if on_gpu else "CPU, one thread a rank"
                print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {where}")
                print(table(rows))
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
