"""What the report says of the choice that is made at run time."""

from __future__ import annotations

import json

import pytest
import torch

import torchseam
from blocks import HIDDEN, Block, GemmaNorm
from torchseam import Quant, SeamConfig
from torchseam.backends import select
from torchseam.compiler.fusion_pass import FusionPass
from torchseam.compiler.report import FusionReport, GroupBackend

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_dynamo", "inductor_cache")


@pytest.fixture(autouse=True)
def nothing_chosen():
    select.reset()
    yield
    select.reset()


class Small:
    """A backend that holds four rows."""

    name = "small"

    def refuses(self, seam, operands):
        rows = operands.x.numel() // operands.x.shape[-1]
        return f"{rows} rows; its workspace holds 4" if rows > 4 else None

    def run(self, seam, operands):
        return select.collective.run(seam, operands)

    def close(self):
        pass


def test_configured_chosen_and_what_went_elsewhere(monkeypatch):
    block = Block(GemmaNorm, "residual", Quant("fp8_static"), torch.bfloat16)
    compiled = torchseam.compile(block, config=SeamConfig(), dynamic=True)
    group = torch.distributed.group.WORLD.group_name
    monkeypatch.setitem(select._choices, (group, "auto", torch.device("cpu")), select._Choice(Small()))
    rows = [torch.randn(n, HIDDEN).bfloat16() for n in (3, 9)]
    with torch.no_grad():
        for x in rows:
            compiled(x, x)
    report = torchseam.report(compiled)
    why = "some calls went to collective: 9 rows; its workspace holds 4"
    assert report.backends() == [GroupBackend(group, "auto", "small", (why,))]
    assert json.loads(report.to_json())["backends"] == [
        {"group": group, "configured": "auto", "chosen": "small", "elsewhere": [why]}
    ]
    assert "small" in str(report) and why in str(report)


def test_nothing_is_known_before_a_seam_has_run():
    from graphs import run_fused

    block = Block(GemmaNorm, "residual", Quant("fp8_static"), torch.bfloat16)
    x = torch.randn(3, HIDDEN).bfloat16()
    report = FusionReport(run_fused(block, x, x).reports)
    select.reset()
    (backend,) = report.backends()
    assert (backend.configured, backend.chosen, backend.elsewhere) == ("auto", None, ())


def test_seams_without_a_sum_and_empty_reports_have_no_backend():
    assert FusionPass(SeamConfig()).report.backends() == []
