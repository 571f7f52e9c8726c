"""Fit the cost model of the `symmetric` backend to the committed rows, and write it as backends/link_model.py.

    python benchmarks/fit_model.py [--check]

One-shot's time is alpha + bytes / beta: a least squares fit of the relative errors, so that 4 us count as much as
200. A hop (push, arrival, poll) is alpha less what the local kernel takes for its shortest row: the same work, and
nobody to wait for. --check writes nothing, and exits with 1 where the file is not of the rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tables

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
ONE_SHOT_ROWS, LOCAL_ROWS = RESULTS / "collective-2xh200.csv", RESULTS / "local-h200.csv"
MODEL = ROOT / "src" / "torchseam" / "backends" / "link_model.py"
#: The scheme and the itemsize (bf16) of the rows.
SCHEME, ITEMSIZE = "fp8_static", 2


@dataclass(frozen=True)
class Point:
    """One row: T rows of `row_bytes` on each rank, W of them."""

    row_bytes: int
    tokens: int
    world_size: int
    microseconds: float

    @property
    def link_bytes(self) -> int:
        """What a rank pushes in one-shot."""
        return self.row_bytes * self.tokens * (self.world_size - 1)


@dataclass(frozen=True)
class Fit:
    """alpha and a hop in us, beta in bytes a us."""

    alpha: float
    beta: float
    hop: float

    def error(self, point: Point) -> float:
        """How far the model is from a row, as a part of the row."""
        return (self.alpha + point.link_bytes / self.beta) / point.microseconds - 1


def points(file: Path) -> list[Point]:
    """The rows of our own kernel, by H and T."""
    every = tables.Results(file)
    found = [row for point in every.points() if point[0] == SCHEME and (row := every.at(point))]
    return [Point(r.hidden * ITEMSIZE, r.tokens, r.world_size, r.microseconds) for r in found]


def fit(one_shot: Sequence[Point], local: Sequence[Point]) -> Fit:
    """alpha, beta and the hop. ValueError where the rows cannot tell them."""
    # Sums of 1, b, b * b, t and b * t, each weighted by 1 / t^2.
    n = b = bb = t = bt = 0.0
    for p in one_shot:
        weight = p.microseconds**-2
        n += weight
        b += weight * p.link_bytes
        bb += weight * p.link_bytes**2
        t += weight * p.microseconds
        bt += weight * p.link_bytes * p.microseconds
    determinant = n * bb - b * b
    alone = [p.microseconds for p in local if p.tokens == 1]
    if determinant <= 0 or not alone:
        raise ValueError("a fit needs one-shot rows of two sizes, and a row of the local kernel for T = 1")
    alpha, slope = (t * bb - b * bt) / determinant, (n * bt - b * t) / determinant
    hop = alpha - min(alone)
    if min(alpha, slope, hop) <= 0:
        raise ValueError(f"alpha {alpha}, 1 / beta {slope} and hop {hop} must be positive: look at the rows")
    return Fit(alpha, 1 / slope, hop)


def source() -> str:
    """The module, of the committed rows."""
    rows = points(ONE_SHOT_ROWS)
    found = fit(rows, points(LOCAL_ROWS))
    worst = max(abs(found.error(p)) for p in rows)
    (world_size,) = {p.world_size for p in rows}
    (gpu,) = {row.gpu for row in tables.Results(ONE_SHOT_ROWS).rows.values()}
    measured = "".join(f"    ({p.row_bytes}, {p.tokens}): {p.microseconds},\n" for p in rows)
    return f'''"""What the one-shot kernel takes, a model and rows. Written by benchmarks/fit_model.py, not by hand.

{world_size} x {gpu}, residual + norm + static FP8 in bf16 (benchmarks/results/{ONE_SHOT_ROWS.name}). The
model is at most {worst:.1%} from a row. What it says of other GPUs, of more ranks and of two-shot was not measured.
"""

#: Where the rows were measured.
GPU = "{gpu}"
CAPABILITY = (9, 0)
WORLD_SIZE = {world_size}
#: us of a call that pushes next to nothing.
ALPHA = {found.alpha:.3f}
#: Bytes that a rank pushes in a us.
BETA = {found.beta:.0f}
#: us from a push to the end of the wait for it: ALPHA less the time of the local kernel for one short row.
HOP = {found.hop:.3f}
#: (bytes of a row, T) -> us.
MEASURED = {{
{measured}}}
'''


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="whether the file is of the rows; write nothing")
    given = parser.parse_args()
    text, rows = source(), points(ONE_SHOT_ROWS)
    found = fit(rows, points(LOCAL_ROWS))
    print(f"alpha {found.alpha:.3f} us, beta {found.beta / 1000:.1f} GB/s, hop {found.hop:.3f} us")
    for p in rows:
        print(f"{p.row_bytes:6} bytes x {p.tokens:5} rows: {p.microseconds:7.2f} us, model {found.error(p):+.1%}")
    if not given.check:
        MODEL.write_text(text)
        return 0
    if MODEL.exists() and MODEL.read_text() == text:
        return 0
    print(f"{MODEL} is not of these rows: run python benchmarks/fit_model.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
