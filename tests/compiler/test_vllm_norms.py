"""vLLM's norms and its all_reduce, by operators of the same schema, alone and as one seam."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config

import vllm_ops
from blocks import EPS, HIDDEN, same_bits
from graphs import run_fused
from pretend_group import pretend_group
from quant_blocks import SHARED, rows
from torchseam import Norm, Quant, SeamConfig
from torchseam.compiler.fusion_pass import FusionPass
from torchseam.compiler.report import Reason

pytestmark = pytest.mark.usefixtures("one_rank")

E4M3 = torch.float8_e4m3fn
SCALE = torch.full((1,), 0.01)
WEIGHT = (torch.rand(HIDDEN, generator=torch.Generator().manual_seed(7)) + 0.5).bfloat16()


@pytest.fixture(autouse=True, scope="module")
def operators():
    vllm_ops.register()


@pytest.fixture
def tp():
    """vLLM's "tp:0" over two pretended ranks; the name by which torch.distributed knows it."""
    name = pretend_group(2)
    with vllm_ops.vllm_groups(tp=dist.distributed_c10d._resolve_process_group(name)):
        yield name


def all_reduce(x, group="tp:0"):
    return torch.ops.vllm.all_reduce(x, group)


def static(y):
    codes = torch.empty_like(y, dtype=E4M3)
    torch.ops._C.static_scaled_fp8_quant(codes, y, SCALE, None)
    return codes


def legacy_norm(x, weight):
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, EPS)
    return out


def legacy_add_norm(x, residual, weight):
    """In place, as vLLM calls it: not for the arguments of a test's function."""
    torch.ops._C.fused_add_rms_norm(x, residual, weight, EPS)
    return x, residual


def ir_norm(x, weight, size=None):
    return torch.ops.vllm_ir.rms_norm(x, weight, EPS, size)


def ir_add_norm(x, residual, weight, size=None):
    return torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, EPS, size)


FORMS = {"ir": (ir_norm, ir_add_norm), "legacy": (legacy_norm, legacy_add_norm)}


def fuse(function, *args, version=2, **how):
    """Captured, fused and compared with eager, bit for bit."""
    with torch.no_grad():
        want = function(*args)
        with inductor_config.patch(enable_auto_functionalized_v2=version == 2):
            got = run_fused(function, *args, **how)
    assert len(want) == len(got.results)
    for i, (a, b) in enumerate(zip(want, got.results, strict=True)):
        assert same_bits(a, b), f"output {i} differs"
    return got


def whole(add_norm, weight, swapped=False):
    """all_reduce, residual, norm and quantiser, all of them vLLM's."""

    def function(x, residual):
        summed, residual = all_reduce(x * 2), residual * 1
        y, h = add_norm(residual, summed, weight) if swapped else add_norm(summed, residual, weight)
        return static(y), h

    return function


@pytest.mark.parametrize("dynamic", [False, True], ids=("static", "symbolic"))
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("swapped", [False, True], ids=("sum first", "residual first"))
@pytest.mark.parametrize("form", FORMS)
def test_all_reduce_residual_norm_and_quantiser_are_one_seam(form, swapped, version, dynamic, tp):
    args = rows(7, HIDDEN), rows(7, HIDDEN, seed=1)
    for arg in args:  # as a GEMM before it fixes the hidden size
        torch._dynamo.mark_static(arg, 1)
    got = fuse(whole(FORMS[form][1], WEIGHT, swapped), *args, version=version, dynamic=dynamic)
    assert got.kinds() == [f"{SHARED} + fp8_static"]
    (fused,) = got.report.fused
    assert fused.seam.reduce.group == tp, "the group is torch.distributed's, not vLLM's name for it"
    assert fused.seam.norm == Norm(EPS, "after_cast")
    assert fused.seam.quants == (Quant("fp8_static", rule="reciprocal"),)
    assert fused.seam.outputs == ("residual",)
    assert got.report.refused == ()
    for left in ("vllm", "_C.", "auto_functionalized"):
        assert left not in got.after[0]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_norms_without_a_residual(form, version, tp):
    norm = FORMS[form][0]

    def function(x):
        y = norm(all_reduce(x * 2), WEIGHT)
        return static(y), y

    got = fuse(function, rows(7, HIDDEN), version=version)
    assert got.kinds() == ["all_reduce + rms_norm + fp8_static"]


