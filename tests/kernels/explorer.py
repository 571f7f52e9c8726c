"""An explicit-state explorer: every state that a model can reach, breadth first, so a counterexample is a shortest one.

A model is what `Model` says; protocol_model.py and protocol_programs.py are two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

#: A model that grows beyond this is no longer what its test says it is.
MOST_STATES = 2_000_000


class Broken(str):
    """In the place of a state: what a move has broken."""


class Model(Protocol):
    """States are hashable and equal when they are the same state."""

    def initial(self) -> Hashable:
        """Where everything begins."""

    def moves(self, state: Any) -> Iterable[tuple[Any, Hashable]]:
        """(move, the state after it, or a `Broken`) of everything that can happen next."""

    def verdict(self, state: Any) -> str | None:
        """Of a state in which nothing can happen: what is wrong with it, or None."""

    def describe(self, move: Any) -> str:
        """A line for people."""


@dataclass(frozen=True)
class Exploration:
    """What was found.

    states: how many were reached. ends: in how many of them nothing can happen any more. mistake: what is wrong,
    None when nothing is; trace: the moves that lead there.
    """

    states: int
    moves: int
    ends: int
    mistake: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.mistake is None:
            return f"{self.states} states, {self.moves} moves: nothing wrong"
        lines = [f"{number:4}. {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([f"after {self.states} states:", *lines, f"      WRONG: {self.mistake}"])


def explore(model: Model, most_states: int = MOST_STATES) -> Exploration:
    """Until a mistake is found or every state is known."""
    first = model.initial()
    came_from: dict[Hashable, tuple[Hashable, Any] | None] = {first: None}
    waiting = deque([first])
    count = ends = 0

    def found(state: Hashable, mistake: str, last: Any = None) -> Exploration:
        trace = [] if last is None else [model.describe(last)]
        while (step := came_from[state]) is not None:
            state, move = step
            trace.append(model.describe(move))
        return Exploration(len(came_from), count, ends, mistake, trace[::-1])

    while waiting:
        state = waiting.popleft()
        stuck = True
        for move, after in model.moves(state):
            stuck = False
            count += 1
            if isinstance(after, Broken):
                return found(state, after, move)
            if after not in came_from:
                came_from[after] = (state, move)
                waiting.append(after)
        if stuck:
            ends += 1
            if (mistake := model.verdict(state)) is not None:
                return found(state, mistake)
        if len(came_from) > most_states:
            raise RuntimeError(f"more than {most_states} states: make the model smaller")
    return Exploration(len(came_from), count, ends)
