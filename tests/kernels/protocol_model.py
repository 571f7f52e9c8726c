"""The protocol of docs/protocol.md between ranks, as a model for `explorer.explore`.

A rank runs one kernel for each call. A kernel is a few programs; a program is a list of steps: push a word to
a rank, take a word that must be there, set a word back. Stores fly: a store arrives at any time after its step,
in any order, remote ones even after the kernel that sent them is complete; a kernel's stores to its own
rank have arrived when it is complete. A word is ABSENT or a `Word`: which call, whose, which row.

What must hold: every take finds exactly the word that it is for; a word arrives only where ABSENT is (or an
older tagged word that was read); nothing unread is set back; every rank gets to the end; then all is ABSENT.

`Rules` has the protocol's rules; each can be broken, and the tests want the explorer to notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from explorer import Broken

ABSENT = 0


@dataclass(frozen=True)
class Call:
    """One collective call, the same on all ranks.

    programs share the rows; with `pushers` program 0 pushes all of them and the others reduce (one-shot). tagged:
    two-shot results travel as tagged words, which are not set back.
    """

    algorithm: str
    tokens: int
    programs: int = 1
    pushers: bool = False
    tagged: bool = False

    def __str__(self) -> str:
        return f"{self.algorithm}{' tagged' if self.tagged else ''} T={self.tokens}"


@dataclass(frozen=True)
class Rules:
    """The right ones by default; after # what else a field can be.

    resident: programs of a kernel that run at once (None: all). more_tokens: rows that the last rank has more than
    the others. owner: what an owner does first. results_lie: "where rows do" is right unless they are tagged.
    """

    halves: int = 2
    clear: str = "own half"  # "other half", "before reading", "never"
    wait_for_kernel_before: bool = True
    pushes_of_a_word: int = 1
    resident: int | None = None
    empty_calls_count: bool = False
    more_tokens: int = 0
    owner: str = "takes partials"  # "pushes results", "waits for results"
    results_to: str = "all"  # "owners", "nobody"
    results_lie: str = "apart"  # "where partials do", "where rows do"

    def __str__(self) -> str:
        broken = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{name} {getattr(self, name)}" for name in broken) or "the rules"


class Word(NamedTuple):
    """What a word holds: of kind "x" (one-shot), "partial", "result" or "tagged result" (two-shot).

    summed: whether a result has all partials in it.
    """

    call: int
    source: int
    row: int
    kind: str
    summed: bool = True

    def __str__(self) -> str:
        without = "" if self.summed else " without the partials"
        return f"{self.kind} of row {self.row}{without}, call {self.call}, from rank {self.source}"


class Store(NamedTuple):
    """value: index of a word, or ABSENT. program: who stores."""

    program: int
    cell: int
    value: int


class Step(NamedTuple):
    """kind: "store" (index: of the store) or "take" (index: of the word)."""

    kind: str
    index: int
    cell: int


class State(NamedTuple):
    """at: the next step of each program. complete: kernels that each rank has behind it. flying: a bit a store."""

    at: tuple[int, ...]
    complete: tuple[int, ...]
    memory: tuple[int, ...]
    flying: int


class Ranks:
    """The model. reduce: leave out orders of moves that cannot make a difference (`_only`)."""

    def __init__(self, world: int, calls: list[Call], rules: Rules | None = None, *, reduce: bool = True) -> None:
        self.world, self.rules, self.reduce = world, rules or Rules(), reduce
        self.calls = [c for c in calls if c.tokens or self.rules.empty_calls_count]
        self.cells: dict[tuple, int] = {}
        self.words: dict[Word, int] = {}
        self.stores: list[Store] = []
        self.programs: list[tuple[int, int, list[Step]]] = []
        #: kernels[rank][call]: its programs.
        self.kernels: list[list[list[int]]] = [[[] for _ in self.calls] for _ in range(world)]
        for number, call in enumerate(self.calls):
            for rank in range(world):
                for program in range(call.programs):
                    self._write_program(number, call, rank, program)
        self.word_of = [None, *self.words]
        self.place_of = list(self.cells)
        #: Of each cell, what its rank does with it, in the order of its programs: (program, step, word or ABSENT).
        self.uses: list[list[tuple[int, int, int]]] = [[] for _ in self.cells]
        #: (cell, word): who takes it there.
        self.reader: dict[tuple[int, int], tuple[int, int]] = {}
        for program, (_, _, steps) in enumerate(self.programs):
            for at, step in enumerate(steps):
                if step.kind == "take":
                    self.uses[step.cell].append((program, at, step.index))
                    self.reader[step.cell, step.index] = (program, at)
                elif self.stores[step.index].value == ABSENT:
                    self.uses[step.cell].append((program, at, ABSENT))

    # ---- what the kernels do ----

    def _write_program(self, number: int, call: Call, rank: int, program: int) -> None:
        index = len(self.programs)
        steps: list[Step] = []
        self.programs.append((rank, number, steps))
        self.kernels[rank][number].append(index)
        half = number % self.rules.halves
        tokens = call.tokens + (self.rules.more_tokens if rank == self.world - 1 else 0)
        peers = [(rank + distance) % self.world for distance in range(1, self.world)]

        def cell(of: int, slot: int, row: int, region: str = "rows", half: int = half) -> int:
            return self.cells.setdefault((of, half, region, slot, row), len(self.cells))

        def store(where: int, value: int) -> None:
            steps.append(Step("store", len(self.stores), where))
            self.stores.append(Store(index, where, value))

        def push(to: int, word: Word, row: int, region: str) -> None:
            for _ in range(self.rules.pushes_of_a_word):
                store(cell(to, rank, row, region), self._index(word))

        def take(words: list[tuple[Word, int, str]], clear: bool = True) -> None:
            """Read all of them, then set them back."""
            takes = [Step("take", self._index(w), cell(rank, w.source, row, region)) for w, row, region in words]
            other = 1 - half if self.rules.clear == "other half" else half
            if self.rules.clear != "before reading":
                steps.extend(takes)
            if clear and self.rules.clear != "never":
                for word, row, region in words:
                    store(cell(rank, word.source, row, region, other), ABSENT)
            if self.rules.clear == "before reading":
                steps.extend(takes)

        if call.algorithm == "one-shot":
            workers = call.programs - call.pushers
            mine = [r for r in range(tokens) if r % workers == program - call.pushers]
            for row in (range(tokens) if program == 0 else []) if call.pushers else mine:
                for peer in peers:
                    push(peer, Word(number, rank, row, "x"), row, "rows")
            for row in mine:
                take([(Word(number, source, row, "x"), row, "rows") for source in sorted(peers)])
            return

        def result_of(row: int, summed: bool = True) -> tuple[Word, int, str]:
            owner = row % self.world
            word = Word(number, owner, row, "tagged result" if call.tagged else "result", summed)
            if self.rules.results_lie == "where partials do":
                return word, row // self.world, "rows"
            region = "tagged" if call.tagged and self.rules.results_lie == "apart" else "rows"
            return word, row, region

        def partial_of(row: int, source: int) -> tuple[Word, int, str]:
            place = row // self.world if self.rules.results_lie == "where partials do" else row
            return Word(number, source, row, "partial"), place, "rows"

        mine = [r for r in range(tokens) if r % call.programs == program]
        owned = [r for r in mine if r % self.world == rank]
        for row in mine:
            if row % self.world != rank:
                push(row % self.world, *partial_of(row, rank))

        def receives(of: int) -> bool:
            return self.rules.results_to == "all" or (self.rules.results_to == "owners" and of < call.tokens)

        def reduce() -> None:
            early = self.rules.owner == "pushes results"
            for row in owned:
                partials = [partial_of(row, source) for source in sorted(peers)]
                if not early:
                    take(partials)
                for peer in filter(receives, peers):
                    push(peer, *result_of(row, summed=not early))
                if early:
                    take(partials)

        waits_first = self.rules.owner == "waits for results"
        if not waits_first:
            reduce()
        for row in mine:
            if row % self.world != rank and receives(rank):
                take([result_of(row)], clear=not call.tagged)
        if waits_first:
            reduce()

    def _index(self, word: Word) -> int:
        return self.words.setdefault(word, len(self.words) + 1)

    # ---- what can happen ----

    def initial(self) -> State:
        return State((0,) * len(self.programs), (0,) * self.world, (ABSENT,) * len(self.cells), 0)

    def moves(self, state: State) -> Iterator[tuple[tuple, State | Broken]]:
        if self.reduce and (only := self._only(state)) is not None:
            yield only
            return
        for program in self._running(state):
            move = self._step(state, program)
            if move is not None:
                yield move
        for store in self._flying(state):
            if not self.reduce or not self._may_wait(state, store):
                yield self._arrive(state, store)
        for rank, complete in enumerate(state.complete):
            if complete < len(self.calls) and all(map(self._ended(state), self.kernels[rank][complete])):
                yield self._complete(state, rank)

    def _ended(self, state: State):
        return lambda program: state.at[program] == len(self.programs[program][2])

    def _running(self, state: State) -> Iterator[int]:
        """Programs that have a step to make."""
        ahead = 1 if self.rules.wait_for_kernel_before else 2
        ended = self._ended(state)
        for rank, complete in enumerate(state.complete):
            for kernel in self.kernels[rank][complete : complete + ahead]:
                begun = [p for p in kernel if state.at[p] and not ended(p)]
                room = self.rules.resident is None or len(begun) < self.rules.resident
                yield from (p for p in kernel if not ended(p) and (room or p in begun))

    def _flying(self, state: State) -> Iterator[int]:
        rest = state.flying
        while rest:
            yield (rest & -rest).bit_length() - 1
            rest &= rest - 1

    def _step(self, state: State, program: int) -> tuple[tuple, State | Broken] | None:
        """The program's next step, None while it waits."""
        step = self.programs[program][2][state.at[program]]
        move = ("step", program, step)
        flying = state.flying
        if step.kind == "store":
            flying |= 1 << step.index
        else:
            there = state.memory[step.cell]
            tagged = self.word_of[step.index].kind.startswith("tagged")
            if there == ABSENT or (tagged and there != step.index):
                return None
            if there != step.index:
                return move, Broken(f"it finds the {self.word_of[there]}")
        return move, state._replace(at=_with(state.at, program, state.at[program] + 1), flying=flying)

    def _arrive(self, state: State, index: int) -> tuple[tuple, State | Broken]:
        store = self.stores[index]
        there = state.memory[store.cell]
        move = ("arrive", index)
        if store.value == ABSENT:
            if there != ABSENT and not self._was_read(state, store.cell):
                return move, Broken(f"nobody has read the {self.word_of[there]} there")
        elif there not in (ABSENT, store.value):  # a second copy on top of the first does no harm yet
            both_tagged = all(self.word_of[w].kind.startswith("tagged") for w in (there, store.value))
            if not (both_tagged and self._was_read(state, store.cell)):
                return move, Broken(f"not ABSENT: there is the {self.word_of[there]}")
        memory = _with(state.memory, store.cell, store.value)
        return move, state._replace(memory=memory, flying=state.flying & ~(1 << index))

    def _was_read(self, state: State, cell: int) -> bool:
        reader = self.reader.get((cell, state.memory[cell]))
        return reader is not None and state.at[reader[0]] > reader[1]

    def _complete(self, state: State, rank: int) -> tuple[tuple, State | Broken]:
        """What the kernel has stored on its own rank has arrived."""
        mine = self.kernels[rank][state.complete[rank]]
        for store in list(self._flying(state)):
            if self.stores[store].value == ABSENT and self.stores[store].program in mine:
                move, after = self._arrive(state, store)
                if isinstance(after, Broken):
                    return move, after
                state = after
        complete = _with(state.complete, rank, state.complete[rank] + 1)
        return ("complete", rank, complete[rank] - 1), state._replace(complete=complete)

    # ---- what need not be told apart ----

    def _only(self, state: State) -> tuple[tuple, State | Broken] | None:
        """A move that can be made first: whatever else happens before it could as well happen after it.

        Storing only makes a store fly, and no property depends on when. A take of a word that is there, with
        nothing flying to its cell, changes nothing that others see. A word that flies to an ABSENT cell may
        arrive at once when the cell's rank does nothing with the cell before it takes that very word:
        another word that could come first would find this one, or its clear under way, and be a mistake in any case.
        """
        for program in self._running(state):
            if self.rules.resident is not None and not state.at[program]:
                continue  # which program gets the room is a choice
            step = self.programs[program][2][state.at[program]]
            if step.kind == "store" or not self._flies_to(state, step.cell):
                move = self._step(state, program)
                if move is not None:
                    return move
        for store in self._flying(state):
            cell, value = self.stores[store].cell, self.stores[store].value
            if value == ABSENT or self._flies_to(state, cell, but=store):
                continue
            if state.memory[cell] == ABSENT or self._was_read(state, cell):
                following = next(((p, at, w) for p, at, w in self.uses[cell] if state.at[p] <= at), None)
                if following is not None and following[2] == value:
                    return self._arrive(state, store)
        return None

    def _may_wait(self, state: State, index: int) -> bool:
        """Whether a clear need not arrive before its kernel is complete: nobody would notice that it has."""
        store = self.stores[index]
        there = state.memory[store.cell]
        return (
            store.value == ABSENT
            and there != ABSENT
            and self._was_read(state, store.cell)
            and not self._flies_to(state, store.cell, but=index)
        )

    def _flies_to(self, state: State, cell: int, but: int = -1) -> bool:
        return any(s != but and self.stores[s].cell == cell for s in self._flying(state))

    # ---- for people ----

    def verdict(self, state: State) -> str | None:
        waiting = [
            f"rank {self.programs[p][0]} waits for ever for the {self.word_of[self.programs[p][2][state.at[p]].index]}"
            for p in self._running(state)
        ]
        if waiting or min(state.complete) < len(self.calls):
            return "; ".join(waiting) or "a program never gets to run"
        left = [str(self.word_of[w]) for w in state.memory if w and not self.word_of[w].kind.startswith("tagged")]
        return f"left in a buffer: the {left[0]}" if left else None

    def describe(self, move: tuple) -> str:
        kind, index, *rest = move
        if kind == "complete":
            return f"rank {index}: kernel {rest[0]} is complete"
        if kind == "arrive":
            store = self.stores[index]
            rank, half, region, slot, row = self.place_of[store.cell]
            place = f"half {half} of rank {rank} ({region}, slot of rank {slot}, row {row})"
            what = f"the {self.word_of[store.value]}" if store.value else "ABSENT"
            return f"{place}: {what} arrives"
        rank, call, _ = self.programs[index]
        step = rest[0]
        who = f"rank {rank}, kernel {call}"
        if step.kind == "take":
            return f"{who} takes the {self.word_of[step.index]}"
        to, half, _, slot, row = self.place_of[step.cell]
        value = self.stores[step.index].value
        if value == ABSENT:
            return f"{who} sets back half {half}, slot of rank {slot}, row {row}"
        return f"{who} pushes the {self.word_of[value]} to half {half} of rank {to}"


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
