"""Passes that the user has set in Inductor's config: they run before ours, and are part of what a cache keys on."""

from __future__ import annotations

from typing import Any


def as_passes(given: Any) -> tuple[Any, ...]:
    """A custom pass of Inductor's config (None, one, or several) as a tuple."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def identities(passes: tuple[Any, ...]) -> list[str] | None:
    """What identifies each pass to a cache; None when one of them has no identity."""
    found = [pass_.uuid() if hasattr(pass_, "uuid") else None for pass_ in passes]
    return [repr(i) for i in found] if all(found) else None
