"""What the programs of one GPU do between them in docs/protocol.md, as models for `explorer.explore`.

`Counter`: how the programs of a call know its number. `Exchange`: how the parts of a row pass values to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from explorer import Broken


class Counting(NamedTuple):
    """read: of each program of each call, a bit for each thread that has. counted: a bit for each program."""

    counter: int
    read: tuple[int, ...]
    counted: int
    complete: int


@dataclass(frozen=True)
class Counter:
    """Kernels of so many programs follow each other; every thread reads the number, one of each program counts it.

    barrier: a program counts itself after all its threads have read. wait: no program reads before the kernel
    before is complete. share_out: a call adds one unit, whatever its programs; else each program adds 1 and a call
    is as many as it has programs.
    """

    programs: tuple[int, ...]
    unit: int = 8
    threads: int = 2
    barrier: bool = True
    wait: bool = True
    share_out: bool = True

    def initial(self) -> Counting:
        return Counting(0, (0,) * sum(self.programs), 0, 0)

    def _of(self, call: int) -> range:
        first = sum(self.programs[:call])
        return range(first, first + self.programs[call])

    def moves(self, state: Counting) -> Iterator[tuple[tuple, Counting | Broken]]:
        every = (1 << self.threads) - 1
        for call in range(state.complete, min(state.complete + 2 - self.wait, len(self.programs))):
            programs = self._of(call)
            number = state.counter // (self.unit if self.share_out else len(programs))
            for program in programs:
                seen, counted = state.read[program], state.counted >> program & 1
                for thread in range(self.threads):
                    if not seen >> thread & 1:
                        move = ("reads", call, program, thread, number)
                        if number != call:
                            yield move, Broken(f"the call is {call}")
                        read = _with(state.read, program, seen | 1 << thread)
                        yield move, state._replace(read=read)
                if not counted and seen == (every if self.barrier else seen | 1):
                    share = self.unit - len(programs) + 1 if self.share_out and program == programs[0] else 1
                    after = state._replace(counter=state.counter + share, counted=state.counted | 1 << program)
                    yield ("counts", call, program, share, after.counter), after
            if call == state.complete and all(state.read[p] == every and state.counted >> p & 1 for p in programs):
                yield ("complete", call, 0, 0, 0), state._replace(complete=call + 1)

    def verdict(self, state: Counting) -> str | None:
        if state.complete < len(self.programs):
            return "a program waits for ever"
        expected = self.unit * len(self.programs) if self.share_out else sum(self.programs)
        return None if state.counter == expected else f"the counter is {state.counter}, not {expected}"

    def describe(self, move: tuple) -> str:
        kind, call, program, extra, value = move
        if kind == "complete":
            return f"kernel {call} is complete"
        who = f"kernel {call}, program {program - self._of(call)[0]}"
        if kind == "reads":
            return f"{who}, thread {extra}: reads that the call is {value}"
        return f"{who}: adds {extra}: the counter is {value}"


class Exchanging(NamedTuple):
    """slots: four words of each part. flying: (part, first word) of what is under way. parts: (what of the
    four words was read, how many slots are done), None before it has stored."""

    call: int
    slots: tuple[tuple[int, ...], ...]
    flying: frozenset[tuple[int, int]]
    parts: tuple[tuple[tuple[int | None, ...], int] | None, ...]


NOTHING_READ = (None, None, None, None)


@dataclass(frozen=True)
class Exchange:
    """Two parts pass each other a value, low word and high word, in each of some calls, by way of tagged packets.

    together: how many words of a packet are stored, and read, as one; groups come in any order. tag_each_half: both
    tags are the call's number; else the second is the number's upper half, 0 in all these calls. empty: words
    of a slot before the first call.
    """

    calls: int = 3
    together: int = 4
    tag_each_half: bool = False
    empty: int = -1

    def _packet(self, call: int) -> tuple[int, ...]:
        value = 100 + call
        return (value, call, value, call if self.tag_each_half else 0)

    def initial(self) -> Exchanging:
        return Exchanging(0, ((self.empty,) * 4,) * 2, frozenset(), (None, None))

    def moves(self, state: Exchanging) -> Iterator[tuple[tuple, Exchanging | Broken]]:
        if state.call == self.calls:
            return
        packet = self._packet(state.call)
        groups = range(0, 4, self.together)
        for part, first in state.flying:
            words = list(state.slots[part])
            words[first : first + self.together] = packet[first : first + self.together]
            slots = _with(state.slots, part, tuple(words))
            yield ("arrive", part, first), state._replace(slots=slots, flying=state.flying - {(part, first)})
        for part, doing in enumerate(state.parts):
            if doing is None:
                flying = state.flying | {(part, first) for first in groups}
                yield (
                    ("store", part, 0),
                    state._replace(flying=flying, parts=_with(state.parts, part, (NOTHING_READ, 0))),
                )
                continue
            words, done = doing
            if done == len(state.parts):
                continue
            for first in groups:
                if words[first] is None:
                    read = list(words)
                    read[first : first + self.together] = state.slots[done][first : first + self.together]
                    yield ("read", part, done, first), self._read(state, part, tuple(read), done)
        if not state.flying and all(p is not None and p[1] == len(state.parts) for p in state.parts):
            yield ("complete", state.call, 0), state._replace(call=state.call + 1, parts=(None, None))

    def _read(self, state: Exchanging, part: int, words: tuple[int | None, ...], slot: int) -> Exchanging | Broken:
        packet = self._packet(state.call)
        if None not in words:
            if (words[1], words[3]) == (packet[1], packet[3]):
                if words != packet:
                    return Broken(f"in call {state.call} part {part} takes {words} for part {slot}'s {packet}")
                slot += 1
            words = NOTHING_READ
        return state._replace(parts=_with(state.parts, part, (words, slot)))

    def verdict(self, state: Exchanging) -> str | None:
        return None if state.call == self.calls else "a part waits for ever"

    def describe(self, move: tuple) -> str:
        kind, which, *rest = move
        if kind == "complete":
            return f"kernel {which} is complete"
        if kind == "store":
            return f"part {which} stores its packet"
        if kind == "arrive":
            return f"words {rest[0]} to {rest[0] + self.together - 1} of part {which}'s packet arrive"
        return f"part {which} reads words {rest[1]} to {rest[1] + self.together - 1} of part {rest[0]}'s packet"


def _with(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])
