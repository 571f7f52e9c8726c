"""Errors that the command line answers with a message and exit code 2."""

from __future__ import annotations


class BadInput(ValueError):
    """Something the user gave, or this machine lacks; the message says what to do."""
