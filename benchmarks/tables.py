"""What the tables of results say beside the goals: the generated part of docs/performance.md, as text.

The goals are those of the project's issues, each with the rows that meet it and those that miss it. `plot.py` writes
the page and draws the figures.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OURS = "torchseam"
VARIANT = OURS + " ("
#: Of the local kernel, and of the collective one; the names in the files -> as people read them.
NAMES = {
    OURS: "torchseam",
    "inductor": "Inductor max-autotune",
    "unfused": "norm, then quantiser (Inductor)",
    "nccl+inductor": "NCCL + Inductor",
    "torchseam-collective": "NCCL + our local kernel",
    "flashinfer-trtllm": "FlashInfer trtllm",
}
#: How far two runs of one row lie apart: fp8_static by Inductor at T >= 4096, 2026-11-30 and 2026-12-01, up to 1.4 %.
NOISE = 0.02

Point = tuple[str, int, int]


@dataclass(frozen=True)
class Row:
    date: str
    gpu: str
    world_size: int
    torch: str
    triton: str
    commit: str
    scheme: str
    hidden: int
    tokens: int
    implementation: str
    microseconds: float
    limit_microseconds: float


class Results:
    """The newest row of every (scheme, hidden, tokens, implementation) in one file."""

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        kinds = {"world_size": int, "hidden": int, "tokens": int, "microseconds": float, "limit_microseconds": float}
        fields = Row.__dataclass_fields__
        with file.open(newline="") as opened:
            every = [Row(**{f: kinds.get(f, str)(row[f]) for f in fields}) for row in csv.DictReader(opened)]
        # A stable sort: of one day's rows the later line is the newer.
        newest = {(r.scheme, r.hidden, r.tokens, r.implementation): r for r in sorted(every, key=lambda r: r.date)}
        self.rows = newest
        self.schemes = list(dict.fromkeys(r.scheme for r in every))
        self.hiddens = sorted({r.hidden for r in every})
        self.tokens = sorted({r.tokens for r in every})
        found = {r.implementation for r in every}
        self.implementations = [name for name in NAMES if name in found]
        self.variants = list(dict.fromkeys(r.implementation for r in every if r.implementation.startswith(VARIANT)))

    def at(self, point: Point, implementation: str = OURS) -> Row | None:
        return self.rows.get((*point, implementation))

    def points(self) -> Iterator[Point]:
        """Where our own kernel was timed."""
        for scheme in self.schemes:
            for hidden in self.hiddens:
                for tokens in self.tokens:
                    if self.at((scheme, hidden, tokens)):
                        yield scheme, hidden, tokens

    def digest(self) -> str:
        """Changes when anything that is drawn does."""
        drawn = sorted((*key, r.microseconds, r.limit_microseconds) for key, r in self.rows.items() if key[3] in NAMES)
        return hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]

    def speedup(self, point: Point, peer: str) -> float | None:
        """The peer's time over ours."""
        ours, theirs = self.at(point), self.at(point, peer)
        return theirs.microseconds / ours.microseconds if ours and theirs else None

    def share(self, point: Point) -> float | None:
        """Of the limit's speed, ours."""
        ours = self.at(point)
        return ours.limit_microseconds / ours.microseconds if ours else None


# ---- goals ------------------------------------------------------------------------------------

#: (what, value), the value None where there is no row.
Values = Iterator[tuple[str, "float | None"]]


@dataclass(frozen=True)
class Goal:
    """A bound on values, one for each place where it was to be measured."""

    text: str
    values: Callable[[Results], Values]
    shown: Callable[[float], str]
    least: float | None = None
    most: float | None = None

    def line(self, results: Results) -> str:
        """Its row of the table of goals."""
        values = [(what, value) for what, value in self.values(results) if value is not None]
        missed = [(what, value) for what, value in values if not self.met(value)]
        if not values:
            return f"| {self.text} | not measured | |"
        told = "; ".join(f"{what}: {self.shown(value)}" for what, value in missed)
        return f"| {self.text} | {len(values) - len(missed)} of {len(values)} | {told} |"

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def percent(value: float) -> str:
    # Cut off, not rounded: 94.96 % must not be read as 95.
    return f"{int(value * 1000) / 10:.1f} %"


def times(value: float) -> str:
    return f"{value:.3g}x" if value >= 100 else f"{value:.2f}x"


def us(value: float) -> str:
    return f"{value:.2f} us"


