"""A dialect whose own code raises: the part is refused and explained, and the user's compilation goes on."""

from __future__ import annotations

import pytest

from blocks import AtenDynamic
from quant_blocks import check
from torchseam.compiler import find as find_module
from torchseam.compiler.report import Reason

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("dialect", "part", "left"),
    [
        ("match_all_reduce", "all_reduce", ["residual + rms_norm + fp8_token"]),
        ("match_norm", "norm", []),
        ("match_quant", "quantiser", ["all_reduce + residual + rms_norm"]),
    ],
)
def test_a_dialect_that_raises_refuses_that_part_and_breaks_nothing(dialect, part, left, monkeypatch, caplog, one_rank):
    """The rest of the graph fuses, and the values are eager's."""
    original = getattr(find_module, dialect)

    def fails(node):
        match = original(node)
        if match is not None:
            raise KeyError("a spelling that nobody thought of")
        return match

    caplog.set_level("WARNING", logger="torchseam")
    monkeypatch.setattr(find_module, dialect, fails)
    report = check(lambda y, h: AtenDynamic()(y, h), kinds=left)
    refusals = [r for r in report.refused if r.reason is Reason.FAILURE]
    assert [r.part for r in refusals] == [part]
    assert refusals[0].detail == "KeyError: 'a spelling that nobody thought of'"
    assert "Traceback" in caplog.text
