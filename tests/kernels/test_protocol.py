"""docs/protocol.md, explored: with its rules nothing goes wrong in any order; without any one of them something does.

`pytest -s` prints how many states were explored, and the shortest way into each mistake.
"""

from __future__ import annotations

import itertools

import pytest
from explorer import explore
from protocol_model import Call, Ranks, Rules
from protocol_programs import Counter, Exchange

ONE, ONE_TWO_ROWS = Call("one-shot", 1), Call("one-shot", 2)
PUSHERS = Call("one-shot", 2, programs=3, pushers=True)
PROGRAMS = Call("one-shot", 2, programs=2)
#: Two-shot: fewer rows than ranks (of three), as many, more.
TWO, TWO_TWO_ROWS, TWO_THREE_ROWS = Call("two-shot", 1), Call("two-shot", 2), Call("two-shot", 3)
TWO_PROGRAMS = Call("two-shot", 3, programs=2)
TAGGED = Call("two-shot", 2, tagged=True)
EMPTY = Call("one-shot", 0)

EVERY_KIND = (ONE, ONE_TWO_ROWS, PUSHERS, TWO, TWO_TWO_ROWS, TWO_THREE_ROWS, TAGGED, EMPTY)


def names(calls: tuple[Call, ...]) -> str:
    return ", ".join(map(str, calls))


@pytest.mark.parametrize(("world", "length"), [(2, 4), (3, 4)])
def test_every_sequence_of_calls_is_right_in_every_order_of_events(world, length):
    """Each half is used twice; orders that cannot differ are left out (and the next tests look whether they can)."""
    kinds, states = EVERY_KIND[: 8 if world == 2 else 7], 0
    for calls in itertools.product(kinds, repeat=length):
        explored = explore(Ranks(world, calls))
        assert explored.mistake is None, f"{names(calls)}\n{explored}"
        states += explored.states
    print(f"\n{len(kinds)} kinds of call in all sequences of {length}, {world} ranks: {states} states")


@pytest.mark.parametrize(
    ("world", "calls"),
    [
        (2, (ONE, ONE, ONE, ONE)),
        (2, (ONE_TWO_ROWS,) * 5),
        (2, (ONE_TWO_ROWS, TWO_TWO_ROWS, ONE, TWO)),
        (2, (TWO_THREE_ROWS, ONE_TWO_ROWS, TAGGED, TWO_THREE_ROWS)),
        (2, (PUSHERS, PROGRAMS, TWO_PROGRAMS, PUSHERS)),
        (3, (ONE, ONE, ONE)),
        (3, (TWO, TWO, TWO, TWO)),
        (3, (ONE, TWO, ONE, TWO)),
        (3, (TWO_TWO_ROWS, ONE, TWO)),
        (3, (ONE, TAGGED, ONE)),
        (3, (TWO_TWO_ROWS, TWO, TWO_TWO_ROWS)),
        (3, (TWO_TWO_ROWS, TAGGED, TWO_TWO_ROWS, TAGGED)),
    ],
    ids=lambda value: names(value) if isinstance(value, tuple) else f"{value} ranks",
)
def test_no_order_of_events_is_wrong_with_nothing_left_out(world, calls):
    explored = explore(Ranks(world, calls, reduce=False))
    print(f"\n{world} ranks, {names(calls)}: {explored}")
    assert explored.mistake is None, str(explored)
    assert explored.ends == 1, "in the end all ranks are finished and every word is ABSENT"