def place(point: Point) -> str:
    return f"`{point[0]}` H {point[1]} T {point[2]}"


def each(
    value: Callable[[Results, Point], float | None], where: Callable[[Point], bool] = lambda point: True
) -> Callable[[Results], Values]:
    return lambda results: ((place(p), value(results, p)) for p in results.points() if where(p))


def against(*peers: str) -> Callable[[Results, Point], float | None]:
    """The time of the fastest of the peers over ours."""

    def value(results: Results, point: Point) -> float | None:
        found = [s for peer in peers if (s := results.speedup(point, peer)) is not None]
        return min(found, default=None)

    return value


def over_one_row(results: Results, point: Point) -> float | None:
    """The time at T over that at T = 1."""
    ours, alone = results.at(point), results.at((*point[:2], 1))
    return ours.microseconds / alone.microseconds if ours and alone else None


def own_time(results: Results, point: Point) -> float | None:
    ours = results.at(point)
    return ours.microseconds if ours else None


def over_their_bytes(results: Results) -> Values:
    """Variants at T >= 4096: the time over the plain seam's, over the same of the bytes."""
    for name in results.variants[1:]:
        for scheme, hidden, tokens, implementation in results.rows:
            point = scheme, hidden, tokens
            plain = results.at(point, results.variants[0])
            if implementation == name and tokens >= 4096 and plain:
                row = results.rows[(*point, name)]
                bytes_ = row.limit_microseconds / plain.limit_microseconds
                yield f"{place(point)} {name[len(VARIANT) : -1]}", row.microseconds / plain.microseconds / bytes_


LOCAL_PEERS = ("inductor", "unfused")
LOCAL_GOALS = (
    Goal(
        "FP8, T >= 4096: at least 95 % of the limit",
        each(Results.share, lambda p: p[2] >= 4096 and p[0] != "nvfp4"),
        percent,
        least=0.95,
    ),
    Goal(
        "NVFP4, T >= 4096: at least 90 % of the limit",
        each(Results.share, lambda p: p[2] >= 4096 and p[0] == "nvfp4"),
        percent,
        least=0.90,
    ),
    Goal(
        "T <= 128: no slower than the fastest peer",
        each(against(*LOCAL_PEERS), lambda p: p[2] <= 128),
        times,
        least=1.0,
    ),
    Goal("T = 128: at most 1.3 times the time of T = 1", each(over_one_row, lambda p: p[2] == 128), times, most=1.3),
    Goal(
        "variants, T >= 4096: within the bytes that they add (time over bytes, 2 % of noise allowed)",
        over_their_bytes,
        times,
        most=1 + NOISE,
    ),
)


def at_most(tokens: int, limits: dict[int, float]) -> tuple[Goal, ...]:
    return tuple(
        Goal(
            f"static FP8, T = {tokens}, H {hidden}: at most {limit} us",
            each(own_time, lambda p, h=hidden: p == ("fp8_static", h, tokens)),  # type: ignore[misc]
            us,
            most=limit,
        )
        for hidden, limit in limits.items()
    )


COLLECTIVE_GOALS = (
    *at_most(1, {4096: 3.2, 8192: 3.4}),
    *at_most(8, {4096: 3.5, 8192: 4.5}),
    *at_most(64, {4096: 5.0, 8192: 7.0}),
    Goal("at least 1.6 times as fast as NCCL + Inductor", each(against("nccl+inductor")), times, least=1.6),
    Goal("at least 1.25 times as fast as FlashInfer trtllm", each(against("flashinfer-trtllm")), times, least=1.25),
    Goal("no slower than `collective`", each(against("torchseam-collective")), times, least=1.0),
    Goal("T >= 1024: at least 88 % of the limit", each(Results.share, lambda p: p[2] >= 1024), percent, least=0.88),
)


# ---- the page ---------------------------------------------------------------------------------


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


def ratios(results: Results) -> list[str]:
    """The peer's time over ours at every T, and the share of the limit."""
    peers = [name for name in results.implementations if name != OURS]
    lines = []
    for scheme in results.schemes:
        for hidden in results.hiddens:
            points = [(scheme, hidden, tokens) for tokens in results.tokens]
            if not any(map(results.at, points)):
                continue
            rows: list[tuple[str, Callable[[Point], float | None], Callable[[float], str]]] = [
                ("us", lambda p: own_time(results, p), lambda v: f"{v:.2f}")
            ]
            rows += [(NAMES[peer], lambda p, peer=peer: results.speedup(p, peer), times) for peer in peers]  # type: ignore[misc]
            rows += [("of the limit", results.share, percent)]
            for what, value, shown in rows:
                values = [value(p) for p in points]
                if any(v is not None for v in values):
                    cells = ["" if v is None else shown(v) for v in values]
                    first = [f"`{scheme}`", str(hidden)] if what == "us" else ["", ""]
                    lines.append([*first, what, *cells])
    return table(["scheme", "H", "T =", *map(str, results.tokens)], lines)


