"""Time the local kernel (residual + RMSNorm + quantise) beside its peers, on one CUDA GPU.

    PYTHONPATH=src python benchmarks/local.py [--out FILE.csv] [--hidden 4096,8192] [--tokens 1,16,...]
    PYTHONPATH=src python benchmarks/local.py --variants      # what other weights, norms and outputs cost
    PYTHONPATH=src python benchmarks/local.py --launches      # the table behind kernels/launch.py

One row a measurement: the median of CUDA graph replays, 20 calls to a graph, with input sets rotated so
that large ones do not stay in the cache. `limit_microseconds` is the bytes that must move (each input read
once, each output written once) over the copy bandwidth measured in the same run.

Peers, `torch.compile(mode="max-autotune-no-cudagraphs", dynamic=False)` both: `inductor` is the eager reference in
one piece, `unfused` is its add and norm, then its quantiser, compiled apart. All rows of a shape are measured one
after the other. Variants: `torchseam (fp32 weight)` and so on, each with the limit of its own bytes.

A run may be split: `--shard 2/3` takes every third shape from the second on, `--append` adds to the file that
is there, and `--budget 500` begins no shape that would not be done 500 seconds after the start; it says which it
left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import measuring
import torch
from measuring import SCHEMES
from peers import Peers, Shape, compile_ahead

from torchseam.kernels import launch, local
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs
from torchseam.seam import Norm, Seam
from torchseam.tuning import timing
from torchseam.tuning.timing import EPS, operand_sets, seam_of

CALLS_PER_GRAPH, REPLAYS = 20, 40
HIDDEN = "4096,5120,7168,8192,16384"
TOKENS = "1,16,128,1024,4096,16384"
#: Of a budget, what compiling ahead may take.
COMPILING = 0.5

Call = Callable[[Operands], object]


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    return timing.microseconds(calls, CALLS_PER_GRAPH, REPLAYS)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second of a 2 GB device-to-device copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    # A kernel: `copy_` inside a graph is a copy engine's job, which is slower.
    return 2 * source.nbytes / (microseconds([lambda: torch.mul(source, 1.0, out=target)]) * 1e-6)


def bytes_moved(seam: Seam, operands: Operands) -> int:
    read = [operands.x, operands.residual, operands.inner_weight, operands.weight, *operands.scales]
    return sum(t.numel() * t.itemsize for t in [*read, *empty_outputs(seam, operands)] if t is not None)


def timed(call: Call, sets: list[Operands]) -> float:
    return microseconds([lambda o=o: call(o) for o in sets])  # type: ignore[misc]


# ---- shapes -----------------------------------------------------------------------------------


def shapes_of(schemes: list[str], hiddens: list[int], all_tokens: list[int], shard: str) -> list[Shape]:
    """Shard I/N of the shapes; all schemes of one hidden size and T are together, since peers share code there."""
    index, count = (int(n) for n in shard.split("/"))
    if not 1 <= index <= count:
        raise ValueError(f"--shard is {shard}; it must be I/N with 1 <= I <= N")
    pairs = list(itertools.product(hiddens, all_tokens))[index - 1 :: count]
    return [(scheme, *pair) for pair in pairs for scheme in schemes]


class Budget:
    """When to stop, so that whatever was begun is also done."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self._longest, self._started = seconds, 0.0, time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self._started

    def while_it_lasts(self, shapes: list[Shape]) -> Iterator[Shape]:
        """The shapes, until one that takes as long as the longest so far would be late; says which are left."""
        for at, shape in enumerate(shapes):
            began = self.spent()
            if self.seconds is not None and began + self._longest > self.seconds:
                left = " ".join(f"{scheme}/{hidden}/{tokens}" for scheme, hidden, tokens in shapes[at:])
                print(f"{began:.0f} of {self.seconds:.0f} s spent; left out: {left}", file=sys.stderr)
                return
            yield shape
            self._longest = max(self._longest, self.spent() - began)
        print(f"all {len(shapes)} shapes in {self.spent():.0f} s", file=sys.stderr)


# ---- what is timed ----------------------------------------------------------------------------


def compare(shapes: list[Shape], peers: Peers | None, budget: Budget, add: Callable[..., None]) -> None:
    """Every shape beside the peers, printed and passed to `add` when its last row is there."""
    bandwidth = measured_bandwidth()
    before = None
    for scheme, hidden, tokens in budget.while_it_lasts(shapes):
        quant = SCHEMES[scheme]
        seam, sets = seam_of(quant), operand_sets(quant, hidden, tokens)
        implementations: list[tuple[str, Call]] = [("torchseam", lambda o, s=seam: local.run(s, o))]  # type: ignore[misc]
        if peers is not None:
            if before != (hidden, tokens):
                peers.forget()
            before = (hidden, tokens)
            implementations += [("inductor", peers.inductor(quant)), ("unfused", peers.unfused(quant))]
        limit = bytes_moved(seam, sets[0]) / bandwidth * 1e6
        rows = [
            (scheme, hidden, tokens, name, round(timed(call, sets), 2), round(limit, 4))
            for name, call in implementations
        ]
        for row in rows:
            add(*row)
            print(*row, sep=",", flush=True)


