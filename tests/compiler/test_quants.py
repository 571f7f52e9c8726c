"""Quantisers: what is read from the graph, and the near misses that must stay as they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from blocks import ATEN_DYNAMIC, HIDDEN, AtenDynamic, same_bits
from graphs import run_fused
from quant_blocks import SHARED, TOKENS, Block, check, rows
from torchseam import Quant, SeamConfig, ops
from torchseam.compiler.fusion_pass import run_pass
from torchseam.compiler.report import Reason

pytestmark = pytest.mark.usefixtures("one_rank")


E4M3 = torch.float8_e4m3fn


def recipe(how: AtenDynamic) -> Quant:
    (quant,) = check(lambda y, h: how(y, None), how.scheme).fused[0].seam.quants
    return quant


def float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


# ---- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ATEN_DYNAMIC, ids=str)
def test_the_recipe_is_read_from_the_graph(how):
    quant = recipe(how)
    assert quant.rule == how.rule
    assert quant.group_size == how.group
    assert quant.scale_rule == ("reciprocal" if how.division == "multiply" else "divide")
    assert quant.scale_rounding == ("activation" if how.narrow else "none")


@pytest.mark.parametrize(
    ("how", "floor"),
    [
        (AtenDynamic(floor=None), 0.0),
        (AtenDynamic(floor=0.25), 0.25),
        (AtenDynamic(floor=1e-12), 1e-12),
        (AtenDynamic(floor=0.5, floor_by="maximum"), 0.5),
        (AtenDynamic(floor=1e-10, floor_on="amax"), float32(float32(1e-10) / 448)),
        (AtenDynamic(floor=1e-10, floor_on="amax", division="multiply"), float32(float32(1e-10) * float32(1 / 448))),
        (AtenDynamic(floor=3.0, floor_on="amax", narrow=True), float(torch.tensor(3.0).bfloat16() / 448)),
    ],
    ids=str,
)
def test_the_floor_is_read_wherever_it_stands(how, floor):
    assert recipe(how).scale_floor == floor


@pytest.mark.parametrize("floor_on, floor", [("scale", 0.007), ("amax", 2.7)])
@pytest.mark.parametrize("how", ATEN_DYNAMIC, ids=str)
def test_a_floor_that_some_rows_reach_gives_the_bits_of_eager(how, floor_on, floor):
    how = dataclasses.replace(how, floor=floor, floor_on=floor_on)
    report = check(lambda y, h: how(y, None), how.scheme)
    scales = how(Block(None).norm(rows(TOKENS, HIDDEN)), None)[1]
    assert 0 < (scales == scales.min()).sum() < scales.numel(), "the floor is never or always reached"
    assert report.refused == ()


@pytest.mark.parametrize("how", ATEN_DYNAMIC, ids=str)
def test_zero_nan_and_infinite_rows_give_the_bits_of_eager(how):
    x, residual = rows(5, HIDDEN), torch.zeros(5, HIDDEN).bfloat16()
    x[0] = 0
    x[1, 3] = float("nan")
    x[2, 5] = float("inf")
    check(lambda y, h: how(y, None), how.scheme, x=x, residual=residual, strict=False)


@pytest.mark.parametrize("shape", [(1,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("how", ATEN_DYNAMIC, ids=str)
def test_any_number_of_rows(how, shape):
    if shape == (0,) and (how.amax != "amax" or how.keepdim is False):
        pytest.skip("eager has no maximum of nothing in this spelling")
    check(lambda y, h: how(y, None), how.scheme, x=rows(*shape, HIDDEN), strict=shape != (0,))


def test_quantisers_behind_views_with_symbolic_sizes():
    block = Block(lambda y, h: [t for how in ATEN_DYNAMIC for t in how(y.view(-1, HIDDEN), None)])
    for batch in (2, 5):
        x, residual = rows(batch, 4, HIDDEN), rows(batch, 4, HIDDEN, seed=1)
        got = run_fused(block, x, residual, dynamic=True)
        assert got.kinds() == [" + ".join([SHARED, *(how.scheme for how in ATEN_DYNAMIC)])]
        assert "s" in got.report.fused[0].shape.split(" x ")[0]
        assert all(same_bits(a, b) for a, b in zip(block(x, residual), got.results, strict=True))


@pytest.mark.parametrize("how", [AtenDynamic(), AtenDynamic(64)], ids=str)
def test_scales_that_others_read_are_emitted(how):
    def tail(y, h):
        codes, scales = how(y, None)
        return codes, scales, scales * 2, scales.squeeze(-1)

    check(tail, how.scheme)


def test_steps_that_others_read_keep_their_values():
    def tail(y, h):
        wide = y.float()
        amax = wide.abs().amax(-1, keepdim=True)
        scales = (amax / 448.0).clamp(min=1e-12)
        quotient = wide / scales
        return quotient.clamp(-448, 448).to(E4M3), amax, wide, scales, quotient

    report = check(tail, "fp8_token")
    assert report.fused[0].seam.outputs == ("residual", "norm")


def test_copies_between_the_steps_change_nothing():
    def tail(y, h):
        groups = y.unflatten(-1, (-1, 64)).clone()
        scales = (groups.abs().float().amax(-1, keepdim=True) / 448.0).clone()
        return (groups.float() / scales).clamp(-448, 448).to(E4M3).flatten(-2), scales.squeeze(-1).clone()

    check(tail, "fp8_group")


def test_codes_alone_and_a_twin_of_our_operator():
    check(lambda y, h: AtenDynamic()(y, None)[:1], "fp8_token")
    twin = Quant("fp8_token", scale_floor=1e-12)
    check(lambda y, h: [*AtenDynamic()(y, None), *(t + 0 for t in ops.quantize(y, twin)[1:])], "fp8_token")


@pytest.mark.parametrize(
    "division, on_cuda", [("number", "reciprocal"), ("tensor", "divide"), ("multiply", "reciprocal")]
)
def test_cuda_divides_by_a_number_by_multiplying_with_its_reciprocal(division, on_cuda):
    how = AtenDynamic(division=division)

    def block(x, weight):
        wide = x.float()
        n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return how(weight * n.to(x.dtype), None)

    for device, rule in (("cuda", on_cuda), ("cpu", "reciprocal" if division == "multiply" else "divide")):
        with FakeTensorMode():
            args = (
                torch.empty(3, HIDDEN, dtype=torch.bfloat16, device=device),
                torch.empty(HIDDEN, dtype=torch.bfloat16, device=device),
            )
        graph = make_fx(block, select_decomp_table(), tracing_mode="fake")(*args).graph
        graph.eliminate_dead_code()
        (fused,) = run_pass(graph, SeamConfig()).fused
        assert fused.seam.quants[0].scale_rule == rule


# ---- near misses --------------------------------------------------------------------------------


def _codes(q: Tensor, bound: float = 448.0) -> Tensor:
    return q.clamp(-bound, bound).to(E4M3)


def _scale(y: Tensor) -> Tensor:
    return (y.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)


def _groups(y: Tensor, size: int = 64) -> Tensor:
    return y.float().unflatten(-1, (-1, size))


NEAR_MISSES = {
    "clamped to another bound": lambda y, h: (_codes(y.float() / _scale(y), 240.0), _scale(y)),
    "clamped on one side": lambda y, h: ((y.float() / _scale(y)).clamp(max=448.0).to(E4M3),),
    "not clamped": lambda y, h: ((y.float() / _scale(y)).to(E4M3),),
    "maximum over the tokens": lambda y, h: (_codes(y.float() / (y.float().abs().amax(0, keepdim=True) / 448.0)),),
    "maximum of h": lambda y, h: (_codes(y.float() / _scale(h)),),
    "maximum of half the row": lambda y, h: (_codes(y.float() / _scale(y[:, : HIDDEN // 2])),),
    "maximum without abs": lambda y, h: (_codes(y.float() / (y.float().amax(-1, keepdim=True) / 448.0)),),
    "another largest code": lambda y, h: (_codes(y.float() / (y.float().abs().amax(-1, keepdim=True) / 240.0)),),
    "another factor": lambda y, h: (_codes(y.float() / (y.float().abs().amax(-1, keepdim=True) * 0.0022321)),),
    "not divided": lambda y, h: (_codes(y.float() / y.float().abs().amax(-1, keepdim=True)),),
    "divided twice": lambda y, h: (_codes(y.float() / (_scale(y) / 448.0)),),
    "epsilon added": lambda y, h: (_codes(y.float() / (y.float().abs().amax(-1, keepdim=True) / 448.0 + 1e-6)),),
    "scale bounded above": lambda y, h: (_codes(y.float() / _scale(y).clamp(max=0.006)),),
    "two floors": lambda y, h: (_codes(y.float() / _scale(y).clamp(min=0.006)),),
    "floor computed": lambda y, h: (_codes(y.float() / torch.maximum(_scale(y), h.float().amax())),),
    "encode factor": lambda y, h: (_codes(y.float() * (448.0 / y.float().abs().amax(-1, keepdim=True))),),
    "multiplied by the scale": lambda y, h: (_codes(y.float() * _scale(y)),),
    "quotient in bf16": lambda y, h: ((y / _scale(y).bfloat16()).clamp(-448.0, 448.0).to(E4M3),),
    "scale rounded after its floor": lambda y, h: (_codes(y.float() / _scale(y).bfloat16().float()),),
    "groups of 32": lambda y, h: (
        _codes(_groups(y, 32) / (_groups(y, 32).abs().amax(-1, keepdim=True) / 448.0)).flatten(-2),
    ),
    "groups scaled by the row": lambda y, h: (_codes(_groups(y) / _scale(y).unsqueeze(-1)).flatten(-2),),
    "groups left apart": lambda y, h: (_codes(_groups(y) / (_groups(y).abs().amax(-1, keepdim=True) / 448.0)),),
}


@pytest.mark.parametrize("tail", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_a_near_miss_stays_and_is_explained(tail):
    report = check(tail)
    assert [(r.part, r.reason) for r in report.refused] == [("quantiser", Reason.QUANT_SPELLING)]
    assert report.refused[0].detail
    assert report.refused[0].remedy


def test_a_quantiser_of_something_else_is_nobodys_business():
    report = check(lambda y, h: (_codes(h.abs().float() / h.float().abs().amax(0, keepdim=True)), y))
    assert report.refused == ()
