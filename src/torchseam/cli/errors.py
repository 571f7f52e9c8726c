"""Which errors the command line answers with a message and exit code 2, and how it words the others."""

from __future__ import annotations


class BadInput(ValueError):
    """Something the user gave, or this machine lacks; the message says what to do."""


def is_for_the_user(error: BaseException) -> bool:
    """Whether the user can mend what went wrong: a ValueError that torchseam raised, not one of a library's."""
    if not isinstance(error, ValueError):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__")).split(".")[0] == __name__.split(".")[0]


def describe(error: BaseException) -> str:
    """The error's message, with its type unless the user is meant to mend it."""
    if is_for_the_user(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
