"""torchao's NVFP4 quantiser, as the installed release spells it, through Inductor: the pattern is traced from it."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

import torchseam
from blocks import HIDDEN, same_bits
from quant_blocks import SHARED, Block, rows
from torchseam import Quant, SeamConfig
from torchseam.compiler.dialects import torchao_nvfp4
from torchseam.compiler.report import Reason

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it says of itself when it is imported is not ours to mend
    pytest.importorskip("torchao", reason="torchao is not installed (pip install torchseam[torchao])")
    from torchao.prototype.mx_formats import nvfp4_tensor

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_dynamo")

SCALES = {"one-level": None, "two-level": torch.tensor(0.003)}


def quantise(y, scale=None, swizzled=True):
    made = nvfp4_tensor.NVFP4Tensor.to_nvfp4(y, per_tensor_scale=scale, is_swizzled_scales=swizzled)
    return made.qdata, made.scale


def fuse(tail, x, residual=None, **how):
    """Compiled through Inductor and compared with eager, bit for bit. Returns the report of the one graph."""
    block = Block(tail)
    residual = rows(*x.shape, seed=1).to(x.dtype) if residual is None else residual
    with torch.no_grad():
        want = block(x, residual)
        compiled = torchseam.compile(block, config=SeamConfig(exact=True), fullgraph=True, **how)
        got = compiled(x, residual)
    assert len(want) == len(got)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert same_bits(a, b), f"output {i} differs"
    return torchseam.report(compiled).graphs[0]


def recipe(scale, swizzled):
    layout, kind = "swizzled" if swizzled else "linear", "none" if scale is None else "decode"
    return Quant("nvfp4", scale_layout=layout, global_scale=kind)


@pytest.mark.parametrize("dynamic", [False, True], ids=("static", "symbolic"))
@pytest.mark.parametrize("swizzled", [True, False], ids=("swizzled", "linear"))
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
def test_each_form_is_fused(scale, swizzled, dynamic):
    report = fuse(lambda y, h: quantise(y, scale, swizzled), rows(7, HIDDEN), dynamic=dynamic)
    assert [f.kind for f in report.fused] == [f"{SHARED} + nvfp4"]
    assert report.fused[0].seam.quants == (recipe(scale, swizzled),)
    assert report.fused[0].seam.outputs == ("residual",), "a value is emitted that nobody reads"
    assert report.refused == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (128,), (200,), (1, 5), (2, 128)], ids=str)
def test_dtypes_and_shapes(shape, dtype):
    def tail(y, h):
        y = y.float() if dtype is torch.float16 else y  # torchao takes no fp16
        swizzled = len(shape) == 1 or shape[0] == 1  # torchao swizzles no batch whose rows fill no whole tiles
        return *quantise(y, SCALES["two-level"], swizzled), *quantise(y, swizzled=False), y

    report = fuse(tail, rows(*shape, HIDDEN).to(dtype))
    assert [f.kind for f in report.fused] == [f"{SHARED} + nvfp4 + nvfp4"]


@pytest.mark.parametrize("batches", [(2, 5, 32), (64, 100)], ids=str)
def test_compiled_once_and_run_at_other_sizes(batches):
    """Up to 128 rows, and above: torchao itself asks whether they fill more than one tile."""
    block = Block(lambda y, h: quantise(y.view(-1, HIDDEN), SCALES["two-level"]))
    compiled = torchseam.compile(block, config=SeamConfig(exact=True), dynamic=True)
    for batch in batches:
        x, residual = rows(batch, 4, HIDDEN), rows(batch, 4, HIDDEN, seed=1)
        with torch.no_grad():
            for a, b in zip(block(x, residual), compiled(x, residual), strict=True):
                assert same_bits(a, b)
    report = torchseam.report(compiled)
    assert [f.kind for g in report.graphs for f in g.fused] == [f"{SHARED} + nvfp4"]


def test_values_that_are_no_ordinary_numbers():
    x, residual = rows(8, HIDDEN), rows(8, HIDDEN, seed=1)
    x[0], residual[0] = 0.0, 0.0
    x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("inf"), -float("inf")
    x[4], residual[4] = 1e-38, 0.0
    scales = {"two-level": torch.tensor(0.003), "zero": torch.tensor(0.0), "huge": torch.tensor(3e38)}
    for scale in (None, *scales.values()):
        fuse(lambda y, h, scale=scale: quantise(y, scale, False), x, residual)


def test_nvfp4_quantize_itself_and_codes_alone():
    def tail(y, h):
        scales, codes = nvfp4_tensor.nvfp4_quantize(y, 16, SCALES["two-level"])
        return codes, scales, nvfp4_tensor.nvfp4_quantize(y, 16)[1]

    report = fuse(tail, rows(2, 5, HIDDEN))
    assert [f.kind for f in report.fused] == [f"{SHARED} + nvfp4 + nvfp4"]


def test_a_scale_made_of_the_norm_itself_is_refused():
    def tail(y, h):
        scale = nvfp4_tensor.per_tensor_amax_to_scale(y.abs().amax())
        return quantise(y, scale, False)

    report = fuse(tail, rows(7, HIDDEN))
    assert [f.kind for f in report.fused] == [SHARED]
    assert [(r.part, r.reason) for r in report.refused] == [("nvfp4", Reason.DEPENDENCE)]


@pytest.fixture
def forgets():
    """The patterns are traced anew before and after the test."""
    caches = (torchao_nvfp4._pattern, torchao_nvfp4._computes_as_ours)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def refusal_of(report):
    assert [f.kind for f in report.fused] == [SHARED]
    (refusal,) = report.refused
    assert (refusal.part, refusal.reason) == ("quantiser", Reason.QUANT_SPELLING)
    return refusal.detail


CHANGES = {"a smaller floor": ("E4M3_EPS", 2.0**-9), "another maximum": ("F4_E2M1_MAX", 4.0)}


@pytest.mark.parametrize(("name", "number"), CHANGES.values(), ids=CHANGES.keys())
def test_a_near_miss_is_left_alone_and_explained(name, number, monkeypatch, forgets):
    """The graph computes otherwise than torchao did when the pattern was traced."""
    torchao_nvfp4._small(True), torchao_nvfp4._small(False), torchao_nvfp4._computes_as_ours()
    monkeypatch.setattr(nvfp4_tensor, name, number)
    report = fuse(lambda y, h: quantise(y, SCALES["two-level"], False), rows(7, HIDDEN))
    assert "in another way than the installed torchao" in refusal_of(report)


def test_a_release_with_another_recipe_is_refused(monkeypatch, forgets):
    """Its graphs are recognised as its own, but no recipe of ours gives its bits."""
    monkeypatch.setattr(nvfp4_tensor, "E4M3_EPS", 2.0**-9)
    report = fuse(lambda y, h: quantise(y, None, False), rows(7, HIDDEN))
    assert "another recipe" in refusal_of(report)


def test_without_torchao_packed_codes_are_explained(monkeypatch):
    def tail(y, h):
        codes = (y.float().abs().clamp(max=7.0)).to(torch.uint8)
        return (codes[..., ::2] | codes[..., 1::2] << 4,)

    monkeypatch.delitem(sys.modules, torchao_nvfp4._MODULE)
    assert "not imported" in refusal_of(fuse(tail, rows(7, HIDDEN)))
