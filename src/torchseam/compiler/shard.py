"""Leave the rows of a residual with their owners from seam to seam; it is gathered only where something else reads it.

After `rewrite`, which puts the seams in, and before `reuse`. A residual is `sharded` when every reader is another seam
of the same group that adds it; row views in between do not count, since they leave T and the order of rows alone. So
the first seam of a chain reads a full one and the last emits a full one, or none.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Node

from torchseam.compiler.dialects.views import viewed
from torchseam.compiler.report import Residual, source_line
from torchseam.seam import Reduce, Seam

#: Those that can come to run two-shot, which reads and leaves rows with their owners.
_BACKENDS = ("auto", "symmetric")


def shard(calls: dict[Node, Seam]) -> tuple[Residual, ...]:
    """Shard what can be, and tell of each residual that a seam with an all_reduce emits.

    calls: the nodes of `torchseam::seam` in the graph, and the seam of each; both are changed in place.
    """
    told = []
    for call, seam in list(calls.items()):
        if seam.reduce is None or "residual" not in seam.outputs:
            continue
        at = seam.outputs.index("residual")
        (residual,) = [user for user in call.users if user.target is operator.getitem and user.args[1] == at]
        readers: list[Node] = []
        full = _unfit_group(seam.reduce) or _find_readers(residual, seam.reduce, calls, readers)
        told.append(Residual(full, source_line(residual)))
        if full:
            continue
        _place(calls, call, residual_out="sharded")
        for reader in readers:
            _place(calls, reader, residual_in="sharded")
    return tuple(told)


def _unfit_group(reduce: Reduce) -> str:
    """Why nothing that this group's seams emit can be sharded, or ''."""
    if reduce.backend not in _BACKENDS:
        return f"backend {reduce.backend!r} needs them there"
    if _resolve_process_group(reduce.group).size() == 1:  # type: ignore[arg-type]
        return "its group has one rank"
    return ""


def _find_readers(residual: Node, reduce: Reduce, calls: dict[Node, Seam], readers: list[Node]) -> str:
    """Put the seams that read `residual` into `readers`; why one of its readers needs all rows, or ''."""
    views = [residual]
    for view in views:  # grows
        for user in view.users:
            if viewed(user) is view:
                views.append(user)
            elif why := _unfit_reader(user, view, reduce, calls.get(user)):
                return why
            else:
                readers.append(user)
    return ""


def _unfit_reader(user: Node, residual: Node, reduce: Reduce, seam: Seam | None) -> str:
    """Why `user`, which is a call of `seam` if that is given, needs all rows of `residual`, or ''."""
    if user.op == "output":
        return "it is returned"
    if seam is None:
        return f"{user.target} reads it"
    if seam.reduce is None:
        return "a seam without an all_reduce reads it"
    others = (user.args[0], *user.args[2:4], *user.args[4])  # type: ignore[misc]
    if any(other is residual for other in others):
        return "a seam reads it as another of its inputs"
    if (seam.reduce.group, seam.reduce.backend) != (reduce.group, reduce.backend):
        return "a seam of another group reads it"
    return ""


def _place(calls: dict[Node, Seam], call: Node, **placement: Any) -> None:
    seam = calls[call]
    assert seam.reduce is not None
    calls[call] = dataclasses.replace(seam, reduce=dataclasses.replace(seam.reduce, **placement))
    call.update_arg(5, calls[call].to_text())
