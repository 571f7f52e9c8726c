"""The search: time every candidate of every shape, and keep what is shipped unless another is clearly faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torchseam.kernels.tuned import Choice, Row, Shape

_log = logging.getLogger(__name__)

#: Another choice must take less than this part of the shipped one's time, in two timings: medians of the same kernel
#: differ by 1 to 3 % from one graph to the next.
MARGIN = 0.97


class CannotLaunch(Exception):
    """A choice that does not compile, or asks for more than the GPU has. Of several ranks, all raise it."""


class Bench(Protocol):
    """What can time the shapes. Of several ranks, all search together, and each gets the same answers.

    `same_bits` and `microseconds` raise `CannotLaunch`.
    """

    def candidates(self, shape: Shape) -> list[Choice]:
        """The shipped choice first."""

    def prepare(self, shape: Shape) -> None:
        """Make the operands of a shape, instead of those before. Raises ValueError for what no kernel takes."""

    def same_bits(self, choice: Choice, shipped: Choice) -> bool:
        """Whether both give the same results to the bit."""

    def microseconds(self, choice: Choice) -> float:
        """The time of a call."""


@dataclass(frozen=True)
class Timed:
    """What one shape came to. times: us of each candidate, None where its results had other bits or it is one of
    `failed`: those that cannot be launched here."""

    shape: Shape
    times: tuple[tuple[Choice, float | None], ...]
    shipped: Choice
    row: Row
    failed: tuple[Choice, ...] = ()

    @property
    def chosen(self) -> Choice:
        return self.row.launch or self.shipped


def pick(times: Mapping[Choice, float | None], shipped: Choice) -> Choice:
    """The fastest, if it is faster than the shipped one by more than the margin, else the shipped one."""
    known = {choice: us for choice, us in times.items() if us is not None}
    fastest = min(known, key=known.__getitem__)
    return fastest if known[fastest] < MARGIN * known[shipped] else shipped


def search(
    shapes: Iterable[Shape],
    bench: Bench,
    tick: Callable[[object], None],
    keep: Callable[[Timed], object] = lambda timed: None,
) -> list[Timed]:
    """Every shape timed; `tick` is called after each candidate, `keep` after each shape.

    Raises ValueError for a shape whose shipped launch cannot be launched.
    """
    found = []
    for shape in shapes:
        bench.prepare(shape)
        timed = _timed(shape, bench, tick)
        keep(timed)
        found.append(timed)
    return found


def _timed(shape: Shape, bench: Bench, tick: Callable[[object], None]) -> Timed:
    choices = bench.candidates(shape)
    shipped = choices[0]
    times: dict[Choice, float | None] = {}
    failed = []
    for choice in choices:
        try:
            right = choice == shipped or bench.same_bits(choice, shipped)
            times[choice] = bench.microseconds(choice) if right else None
        except CannotLaunch as error:
            if choice == shipped:
                raise ValueError(
                    f"the shipped {shipped} cannot be launched for {shape}: {error}; leave that out (--hidden, "
                    "--scheme, --tokens), and please report it"
                ) from error
            _log.info("%s cannot be launched for %s: %s", choice, shape, error)
            times[choice] = None
            failed.append(choice)
        tick(choice)
    chosen = pick(times, shipped)
    if chosen != shipped:
        # The first to be timed may have met a colder GPU: both again, the other one first.
        again: dict[Choice, float | None] = {c: bench.microseconds(c) for c in (chosen, shipped)}
        chosen = pick(again, shipped)
        if chosen != shipped:
            times.update(again)
    us = {choice: time for choice, time in times.items() if time is not None}
    row = Row(shape, None if chosen == shipped else chosen, round(us[chosen], 3), round(us[shipped], 3))
    return Timed(shape, tuple(times.items()), shipped, row, tuple(failed))
