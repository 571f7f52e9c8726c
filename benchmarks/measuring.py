"""What the benchmarks of the kernels share: operands, timing by CUDA graph, and the table of results."""

from __future__ import annotations

import csv
import datetime
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import triton

from torchseam.operands import Operands
from torchseam.seam import Quant

#: One row a measurement.
COLUMNS = (
    *("date", "gpu", "world_size", "torch", "triton", "flashinfer", "commit", "command"),
    *("scheme", "hidden", "tokens", "implementation", "microseconds", "limit_microseconds"),
)
SCHEMES = {q.scheme: q for q in (Quant("fp8_static"), Quant("fp8_token"), Quant("fp8_group"), Quant("nvfp4"))}
EPS = 1e-6
#: Bytes of inputs to rotate over: three times the L2 cache of an H200 (60 MB).
ROTATED_BYTES = 180e6
#: Replays that are not counted.
WARM_REPLAYS = 5


def operand_sets(quant: Quant, hidden: int, tokens: int) -> list[Operands]:
    """Enough sets of operands that a large one is not in the cache when its turn comes."""
    sets = max(1, min(8, int(ROTATED_BYTES / (4 * hidden * tokens) + 1))) if hidden * tokens > 2**20 else 1
    weight = torch.rand(hidden, device="cuda").bfloat16()
    scale = torch.tensor([0.01 if quant.scheme == "fp8_static" else 600.0], device="cuda")
    return [
        Operands(
            torch.randn(tokens, hidden, device="cuda").bfloat16(),
            torch.randn(tokens, hidden, device="cuda").bfloat16(),
            weight=weight,
            scales=(scale,) if quant.takes_scale else (),
        )
        for _ in range(sets)
    ]


def microseconds(
    calls: Sequence[Callable[[], object]],
    calls_per_graph: int,
    replays: int,
    together: Callable[[], None] = lambda: None,
) -> float:
    """Median time of one call, the calls taken in turn inside one CUDA graph; `together` waits for the other ranks."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.synchronize()
    together()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls_per_graph):
            calls[i % len(calls)]()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls_per_graph)
    together()
    return statistics.median(times[WARM_REPLAYS:])


@contextmanager
def results(
    file: Path | None, world_size: int, commit: str | None, append: bool = False
) -> Iterator[Callable[..., None]]:
    """What adds a row (the columns from `scheme` on) to a CSV file, which has it at once; None: nothing is written.

    `commit`: what was measured, where git cannot tell. `append`: the file keeps the rows that it has.
    """
    if file is None:
        yield lambda *row: None
        return
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    launcher = f"torchrun --nproc-per-node {world_size}" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    fixed = (
        datetime.date.today().isoformat(),
        torch.cuda.get_device_name(),
        world_size,
        torch.__version__,
        triton.__version__,
        "",
        commit or said,
        f"PYTHONPATH=src {launcher} {' '.join(sys.argv)}",
    )
    has_rows = append and file.exists()
    with file.open("a" if append else "w", newline="") as opened:
        writer = csv.writer(opened)
        if not has_rows:
            writer.writerow(COLUMNS)

        def add(*row: object) -> None:
            writer.writerow((*fixed, *row))
            opened.flush()

        yield add