#: What is broken -> ranks, calls, the rules, and what the explorer must say.
MISTAKES = {
    "a word is never set back": (2, (ONE,) * 3, Rules(clear="never"), "it finds the x of row 0, call 0"),
    "words are set back in the wrong half": (2, (ONE,) * 3, Rules(clear="other half"), "nobody has read"),
    "words are set back in the wrong half, two-shot": (3, (TWO,) * 3, Rules(clear="other half"), "nobody has read"),
    "a word is set back too early": (2, (ONE,) * 3, Rules(clear="before reading"), "nobody has read"),
    "there is only one half": (2, (ONE,) * 2, Rules(halves=1), "not ABSENT"),
    "there is only one half, two-shot": (3, (TWO,) * 2, Rules(halves=1), "not ABSENT"),
    "a kernel pushes before the one before it is complete": (
        2,
        (ONE,) * 3,
        Rules(wait_for_kernel_before=False),
        "not ABSENT",
    ),
    "a kernel pushes before the one before it is complete, two-shot": (
        3,
        (TWO,) * 3,
        Rules(wait_for_kernel_before=False),
        "not ABSENT",
    ),
    "two threads push the same word": (2, (ONE,) * 3, Rules(pushes_of_a_word=2), "not ABSENT"),
    "not all programs run at once": (2, (PROGRAMS,), Rules(resident=1), "waits for ever"),
    "a call without rows counts": (2, (ONE, EMPTY, ONE), Rules(empty_calls_count=True), "not ABSENT"),
    "the ranks disagree about T": (2, (ONE,), Rules(more_tokens=1), "waits for ever"),
    "an owner pushes results before it has the partials": (
        2,
        (TWO_TWO_ROWS,),
        Rules(owner="pushes results"),
        "without the partials",
    ),
    "an owner waits for results before it pushes its own": (
        2,
        (TWO_TWO_ROWS,),
        Rules(owner="waits for results"),
        "waits for ever",
    ),
    "a rank that owns nothing receives nothing": (3, (TWO,) * 3, Rules(results_to="owners"), "not ABSENT"),
    "no results with fewer rows than ranks": (3, (TWO_TWO_ROWS,) * 3, Rules(results_to="nobody"), "not ABSENT"),
    "results arrive where partials do": (2, (TWO_TWO_ROWS,), Rules(results_lie="where partials do"), "partial of row"),
    "tagged words stay where rows will be": (
        2,
        (TAGGED, ONE, ONE_TWO_ROWS),
        Rules(results_lie="where rows do"),
        "not ABSENT: there is the tagged",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_protocol_is_found(mistake):
    world, calls, rules, expected = MISTAKES[mistake]
    explored = explore(Ranks(world, calls, rules, reduce=False))
    print(f"\n{mistake}: {world} ranks, {names(calls)}\n{explored}")
    assert explored.mistake is not None
    assert expected in explored.mistake
    assert explore(Ranks(world, calls)).mistake is None, "the calls are right, so it was the rule"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_with_orders_left_out(mistake):
    world, calls, rules, _ = MISTAKES[mistake]
    assert explore(Ranks(world, calls, rules)).mistake is not None


@pytest.mark.parametrize("rules", dict.fromkeys(rules for _, _, rules, _ in MISTAKES.values()), ids=str)
def test_leaving_orders_out_changes_no_verdict(rules):
    """Under a broken rule some sequences of calls are wrong and some happen to be right."""
    # Twice the words are millions of states: fewer rows then.
    kinds = (ONE, PROGRAMS, TAGGED) if rules.pushes_of_a_word == 1 else (ONE, TWO)
    for calls in itertools.product(kinds, repeat=3):
        kept, all_kept = (explore(Ranks(2, calls, rules, reduce=reduce)) for reduce in (True, False))
        assert (kept.mistake is None) == (all_kept.mistake is None), f"{names(calls)}\n{kept}\n{all_kept}"


@pytest.mark.parametrize("calls", [(TWO_TWO_ROWS,) * 4, (TWO_TWO_ROWS, ONE, TWO_TWO_ROWS, ONE)], ids=names)
def test_results_may_stay_with_their_owners_when_every_rank_owns_a_row(calls):
    assert explore(Ranks(2, calls, Rules(results_to="nobody"), reduce=False)).mistake is None


# ---- programs of one GPU ------------------------------------------------------------------------


@pytest.mark.parametrize("programs", [(2, 3, 2), (3, 3, 3, 1), (1, 3, 2, 3)])
def test_all_programs_of_a_call_read_its_number_however_late_they_start(programs):
    explored = explore(Counter(programs))
    print(f"\ncalls of {programs} programs: {explored}")
    assert explored.mistake is None, str(explored)
    assert explored.ends == 1


@pytest.mark.parametrize(
    "wrong",
    [
        Counter((2, 3), barrier=False),
        Counter((2, 3), wait=False),
        Counter((2, 3), share_out=False),
        Counter((3, 6), unit=4),
    ],
    ids=[
        "a program counts itself before its threads have read",
        "a program reads before the kernel before is complete",
        "a call counts for as many as it has programs",
        "there are more programs than a unit has shares",
    ],
)
def test_a_mistake_in_counting_is_found(wrong):
    explored = explore(wrong)
    print(f"\n{wrong}\n{explored}")
    assert explored.mistake is not None


@pytest.mark.parametrize(
    "exchange",
    [Exchange(together=4), Exchange(together=2, tag_each_half=True)],
    ids=["16 bytes at once", "8 bytes at once, each with the number's lower half"],
)
def test_the_parts_of_a_row_receive_each_others_values_of_this_call(exchange):
    explored = explore(exchange)
    print(f"\n{exchange}: {explored}")
    assert explored.mistake is None, str(explored)
    assert explored.ends == 1


@pytest.mark.parametrize(
    "wrong",
    [Exchange(together=2), Exchange(together=1, tag_each_half=True), Exchange(empty=0)],
    ids=[
        "8 bytes at once, and the second tag is the number's upper half",
        "a tag may arrive before its word",
        "empty slots hold the first call's tag",
    ],
)
def test_a_mistake_in_the_exchange_is_found(wrong):
    explored = explore(wrong)
    print(f"\n{wrong}\n{explored}")
    assert explored.mistake is not None
