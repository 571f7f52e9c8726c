"""One backend on one group: what `torchseam.checking.run.check` finds, counts and gives up on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from torchseam import reference
from torchseam.backends import collective, select
from torchseam.checking import run
from torchseam.checking.cases import Case, cases
from torchseam.operands import Operands
from torchseam.seam import Seam

CPU = torch.device("cpu")


def spoiled(at: int, times: set[int]) -> Callable[[Seam, Operands], list[Tensor]]:
    """The reference, but for the first bit of output `at` in some calls."""
    calls = iter(range(10**9))

    def wrong(seam: Seam, operands: Operands) -> list[Tensor]:
        outputs = reference.run(seam, operands)
        if next(calls) in times:
            outputs[at].view(torch.uint8).view(-1)[1] ^= 0x40
        return outputs

    return wrong


def test_wrong_cases_are_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    table = list(cases(None))[:12]
    monkeypatch.setattr(select, "run", spoiled(0, {2, 7}))
    ticks: list[object] = []
    result = run.check("local", table, CPU, 0, 1, ticks.append)
    assert (result.cases, result.wrong, len(ticks)) == (12, 2, 12)
    assert result.bad and result.skipped is None
    assert [told.partition(": rank 0: ")[0] for told in result.told] == [str(table[2]), str(table[7])]


def test_a_backend_that_cannot_run_on_the_group_is_skipped(one_rank: None) -> None:
    group = dist.distributed_c10d._get_default_group().group_name
    table = list(cases(run.reduce_of("trtllm", group)))[:3]
    result = run.check("trtllm", table, CPU, 0, 1, lambda _: None)
    select.reset()
    assert result.skipped is not None and "there is no CUDA GPU" in result.skipped
    assert not result.bad and result.cases == 0


def test_an_error_after_the_first_case_is_no_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seam: Seam, operands: Operands) -> list[Tensor]:
        if operands.x.shape[0] == 5:
            raise ValueError("five rows")
        return reference.run(seam, operands)

    monkeypatch.setattr(select, "run", fails)
    with pytest.raises(ValueError, match="five rows"):
        run.check("local", list(cases(None))[:4], CPU, 0, 1, lambda _: None)


def _check_on_a_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.distributed_c10d._get_default_group().group_name
    table: list[Case] = list(cases(run.reduce_of("collective", group)))[:10]
    right = collective.run
    calls = iter(range(10**9))

    def wrong_on_rank_1(seam: Seam, operands: Operands) -> list[Tensor]:
        outputs = right(seam, operands)
        if next(calls) == 4 and rank == 1:
            outputs[0].view(torch.uint8).view(-1)[1] ^= 0x40
        return outputs

    collective.run = wrong_on_rank_1  # type: ignore[assignment]
    result = run.check("collective", table, CPU, rank, 2, lambda _: None)
    assert (result.cases, result.wrong) == (10, 1)
    (told,) = result.told
    assert told.startswith(f"{table[4]}: rank 1: residual: 1 of ")
    assert told.endswith("output 0 differs from rank 0's")
    dist.barrier()
    dist.destroy_process_group()


def test_what_one_rank_finds_all_ranks_tell(tmp_path: Path) -> None:
    mp.spawn(_check_on_a_rank, (str(tmp_path),), nprocs=2)