def variants_of(seam: Seam, sets: list[Operands]) -> Iterator[tuple[str, Seam, list[Operands]]]:
    """(name, seam, operands): the plain seam first, then each way in which it can ask for more."""
    weight = sets[0].weight
    assert weight is not None
    wide, inner = weight.float(), torch.rand_like(weight)
    yield "torchseam (plain)", seam, sets
    yield "torchseam (fp32 weight)", seam, [dataclasses.replace(o, weight=wide) for o in sets]
    yield "torchseam (Gemma offset)", dataclasses.replace(seam, norm=Norm(EPS, offset=1)), sets
    sandwich = dataclasses.replace(seam, inner_norm=Norm(EPS))
    yield "torchseam (sandwich norm)", sandwich, [dataclasses.replace(o, inner_weight=inner) for o in sets]
    yield "torchseam (norm emitted)", dataclasses.replace(seam, outputs=("residual", "norm")), sets


def variants(shapes: list[Shape], budget: Budget, add: Callable[..., None]) -> None:
    """The seam's variants beside the plain seam: the time and the bytes that each adds."""
    bandwidth = measured_bandwidth()
    for scheme, hidden, tokens in budget.while_it_lasts(shapes):
        quant = SCHEMES[scheme]
        rows, moved = [], []
        for name, seam, sets in variants_of(seam_of(quant), operand_sets(quant, hidden, tokens)):
            us = timed(lambda o, s=seam: local.run(s, o), sets)  # type: ignore[misc]
            moved.append(bytes_moved(seam, sets[0]))
            rows.append((scheme, hidden, tokens, name, round(us, 2), round(moved[-1] / bandwidth * 1e6, 4)))
        for row, size in zip(rows, moved, strict=True):
            add(*row)
            added = f"{row[4] - rows[0][4]:+.2f} us with {size - moved[0]:+d} bytes ({row[5] - rows[0][5]:+.4f} us)"
            print(",".join(map(str, row)), added, flush=True)


def measured_bandwidth() -> float:
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s", file=sys.stderr)
    return bandwidth


def launches(shapes: list[Shape]) -> None:
    """The time of every launch choice, `*` at the one that `launch.choose` takes."""
    for scheme, hidden, tokens in shapes:
        quant = SCHEMES[scheme]
        sets = operand_sets(quant, hidden, tokens)
        cells = []
        for choice in launch.CHOICES:
            us = timed(lambda o, c=choice: local.run(seam_of(quant), o, launch=c), sets)  # type: ignore[misc] # noqa: B023
            cells.append(f"{choice.num_warps} warps {us:.2f}{'*' if choice == launch.choose(hidden) else ''}")
        print(scheme, hidden, tokens, " | ".join(cells), flush=True)


def main() -> None:
    measuring.launch_as_shipped()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--append", action="store_true", help="add to --out instead of writing it anew")
    parser.add_argument("--commit", help="what to write into the file as the commit, where git cannot tell")
    parser.add_argument("--hidden", default=HIDDEN)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--schemes", help="default: all, and fp8_static for --variants")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="this part of the shapes only")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin nothing that would end later")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--launches", action="store_true")
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, min(14, (os.cpu_count() or 1) - 2)),
        help="that compile peers ahead; 0: none",
    )
    given = parser.parse_args()
    budget = Budget(given.budget)
    hiddens, tokens = ([int(n) for n in text.split(",")] for text in (given.hidden, given.tokens))
    schemes = (given.schemes or ("fp8_static" if given.variants else ",".join(SCHEMES))).split(",")
    shapes = shapes_of(schemes, hiddens, tokens, given.shard)
    if given.launches:
        launches(shapes)
        return
    with measuring.results(given.out, 1, given.commit, given.append) as add:
        if given.variants:
            variants(shapes, budget, add)
            return
        if given.no_peers:
            compare(shapes, None, budget, add)
            return
        if given.processes:
            compiled, failed = compile_ahead(shapes, given.processes, given.budget and given.budget * COMPILING)
            told = f"compiled {compiled} of {len(shapes)} ahead, {failed} failed, {budget.spent():.0f} s"
            print(told, file=sys.stderr)
        compare(shapes, Peers(), budget, add)


if __name__ == "__main__":
    main()
