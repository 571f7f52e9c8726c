"""Which residuals are sharded, what is told of the others, and that nobody meets a row that its rank does not own."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import graphs
import sharded_rows
from blocks import HIDDEN, GemmaNorm, LlamaNorm, same_bits
from pretend_group import pretend_group
from torchseam import Quant, SeamConfig, ops
from torchseam.compiler import shard
from torchseam.compiler.report import FusionReport, Residual, graph_from_dict, graph_to_dict

ON = SeamConfig(shard_residual=True)
FP8 = Quant("fp8_static")
SHARDED = ""


class Layers(torch.nn.Module):
    """Parts of a residual stream over one group; `forward` is the function that is given."""

    def __init__(self, forward, group: str) -> None:
        super().__init__()
        self.function, self.group = forward, group
        ramp = torch.linspace(0.5, 1.5, HIDDEN)
        self.norm, self.other = LlamaNorm(ramp.bfloat16()), GemmaNorm(ramp.flip(0).bfloat16())
        self.register_buffer("scale", torch.tensor(0.01))

    def codes(self, y: Tensor, scale: Tensor | None = None) -> Tensor:
        return ops.quantize(y, FP8, self.scale if scale is None else scale)[0]

    def layer(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """(what the next layer sums, the new residual)."""
        h = h + funcol.all_reduce(x, "sum", self.group)
        return self.codes(self.norm(h)).to(x.dtype), h

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return self.function(self, x * 2, residual)


def view_of_rows(m, x, h):
    """[2, 3, H] seen as [6, H]: T and the order of rows stay."""
    y, h = m.layer(x, h)
    y, h = m.layer(y.reshape(-1, HIDDEN), h.reshape(-1, HIDDEN))
    return (y,)


def two_readers(m, x, h):
    """Both add the residual to sums over its group."""
    y, h = m.layer(x, h)
    a, _ = m.layer(y, h)
    b, _ = m.layer(y * 0.5, h)
    return a, b


def sandwich(m, x, h):
    y, h = m.layer(x, h)
    h = h + m.other(funcol.all_reduce(y, "sum", m.group))
    return (m.codes(m.norm(h)),)


def other_view(m, x, h):
    """Seen with rows of half the length, which have other owners."""
    y, h = m.layer(x, h)
    halves = h.view(2, 6, HIDDEN // 2)
    return y, halves.abs()


def also_summed(m, x, h):
    """The next seam sums the residual besides adding it."""
    y, h = m.layer(x, h)
    z, _ = m.layer(h, h)
    return y, z


def as_scale(m, x, h):
    """A number out of the residual scales the next seam's codes."""
    y, h = m.layer(x, h)
    h = h + funcol.all_reduce(y, "sum", m.group)
    return (m.codes(m.norm(h), h.float().abs().amax() / 448),)


def by_local_seam(m, x, h):
    """A second norm and quantiser read the residual, without a sum."""
    y, h = m.layer(x, h)
    z = m.codes(m.other(h))
    y, h = m.layer(y, h)
    return y, z


def added_locally(m, x, h):
    """The next layer has no all_reduce: a local seam adds the residual."""
    y, h = m.layer(x, h)
    return (m.codes(m.norm(y + h)),)


def returned(m, x, h):
    y, h = m.layer(x, h)
    y, h = m.layer(y, h)
    return y, h


def one_row(m, x, h):
    y, h = m.layer(x, h)
    y, h = m.layer(y[:, :1], h[:, :1])
    return (y,)


CASES = {
    view_of_rows: [SHARDED],
    two_readers: [SHARDED],
    sandwich: [SHARDED],
    other_view: ["aten.view.default reads it"],
    also_summed: ["a seam reads it as another of its inputs"],
    as_scale: [SHARDED, "prims.convert_element_type.default reads it"],
    by_local_seam: ["a seam without an all_reduce reads it"],
    added_locally: ["a seam without an all_reduce reads it"],
    returned: [SHARDED, "it is returned"],
    one_row: ["aten.slice.Tensor reads it"],
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, HIDDEN, generator=generator).bfloat16() for _ in range(2)]


def traced(forward, group: str, config: SeamConfig = ON):
    """(the pass over the layers, whether its values are eager's with NaN in the rows that are not this rank's)."""
    model, args = Layers(forward, group), inputs()
    with sharded_rows.poisoned(pretended=True):
        got = graphs.trace_fused(model, *args, config=config)
    return got.report, all(same_bits(a, b) for a, b in zip(model(*args), got.results, strict=True))


def run(forward, group: str, config: SeamConfig = ON):
    report, same = traced(forward, group, config)
    assert same
    return report


@pytest.mark.parametrize("forward", CASES, ids=lambda f: f.__name__)
def test_a_residual_is_sharded_where_only_seams_of_its_group_add_it(forward, one_rank):
    report = run(forward, pretend_group(4))
    assert [residual.full for residual in report.residuals] == CASES[forward]
    left = [f for f in report.fused if f.seam.reduce is not None and f.seam.reduce.residual_out == "sharded"]
    assert len(left) == CASES[forward].count(SHARDED)
    assert not report.refused or forward is as_scale


def test_the_poison_shows(one_rank, monkeypatch):
    """What this module rests on: a residual that is sharded though something else reads it gives other values."""
    unfit, place = shard._unfit_reader, shard._place
    monkeypatch.setattr(shard, "_unfit_reader", lambda user, *rest: user.op != "output" and unfit(user, *rest))
    monkeypatch.setattr(shard, "_place", lambda calls, call, **where: call in calls and place(calls, call, **where))
    report, same = traced(returned, pretend_group(4))
    assert [residual.full for residual in report.residuals] == [SHARDED, SHARDED] and not same


def test_off_by_default(one_rank):
    report = run(returned, pretend_group(4), SeamConfig())
    assert report.residuals == ()
    assert not any(f.seam.reduce.sharded for f in report.fused)


def test_a_group_of_one_rank_and_a_backend_without_owners_have_full_residuals(one_rank):
    report = run(returned, dist.group.WORLD.group_name)
    assert [residual.full for residual in report.residuals] == ["its group has one rank"] * 2
    report = run(returned, pretend_group(4), SeamConfig(backend="collective", shard_residual=True))
    assert [residual.full for residual in report.residuals] == ["backend 'collective' needs them there"] * 2
    assert not any(f.seam.reduce.sharded for f in report.fused)


def test_the_report_tells_and_survives_json(one_rank, fresh_dynamo):
    with sharded_rows.poisoned(pretended=True):
        report = graphs.run_fused(Layers(returned, pretend_group(4)), *inputs(), config=ON).report
    assert [residual.source.split(":")[0] for residual in report.residuals] == ["compiler/test_shard_residuals.py"] * 2
    assert graph_from_dict(json.loads(json.dumps(graph_to_dict(report)))) == report
    text = str(FusionReport([report]))
    assert "1 residual between seams, each row with its owner" in text
    assert "1 residual between seams, all its rows on every rank: it is returned" in text
    more = dataclasses.replace(report, residuals=(Residual("", "a"), Residual("", "b")))
    assert "2 residuals between seams, each row with its owner" in str(FusionReport([more]))


def test_strict_takes_full_residuals(one_rank):
    report = run(returned, pretend_group(4), dataclasses.replace(ON, strict=True))
    assert not report.refused
