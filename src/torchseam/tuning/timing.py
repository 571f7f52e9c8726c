"""Time a call by CUDA graph, and the operands for it: one way, for `torchseam tune` and for the benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

EPS = 1e-6
#: Bytes of inputs to rotate over: three times the L2 cache of an H200 (60 MB).
ROTATED_BYTES = 180e6
#: Replays that are not counted.
WARM_REPLAYS = 5


def seam_of(quant: Quant, group: str | None = None) -> Seam:
    """What is timed: [all_reduce over `group`] + residual + RMSNorm + quantise, the new residual kept."""
    reduce = None if group is None else Reduce(group)
    return Seam(norm=Norm(EPS), reduce=reduce, residual=True, quants=(quant,), outputs=("residual",))


def operand_sets(
    quant: Quant,
    hidden: int,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> list[Operands]:
    """Enough sets of operands that a large one is not in the cache when its turn comes."""
    size = 2 * dtype.itemsize * hidden * tokens
    sets = max(1, min(8, int(ROTATED_BYTES / size + 1))) if hidden * tokens > 2**20 else 1
    weight = torch.rand(hidden, device=device).to(dtype)
    scale = torch.tensor([0.01 if quant.scheme == "fp8_static" else 600.0], device=device)
    return [
        Operands(
            torch.randn(tokens, hidden, device=device).to(dtype),
            torch.randn(tokens, hidden, device=device).to(dtype),
            weight=weight,
            scales=(scale,) if quant.takes_scale else (),
        )
        for _ in range(sets)
    ]


def replays(
    calls: Sequence[Callable[[], object]],
    calls_per_graph: int,
    count: int,
    together: Callable[[], None] = lambda: None,
) -> list[float]:
    """Microseconds of one call, the calls taken in turn inside one CUDA graph, for each replay that counts.

    `together` waits for the other ranks.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
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
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls_per_graph)
    together()
    return times[WARM_REPLAYS:]


def microseconds(
    calls: Sequence[Callable[[], object]],
    calls_per_graph: int,
    count: int,
    together: Callable[[], None] = lambda: None,
) -> float:
    """The median of `replays`."""
    return statistics.median(replays(calls, calls_per_graph, count, together))
