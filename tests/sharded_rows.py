"""Sharded residuals on `collective`, made to show: the rows that a rank does not own hold NaN until they are gathered.

`collective` computes all rows on every rank, so a residual that was left sharded where something else reads it would
give the right values by luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchseam.backends import collective, select
from torchseam.operands import Operands
from torchseam.seam import Seam, owned_rows


@contextmanager
def poisoned(*, pretended: bool = False) -> Iterator[list[Seam]]:
    """Seams that run meanwhile leave NaN in the rows of others; yields a list of all that ran.

    pretended: the group's other ranks are pretended (`pretend_group`), so what they would send is kept aside and put
    in place of the gather.
    """
    ran: list[Seam] = []
    whole: dict[int, Tensor] = {}  # by address

    def run(seam: Seam, operands: Operands) -> list[Tensor]:
        outputs = real(seam, operands)
        ran.append(seam)
        if seam.reduce.residual_out == "sharded":
            group = _resolve_process_group(seam.reduce.group)
            residual = outputs[seam.outputs.index("residual")]
            whole[residual.data_ptr()] = residual.clone()
            rows = residual.view(-1, residual.shape[-1])
            others = torch.ones(len(rows), dtype=torch.bool)
            others[owned_rows(len(rows), group.rank(), group.size())] = False
            rows[others] = float("nan")
        return outputs

    def gathered(residual: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        return whole[residual.data_ptr()].view(residual.shape).clone()

    real = collective.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select.collective, "run", run)
        if pretended:
            patch.setattr(collective, "_gathered", gathered)
        yield ran
