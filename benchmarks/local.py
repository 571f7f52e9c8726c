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
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import measuring
import torch
from measuring import SCHEMES

from torchseam import reference
from torchseam.kernels import launch, local
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs
from torchseam.seam import Seam
from torchseam.tuning import timing
from torchseam.tuning.timing import operand_sets, seam_of

CALLS_PER_GRAPH, REPLAYS = 20, 40


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    return timing.microseconds(calls, CALLS_PER_GRAPH, REPLAYS)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second of a 2 GB device-to-device copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    # A kernel: `copy_` inside a graph is a copy engine's job, which is slower.
    return 2 * source.nbytes / (microseconds([lambda: torch.mul(source, 1.0, out=target)]) * 1e-6)


def bytes_moved(seam: Seam, operands: Operands) -> int:
    read = [operands.x, operands.residual, operands.weight, *operands.scales]
    return sum(t.numel() * t.itemsize for t in [*read, *empty_outputs(seam, operands)] if t is not None)


def bound(function: Callable[..., object], seam: Seam, sets: list[Operands]) -> list[Callable[[], object]]:
    return [lambda a=a: function(seam, a) for a in sets]  # type: ignore[misc]


def compare(
    hiddens: list[int], all_tokens: list[int], schemes: list[str], peers: bool, add: Callable[..., None]
) -> None:
    """Every shape, printed and passed to `add` as it comes."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s", file=sys.stderr)
    for scheme, hidden, tokens in itertools.product(schemes, hiddens, all_tokens):
        quant = SCHEMES[scheme]
        seam, sets = seam_of(quant), operand_sets(quant, hidden, tokens)
        limit = bytes_moved(seam, sets[0]) / bandwidth * 1e6
        implementations: list[tuple[str, Callable[..., object]]] = [("torchseam", local.run)]
        if peers:
            torch._dynamo.reset()
            inductor = torch.compile(reference.run, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
            implementations.append(("inductor", inductor))
        for name, function in implementations:
            us = microseconds(bound(function, seam, sets))
            row = (scheme, hidden, tokens, name, round(us, 2), round(limit, 2))
            add(*row)
            print(*row, sep=",", flush=True)


def launches(hiddens: list[int], all_tokens: list[int], schemes: list[str]) -> None:
    """The time of every launch choice, `*` at the one that `launch.choose` takes."""
    for quant, hidden, tokens in itertools.product(map(SCHEMES.get, schemes), hiddens, all_tokens):
        assert quant is not None
        sets = operand_sets(quant, hidden, tokens)
        cells = []
        for choice in launch.CHOICES:
            us = microseconds(bound(lambda s, o, c=choice: local.run(s, o, launch=c), seam_of(quant), sets))
            cells.append(f"{choice.num_warps} warps {us:.2f}{'*' if choice == launch.choose(hidden) else ''}")
        print(quant.scheme, hidden, tokens, " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--commit", help="what to write into the file as the commit, where git cannot tell")
    parser.add_argument("--hidden", default="4096,8192")
    parser.add_argument("--tokens", default="1,16,128,1024,4096,16384")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--launches", action="store_true")
    given = parser.parse_args()
    hiddens, tokens = ([int(n) for n in text.split(",")] for text in (given.hidden, given.tokens))
    schemes = given.schemes.split(",")
    if given.launches:
        launches(hiddens, tokens, schemes)
        return
    with measuring.results(given.out, 1, given.commit) as add:
        compare(hiddens, tokens, schemes, not given.no_peers, add)


if __name__ == "__main__":
    main()