def slower(results: Results) -> list[str]:
    """Each row in which a peer is faster."""
    found = []
    for point in results.points():
        for peer in results.implementations:
            ours, theirs = results.at(point), results.at(point, peer)
            if ours and theirs and theirs.microseconds < ours.microseconds:
                found.append(
                    f"- {place(point)}: {ours.microseconds:.2f} us, {NAMES[peer]} {theirs.microseconds:.2f} us "
                    f"({100 * (ours.microseconds / theirs.microseconds - 1):.1f} % slower)"
                )
    return found


def of_variants(results: Results) -> list[str]:
    """Time (bytes), each over the plain seam's."""
    if not results.variants:
        return []
    plain_name, *names = results.variants
    lines = []
    for scheme, hidden, tokens, implementation in results.rows:
        point = scheme, hidden, tokens
        plain = results.at(point, plain_name)
        if implementation != plain_name or plain is None:
            continue
        others = [results.at(point, name) for name in names]
        cells = [
            f"{r.microseconds / plain.microseconds:.2f} ({r.limit_microseconds / plain.limit_microseconds:.2f})"
            if r
            else ""
            for r in others
        ]
        lines.append([f"`{scheme}`", str(hidden), str(tokens), f"{plain.microseconds:.2f}", *cells])
    header = ["scheme", "H", "T", "plain, us", *(name[len(VARIANT) : -1] for name in names)]
    return [
        "Variants, T rows of H: the time over the plain seam's, and in brackets the bytes over the plain seam's.",
        "",
        *table(header, lines),
        "",
    ]


def provenance(results: Results) -> str:
    """What measured what, in one sentence."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for row in results.rows.values():
        key = (row.date, row.commit, row.torch, row.triton)
        if row.scheme not in runs.setdefault(key, []):
            runs[key].append(row.scheme)
    row = next(iter(results.rows.values()))
    told = "; ".join(
        f"{', '.join(f'`{s}`' for s in schemes)} at {commit} on {date} (torch {torch}, Triton {triton})"
        for (date, commit, torch, triton), schemes in sorted(runs.items())
    )
    return f"{row.world_size} x {row.gpu}: {told}."


def mixed(results: Results) -> list[str]:
    """Where a peer's row is not of the run that ours is of."""
    found = []
    for point in results.points():
        for peer in results.implementations:
            ours, theirs = results.at(point), results.at(point, peer)
            if ours and theirs and (ours.date, ours.commit) != (theirs.date, theirs.commit):
                found.append(f"{place(point)} {NAMES[peer]}")
    return [f"Not of one run, ours and the peer's: {'; '.join(found)}.", ""] if found else []


def section(results: Results) -> list[str]:
    local = all(r.world_size == 1 for r in results.rows.values())
    title, goals = ("One GPU", LOCAL_GOALS) if local else ("Between GPUs", COLLECTIVE_GOALS)
    picture = [
        "<picture>",
        f'<source media="(prefers-color-scheme: dark)" srcset="figures/{results.name}-dark.svg">',
        f'<img alt="Time against T, {title.lower()}: the tables below have the figures" '
        f'src="figures/{results.name}-light.svg">',
        "</picture>",
    ]
    worse = slower(results)
    return [
        f"## {title}: `{results.name}.csv`",
        "",
        provenance(results),
        "",
        *picture,
        "",
        "| goal | met | missed by |",
        "| --- | --- | --- |",
        *(goal.line(results) for goal in goals),
        "",
        *([f"Slower than a peer ({len(worse)} rows):", "", *worse, ""] if worse else ["Slower than a peer: none.", ""]),
        *mixed(results),
        "Our time, and how many times as long a peer takes:",
        "",
        *ratios(results),
        "",
        *of_variants(results),
    ]


def page(every: list[Results]) -> str:
    return "\n".join(line for results in every for line in section(results)).rstrip() + "\n"
