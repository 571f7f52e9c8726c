"""The tuned launches of a group: those of this machine's file where all of its ranks read the same, else none."""

from __future__ import annotations

import logging

import torch

from torchseam.backends.base import Group, agree
from torchseam.kernels import tuned_file
from torchseam.kernels.tuned import ONE_SHOT, Table

_log = logging.getLogger(__name__)


def agreed_table(group: Group) -> Table:
    """Collective, once for each opening of a backend; `base.agree` says what it raises.

    The ranks of a collective kernel must launch it alike. So each says what its table would make it launch; where
    they differ, all launch as shipped, and rank 0 warns.
    """
    table, own = _own(group)
    answers = agree(group, own)
    if len(set(answers)) == 1:
        return table
    level = logging.WARNING if group.rank == 0 else logging.DEBUG
    _log.log(
        level,
        "group %s: the ranks have different tuned launches (%s): all launch as shipped. Give them the same "
        "files: one folder in TORCHSEAM_CACHE, and the same TORCHSEAM_TUNED",
        group.name,
        ", ".join(f"rank {rank} {answer}" for rank, answer in enumerate(answers)),
    )
    return Table()


def _own(group: Group) -> tuple[Table, str]:
    """This rank's table and its answer. Never raises: the others would wait for the answer."""
    try:
        table = tuned_file.load(group.device.index)
        digest = table.digest(ONE_SHOT, group.world_size)
        # With the number that decides whether a choice of the table is legal.
        return table, f"{digest} for {_multiprocessors(group.device)} multiprocessors" if digest else "none"
    except Exception as error:
        _log.warning(
            "group %s: no tuned launches on rank %d: %s: %s", group.name, group.rank, type(error).__name__, error
        )
        return Table(), "none"


def _multiprocessors(device: torch.device) -> int:
    """How many a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
