"""Progress on standard error, for rank 0 and for the parent: a spinner with the time, or a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from torchseam.cli.launch import terminal


class Steps:
    """Shows long steps one after another; silent when `enabled` is False (ranks other than 0)."""

    def __init__(self, enabled: bool = True) -> None:
        self.console = Console(file=terminal())
        self.enabled = enabled

    @contextmanager
    def __call__(self, text: str) -> Iterator[None]:
        """A step of unknown length: a spinner while it runs, a line with its time when it is done."""
        with self.bar(text, None):
            yield

    @contextmanager
    def bar(self, text: str, total: int | None) -> Iterator[Callable[[object], None]]:
        """A step of `total` equal parts; yields what to call after each."""
        if not self.enabled:
            yield lambda _: None
            return
        columns = [SpinnerColumn(finished_text="✓"), TextColumn("{task.description}")]
        if total is not None:
            columns += [BarColumn(bar_width=24), MofNCompleteColumn()]
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as progress:
            task = progress.add_task(text, total=total)
            yield lambda _: progress.advance(task)
            progress.update(task, total=total or 1, completed=total or 1)

    def cut_short(self) -> None:
        """After a rank was stopped while it drew: give the cursor back, on a new line."""
        if self.console.is_terminal:
            self.console.show_cursor(True)
            self.console.line()
