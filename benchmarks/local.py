"""Time the local kernel (residual + RMSNorm + quantise) against Inductor's own fusion, on one CUDA GPU.

    PYTHONPATH=src python benchmarks/local.py [--out FILE.csv] [--hidden 4096,8192] [--tokens 1,16,...]
    PYTHONPATH=src python benchmarks/local.py --launches      # the table behind kernels/launch.py

One row a measurement: the median of CUDA graph replays, 20 calls to a graph, with input sets rotated so
that large ones do not stay in the cache. `limit_microseconds` is the bytes that must move (each input read
once, each output written once) over the copy bandwidth measured in the same run. The peer is
`torch.compile(mode="max-autotune-no-cudagraphs")` of the eager reference.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
import triton

from torchseam import reference
from torchseam.kernels import launch, local
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs
from torchseam.seam import Norm, Quant, Seam

COLUMNS = (
    *("date", "gpu", "world_size", "torch", "triton", "flashinfer", "commit", "command"),
    *("scheme", "hidden", "tokens", "implementation", "microseconds", "limit_microseconds"),
)
SCHEMES = (Quant("fp8_static"), Quant("fp8_token"), Quant("fp8_group"), Quant("nvfp4"))
CALLS_PER_GRAPH, REPLAYS = 20, 40
#: Bytes of inputs to rotate over: three times the L2 cache of an H200 (60 MB).
ROTATED_BYTES = 180e6


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, the calls taken in turn inside one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS_PER_GRAPH):
            calls[i % len(calls)]()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS_PER_GRAPH)
    return statistics.median(times[5:])


def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second of a 2 GB device-to-device copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    # A kernel: `copy_` inside a graph is a copy engine's job, which is slower.
    return 2 * source.nbytes / (microseconds([lambda: torch.mul(source, 1.0, out=target)]) * 1e-6)


def seam_of(quant: Quant) -> Seam:
    return Seam(norm=Norm(1e-6), residual=True, quants=(quant,), outputs=("residual",))


def operand_sets(quant: Quant, hidden: int, tokens: int) -> list[Operands]:
    """Enough sets of operands that a large one is not in the cache when its turn comes."""
    sets = max(1, min(8, int(ROTATED_BYTES / (4 * hidden * tokens) + 1))) if hidden * tokens > 2**20 else 1
    weight = torch.rand(hidden, device="cuda").bfloat16()
    scale = torch.tensor([0.01], device="cuda")
    return [
        Operands(
            torch.randn(tokens, hidden, device="cuda").bfloat16(),
            torch.randn(tokens, hidden, device="cuda").bfloat16(),
            weight=weight,
            scales=(scale,) if quant.takes_scale else (),
        )
        for _ in range(sets)
    ]


def bytes_moved(seam: Seam, operands: Operands) -> int:
    read = [operands.x, operands.residual, operands.weight, *operands.scales]
    return sum(t.numel() * t.itemsize for t in [*read, *empty_outputs(seam, operands)] if t is not None)


def bound(function: Callable[..., object], seam: Seam, sets: list[Operands]) -> list[Callable[[], object]]:
    return [lambda a=a: function(seam, a) for a in sets]  # type: ignore[misc]


def compare(hiddens: list[int], all_tokens: list[int], peers: bool) -> list[tuple[object, ...]]:
    """(scheme, hidden, tokens, implementation, us, limit us) for every shape; printed as they come."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s", file=sys.stderr)
    rows: list[tuple[object, ...]] = []
    for quant, hidden, tokens in itertools.product(SCHEMES, hiddens, all_tokens):
        sets = operand_sets(quant, hidden, tokens)
        seam = seam_of(quant)
        limit = bytes_moved(seam, sets[0]) / bandwidth * 1e6
        implementations: list[tuple[str, Callable[..., object]]] = [("torchseam", local.run)]
        if peers:
            torch._dynamo.reset()
            inductor = torch.compile(reference.run, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
            implementations.append(("inductor", inductor))
        for name, function in implementations:
            row = (
                quant.scheme,
                hidden,
                tokens,
                name,
                round(microseconds(bound(function, seam, sets)), 2),
                round(limit, 2),
            )
            rows.append(row)
            print(*row, sep=",", flush=True)
    return rows


def launches(hiddens: list[int], all_tokens: list[int]) -> None:
    """The time of every launch choice, `*` at the one that `launch.choose` takes."""
    for quant, hidden, tokens in itertools.product(SCHEMES, hiddens, all_tokens):
        sets = operand_sets(quant, hidden, tokens)
        cells = []
        for choice in launch.CHOICES:
            us = microseconds(bound(lambda s, o, c=choice: local.run(s, o, launch=c), seam_of(quant), sets))
            cells.append(f"{choice.num_warps} warps {us:.2f}{'*' if choice == launch.choose(hidden) else ''}")
        print(quant.scheme, hidden, tokens, " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", help="CSV file to write")
    parser.add_argument("--hidden", default="4096,8192")
    parser.add_argument("--tokens", default="1,16,128,1024,4096,16384")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--launches", action="store_true")
    given = parser.parse_args()
    hiddens, tokens = ([int(n) for n in text.split(",")] for text in (given.hidden, given.tokens))
    if given.launches:
        launches(hiddens, tokens)
        return
    rows = compare(hiddens, tokens, peers=not given.no_peers)
    if given.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        fixed = [
            datetime.date.today().isoformat(),
            torch.cuda.get_device_name(),
            1,
            torch.__version__,
            triton.__version__,
            "",
            commit,
            "PYTHONPATH=src python " + " ".join(sys.argv),
        ]
        with open(given.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([*fixed, *row] for row in rows)


if __name__ == "__main__":
    main()