WEIGHTS = {"none": (None, "none"), "bf16": (WEIGHT, "after_cast"), "fp32": (WEIGHT.float() + 1e-3, "before_cast")}


@pytest.mark.parametrize(("weight", "mode"), WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights(weight, mode, tp):
    got = fuse(whole(ir_add_norm, weight), rows(7, HIDDEN), rows(7, HIDDEN, seed=1))
    assert got.report.fused[0].seam.norm.weight == mode


def test_layers_in_a_row_and_a_sum_that_nobody_reads(tp):
    def function(x, residual):
        for _ in range(3):
            y, residual = ir_add_norm(all_reduce(x * 2), residual, WEIGHT)
            x = y.abs()
        return (x,)

    got = fuse(function, rows(7, HIDDEN), rows(7, HIDDEN, seed=1))
    assert got.kinds() == [SHARED] * 3
    assert [f.seam.outputs for f in got.report.fused] == [("residual", "norm")] * 2 + [("norm",)]


def test_a_sandwich(tp):
    def function(x, residual):
        y, h = ir_add_norm(ir_norm(all_reduce(x * 2), WEIGHT), residual, WEIGHT)
        return static(y), h

    got = fuse(function, rows(7, HIDDEN), rows(7, HIDDEN, seed=1))
    assert got.kinds() == ["all_reduce + rms_norm + residual + rms_norm + fp8_static"]


def test_without_a_quantiser_or_all_reduce_vllm_keeps_its_operator():
    got = fuse(lambda x, r: ir_add_norm(x * 2, r, WEIGHT), rows(7, HIDDEN), rows(7, HIDDEN, seed=1))
    assert got.kinds() == []
    assert got.report.plain_norms == 1
    assert "vllm_ir.fused_add_rms_norm" in got.after[0]


@pytest.mark.parametrize("group", ["ep:0", "gone:0"])
def test_a_group_that_vllm_does_not_know_is_refused(group, tp):
    args = rows(7, HIDDEN), rows(7, HIDDEN, seed=1)
    got = run_fused(lambda x, r: ir_add_norm(all_reduce(x * 2, group), r, WEIGHT)[0] * 0, *args)
    assert [(r.part, r.reason) for r in got.report.refused] == [("all_reduce", Reason.UNKNOWN_GROUP)]


def test_a_norm_over_a_part_of_the_row_is_refused(tp):
    def function(x, residual):
        y, h = ir_add_norm(all_reduce(x * 2), residual, WEIGHT, 64)
        return y, h, ir_norm(y, WEIGHT, HIDDEN)

    got = fuse(function, rows(7, HIDDEN), rows(7, HIDDEN, seed=1))
    assert got.kinds() == []
    assert [(r.part, r.reason) for r in got.report.refused] == [
        ("all_reduce", Reason.NO_NORM),
        ("norm", Reason.PARTIAL_ROW),
    ]


def test_a_residual_of_another_dtype_is_refused(tp):
    def function(x, residual):
        return (static(ir_add_norm(all_reduce(x * 2), residual, WEIGHT)[0]),)

    got = run_fused(function, rows(7, HIDDEN), rows(7, HIDDEN, seed=1).float())
    assert got.kinds() == []
    assert [(r.part, r.reason) for r in got.report.refused] == [("norm", Reason.DTYPE)]


def test_another_collective_of_vllm_keeps_its_place(tp):
    def function(x, residual):
        first = all_reduce(x * 2)
        second = all_reduce(x * 3)
        return (*ir_add_norm(first, residual, WEIGHT), second)

    got = fuse(function, rows(7, HIDDEN), rows(7, HIDDEN, seed=1))
    assert Reason.COLLECTIVE_BETWEEN in [r.reason for r in got.report.refused]


def test_the_groups_of_vllm_are_part_of_the_pass_identity(tp):
    with_tp = FusionPass(SeamConfig()).uuid()
    with vllm_ops.vllm_groups():
        assert FusionPass(SeamConfig()).uuid() != with_tp
