"""Which choice is kept: by an injected clock, with the real candidates and the real rule."""

from __future__ import annotations

import itertools

import pytest

from torchseam.kernels.launch import Launch, OneShot, choose_one_shot
from torchseam.kernels.tuned import LOCAL, ONE_SHOT, Choice, Shape, is_legal
from torchseam.seam import SCHEMES
from torchseam.tuning.candidates import candidates, shipped
from torchseam.tuning.search import pick, search

MANY = 132
SHAPE = Shape(LOCAL, 1, "fp8_static", "bfloat16", 4096, 16)
SHIPPED = Launch(8)


class Clock:
    """A bench whose calls take what they are told to, in turn; the last for ever."""

    def __init__(self, times: dict[Choice, list[float]], wrong: tuple[Choice, ...] = ()) -> None:
        self.times = {choice: list(us) for choice, us in times.items()}
        self.wrong = wrong
        self.log: list[object] = []

    def candidates(self, shape: Shape) -> list[Choice]:
        return candidates(shape, MANY)

    def prepare(self, shape: Shape) -> None:
        self.log.append(shape)

    def same_bits(self, choice: Choice, shipped: Choice) -> bool:
        return choice not in self.wrong

    def microseconds(self, choice: Choice) -> float:
        self.log.append(choice)
        us = self.times[choice]
        return us.pop(0) if len(us) > 1 else us[0]


def found(times: dict[int, list[float]], wrong: tuple[Choice, ...] = ()):
    ticks: list[object] = []
    clock = Clock({Launch(warps): us for warps, us in times.items()}, wrong)
    (timed,) = search([SHAPE], clock, ticks.append)
    assert len(ticks) == 4
    return timed, clock


@pytest.mark.parametrize(
    ("other", "kept"), [(9.69, False), (9.71, True), (9.7, True), (10.0, True), (12.0, True), (1.0, False)]
)
def test_the_shipped_choice_is_kept_unless_another_is_more_than_3_percent_faster(other, kept):
    assert pick({SHIPPED: 10.0, Launch(16): other}, SHIPPED) == (SHIPPED if kept else Launch(16))


def test_a_choice_with_other_bits_never_counts():
    assert pick({SHIPPED: 10.0, Launch(16): None, Launch(4): 5.0}, SHIPPED) == Launch(4)
    timed, clock = found({4: [9.0], 8: [10.0], 16: [1.0], 32: [11.0]}, wrong=(Launch(16),))
    assert timed.row.launch == Launch(4)
    assert dict(timed.times)[Launch(16)] is None and Launch(16) not in clock.log, "it is not even timed"


def test_the_fastest_is_taken_when_it_wins_twice():
    timed, clock = found({4: [9.0], 8: [10.0, 10.2], 16: [8.0, 8.4], 32: [11.0]})
    assert (timed.row.launch, timed.row.microseconds, timed.row.shipped_microseconds) == (Launch(16), 8.4, 10.2)
    assert timed.chosen == Launch(16) and timed.shipped == SHIPPED
    assert clock.log[-2:] == [Launch(16), SHIPPED], "the second time in the other order"
    assert dict(timed.times) == {SHIPPED: 10.2, Launch(4): 9.0, Launch(16): 8.4, Launch(32): 11.0}


def test_a_winner_that_does_not_win_again_was_noise():
    timed, _ = found({4: [9.9], 8: [10.0, 8.1], 16: [8.0, 8.0], 32: [11.0]})
    assert timed.row.launch is None and timed.chosen == SHIPPED
    assert (timed.row.microseconds, timed.row.shipped_microseconds) == (10.0, 10.0)


def test_what_is_shipped_is_timed_first_and_once_where_nothing_is_faster():
    timed, clock = found({4: [10.1], 8: [10.0], 16: [10.2], 32: [11.0]})
    assert clock.log == [SHAPE, SHIPPED, Launch(4), Launch(16), Launch(32)]
    assert timed.row.launch is None


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hidden", [1024, 4096, 5120, 7168, 8192, 32768])
def test_candidates_are_legal_and_begin_with_what_is_shipped(scheme, hidden):
    for kernel, dtype, tokens in itertools.product(
        (LOCAL, ONE_SHOT), ("bfloat16", "float32"), (1, 16, MANY, MANY + 1, 4096)
    ):
        shape = Shape(kernel, 2 if kernel == ONE_SHOT else 1, scheme, dtype, hidden, tokens)
        choices = candidates(shape, MANY)
        assert choices[0] == shipped(shape, MANY) and len(set(choices)) == len(choices) > 1
        unit = shape.quant.multiple_of
        assert all(is_legal(c, tokens, hidden, shape.itemsize, unit, MANY) for c in choices)


def test_candidates_of_one_shot_are_those_around_the_measured_optimum():
    def of(tokens: int) -> list[Choice]:
        return candidates(Shape(ONE_SHOT, 2, "fp8_static", "bfloat16", 8192, tokens), MANY)

    parts = {c.parts for c in of(8) if isinstance(c, OneShot)}
    assert parts == {1, 2, 4, 8, 16}
    assert {c.parts for c in of(64) if isinstance(c, OneShot)} == {1, 2}
    pushers = {c.pushers for c in of(1024) if isinstance(c, OneShot)}
    assert pushers == {0, 4, 8, 12, 16, 24}
    assert not any(c.pushers for c in of(MANY) if isinstance(c, OneShot))
    assert choose_one_shot(1024, 8192, 2, None, MANY) in of(1024)
