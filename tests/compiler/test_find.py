"""Shapes, readers, groups and orders that a seam comes in; what is emitted, and that nothing is lost."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from blocks import EPS, HIDDEN, GemmaNorm, LlamaNorm, TorchNorm, same_bits
from graphs import run_fused
from torchseam import Quant, SeamConfig, ops
from torchseam.compiler.report import Reason

pytestmark = pytest.mark.usefixtures("one_rank")

FP8, NVFP4 = Quant("fp8_static"), Quant("nvfp4")
SCALE = torch.tensor(0.01)


def reduce(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.rand(HIDDEN, generator=torch.Generator().manual_seed(7)) + 0.5).to(dtype)


def check(function, *args, kinds, config=None, **how):
    """Run fused and eager: same bits, the named seams and no others. Returns the capture."""
    want = function(*args)
    got = run_fused(function, *args, config=config, **how)
    assert got.kinds() == kinds
    want = want if isinstance(want, tuple) else (want,)
    results = got.results if isinstance(got.results, tuple) else (got.results,)
    assert len(want) == len(results)
    for i, (a, b) in enumerate(zip(want, results, strict=True)):
        assert same_bits(a, b), f"output {i} differs"
    return got


norm = LlamaNorm(weight())
FULL = "all_reduce + residual + rms_norm + fp8_static"


def test_in_place_all_reduce_is_found():
    def block(x, residual):
        x = x * 2
        dist.all_reduce(x)
        h = x + residual
        return ops.quantize(norm(h), FP8, SCALE)[0], h

    check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=[FULL])


def test_an_addmm_of_the_users_own_keeps_its_rounding():
    def block(x, a, b):
        return ops.quantize(norm(torch.addmm(reduce(x * 2), a, b)), FP8, SCALE)[0]

    got = check(block, rows(3, HIDDEN), rows(3, 16), rows(16, HIDDEN), kinds=["rms_norm + fp8_static"])
    assert refusals(got) == [("all_reduce", Reason.NO_NORM)]


def test_views_between_the_parts_are_replayed():
    def block(x, residual):
        h = reduce(x * 2).view(2, 3, HIDDEN) + residual
        y = norm(h).view(6, HIDDEN)
        return ops.quantize(y, Quant("fp8_group", 64), None)[1], ops.quantize(y, FP8, SCALE)[0], h

    got = check(
        block,
        rows(6, HIDDEN),
        rows(2, 3, HIDDEN, seed=1),
        kinds=["all_reduce + residual + rms_norm + fp8_group + fp8_static"],
    )
    assert got.report.fused[0].shape == "6 x 128"


def test_the_sum_itself_read_elsewhere_is_emitted_in_its_own_shape():
    def block(x, residual):
        s = reduce(x * 2)
        h = s.view(2, 3, HIDDEN) + residual
        return ops.quantize(norm(h), FP8, SCALE)[0], s.abs()

    got = check(block, rows(6, HIDDEN), rows(2, 3, HIDDEN, seed=1), kinds=[FULL])
    assert got.report.fused[0].seam.outputs == ("reduced",)


def test_symbolic_batch_and_length_stay_symbolic():
    def block(x, residual):
        s = reduce(x * 2)
        h = s.view(residual.shape) + residual
        y = norm(h).view(-1, HIDDEN)
        return ops.quantize(y, NVFP4, SCALE)[1], h, s + 1

    for batch in (2, 3, 5):
        got = run_fused(block, rows(batch * 4, HIDDEN), rows(batch, 4, HIDDEN, seed=1), dynamic=True)
        want = block(rows(batch * 4, HIDDEN), rows(batch, 4, HIDDEN, seed=1))
        assert got.kinds() == ["all_reduce + residual + rms_norm + nvfp4"]
        assert all(same_bits(a, b) for a, b in zip(want, got.results, strict=True))
        assert "s" in got.report.fused[0].shape.split(" x ")[0], got.report.fused[0].shape


def test_compiled_at_one_batch_runs_at_another():
    import torchseam

    def block(x, residual):
        h = reduce(x * 2).view(residual.shape) + residual
        return ops.quantize(norm(h).view(-1, HIDDEN), FP8, SCALE)[0], h

    with torch.no_grad():
        compiled = torchseam.compile(block, fullgraph=True, dynamic=True)
        for batch in (2, 3, 7):
            args = rows(batch * 4, HIDDEN), rows(batch, 4, HIDDEN, seed=1)
            assert all(same_bits(a, b) for a, b in zip(block(*args), compiled(*args), strict=True))
    report = torchseam.report(compiled)
    assert (report.fused, len(report.graphs)) == (1, 1), "a second graph was compiled for another batch"


def test_two_quantisers_and_a_router_read_one_norm():
    router = rows(HIDDEN, 4, seed=5)

    def block(x, residual):
        h = reduce(x * 2) + residual
        y = norm(h)
        return *ops.quantize(y, FP8, SCALE), *ops.quantize(y, Quant("fp8_token")), y @ router, h

    got = check(
        block,
        rows(3, HIDDEN),
        rows(3, HIDDEN, seed=1),
        kinds=["all_reduce + residual + rms_norm + fp8_static + fp8_token"],
    )
    assert got.report.fused[0].seam.outputs == ("residual", "norm")


def test_twin_quantisers_become_one():
    def block(x, residual):
        h = reduce(x * 2) + residual
        y = norm(h)
        return *ops.quantize(y, FP8, SCALE), *(t.float() for t in ops.quantize(y, FP8, SCALE)), h

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=[FULL])
    assert got.after[0].count("torchseam.quantize") == 0


def test_nothing_that_nobody_reads_is_emitted():
    def block(x, residual):
        return ops.quantize(norm(reduce(x * 2) + residual), FP8, SCALE)[0]

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=[FULL])
    assert got.report.fused[0].seam.outputs == ()


def test_an_inner_value_of_the_norm_read_elsewhere_keeps_its_value():
    def block(x, residual):
        h = reduce(x * 2) + residual
        wide = h.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        y = norm.weight * (wide * torch.rsqrt(variance + EPS)).to(h.dtype)
        return ops.quantize(y, FP8, SCALE)[0], variance

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=[FULL])
    assert "residual" in got.report.fused[0].seam.outputs


def test_the_inner_norm_of_a_sandwich_read_elsewhere_keeps_its_value():
    inner = GemmaNorm(weight())

    def block(x, residual):
        n = inner(reduce(x * 2))
        return ops.quantize(norm(residual + n), FP8, SCALE)[0], n

    check(
        block,
        rows(3, HIDDEN),
        rows(3, HIDDEN, seed=1),
        kinds=["all_reduce + rms_norm + residual + rms_norm + fp8_static"],
    )


def test_layers_in_a_row_share_the_residual():
    def block(x, residual):
        outs = []
        h = residual
        for i in range(3):
            h = h + reduce(x * (i + 2))
            outs += ops.quantize(norm(h), FP8, SCALE)
        return *outs, h

    check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=[FULL] * 3)


def test_a_scale_defined_late_keeps_the_order_topological():
    def block(x, residual, raw):
        h = reduce(x * 2) + residual
        early = h * 2  # reads h before the scale exists
        scale = raw.exp()
        return ops.quantize(norm(h), FP8, scale)[0], early

    check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), torch.tensor(-4.0), kinds=[FULL])


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12, 9.999999974752427e-07, 0.0])
def test_epsilon_is_read_never_listed(eps):
    def block(x):
        y = torch.nn.functional.rms_norm(reduce(x * 2), (HIDDEN,), norm.weight, eps)
        return ops.quantize(y, FP8, SCALE)[0]

    got = check(block, rows(3, HIDDEN), kinds=["all_reduce + rms_norm + fp8_static"])
    assert got.report.fused[0].seam.norm.eps == pytest.approx(eps, rel=1e-7)


def test_an_empty_batch_gives_well_shaped_outputs():
    def block(x, residual):
        h = reduce(x * 2) + residual
        return *ops.quantize(norm(h), Quant("nvfp4"), SCALE), h

    got = check(block, rows(0, HIDDEN), rows(0, HIDDEN), kinds=["all_reduce + residual + rms_norm + nvfp4"])
    assert [tuple(t.shape) for t in got.results] == [(0, HIDDEN // 2), (0, 8), (0, HIDDEN)]


def test_gemma_weight_near_one_thousandth_is_not_rounded_to_bf16():
    small = GemmaNorm(torch.full((HIDDEN,), 1e-3))

    def block(x):
        return ops.quantize(small(reduce(x * 2)), FP8, SCALE)[0]

    got = check(block, rows(3, HIDDEN), kinds=["all_reduce + rms_norm + fp8_static"])
    assert got.report.fused[0].seam.norm.offset == 1


def test_a_weight_that_the_model_rounds_is_used_as_rounded():
    wide = weight(torch.float32)

    def block(x):
        h = reduce(x * 2)
        n = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + EPS)
        return ops.quantize(wide.to(h.dtype) * n.to(h.dtype), FP8, SCALE)[0]

    check(block, rows(3, HIDDEN), kinds=["all_reduce + rms_norm + fp8_static"])


def test_the_operator_called_with_keywords_is_found():
    def block(x):
        y = norm(reduce(x * 2))
        return torch.ops.torchseam.quantize(y=y, quant=FP8.to_text(), scale=SCALE)[0]

    check(block, rows(3, HIDDEN), kinds=["all_reduce + rms_norm + fp8_static"])


def test_parallel_attention_and_mlp_take_the_last_sum():
    def block(x, residual):
        h = residual + reduce(x * 2) + reduce(x * 3)
        return ops.quantize(norm(h), FP8, SCALE)[0], h

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=[FULL])
    assert refusals(got) == [("all_reduce", Reason.NO_NORM)]


def test_two_norms_read_one_sum():
    other = GemmaNorm(weight())

    def block(x, residual):
        h = reduce(x * 2) + residual
        return *ops.quantize(norm(h), FP8, SCALE), *ops.quantize(other(h), Quant("fp8_token")), h

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=[FULL, "rms_norm + fp8_token"])
    assert got.after[0].count("_c10d_functional") == 0


def test_collectives_keep_their_order():
    """The operator stands where the norm was; past another collective it would swap the two sums of one rank."""

    def block(x, y):
        a, b = reduce(x * 2), reduce(y * 3)
        return norm(a), b

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=[])
    assert ("all_reduce", Reason.COLLECTIVE_BETWEEN) in refusals(got)

    def in_order(x, y):
        n = norm(reduce(x * 2))
        return n, reduce(y * 3)

    check(in_order, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=["all_reduce + rms_norm"])


@pytest.mark.parametrize(
    "spelling",
    [
        lambda h: torch.rsqrt(torch.mean(h.float().pow(2), dim=None, keepdim=True) + EPS),
        lambda h: torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + -1e-6),
        lambda h: torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True, dtype=torch.float64) + EPS).float(),
    ],
    ids=["mean of everything", "negative epsilon", "mean in float64"],
)
def test_what_only_looks_like_a_norm_compiles_and_keeps_its_values(spelling):
    def block(x):
        h = reduce(x * 2)
        return (h.float() * spelling(h)).to(h.dtype)

    check(block, rows(3, HIDDEN), kinds=[])


def test_a_root_of_a_scalar_compiles():
    check(lambda x: torch.rsqrt(x.float().sum().pow(2).mean(0) + EPS), rows(3, HIDDEN), kinds=[])


def test_only_the_last_of_two_all_reduces_is_absorbed():
    other = dist.new_group([0])

    def block(x):
        y = norm(funcol.all_reduce(reduce(x * 2), "sum", other))
        return ops.quantize(y, FP8, SCALE)[0]

    got = check(block, rows(3, HIDDEN), kinds=["all_reduce + rms_norm + fp8_static"])
    assert got.report.fused[0].seam.reduce.group == other.group_name
    assert got.after[0].count("_c10d_functional.all_reduce") == 1
    assert [r.reason for r in got.report.refused] == [Reason.NO_NORM]


# ---- refusals: one test for each guard ----------------------------------------------------------


def refusals(got):
    return [(r.part, r.reason) for r in got.report.refused]


def test_average_is_refused_and_the_norm_still_fuses():
    def block(x):
        return ops.quantize(norm(funcol.all_reduce(x * 2, "avg", dist.group.WORLD)), FP8, SCALE)[0]

    def sum_instead(x):  # gloo has no average; one rank's average is its sum
        return ops.quantize(norm(reduce(x * 2)), FP8, SCALE)[0]

    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    from torchseam.compiler.fusion_pass import run_pass

    for function, kinds, reasons in (
        (block, ["rms_norm + fp8_static"], [("all_reduce", Reason.ALL_REDUCE_NOT_SUM)]),
        (sum_instead, ["all_reduce + rms_norm + fp8_static"], []),
    ):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            gm = make_fx(function, select_decomp_table(), tracing_mode="real")(torch.empty(3, HIDDEN).bfloat16())
        report = run_pass(gm.graph, SeamConfig())
        assert [f.kind for f in report.fused] == kinds
        assert [(r.part, r.reason) for r in report.refused] == reasons


def test_all_reduce_without_a_norm_is_reported():
    got = check(lambda x: reduce(x * 2) * 3, rows(3, HIDDEN), kinds=[])
    assert refusals(got) == [("all_reduce", Reason.NO_NORM)]
    assert "mul" in got.report.refused[0].detail


def test_residual_of_another_dtype_is_refused_and_the_norm_still_fuses():
    wide = TorchNorm(weight(torch.float32))

    def block(x, residual):
        h = reduce(x * 2) + residual
        return ops.quantize(wide(h), FP8, SCALE)[0], h

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, dtype=torch.float32), kinds=["rms_norm + fp8_static"])
    assert refusals(got) == [("all_reduce", Reason.NO_NORM)] or ("residual", Reason.DTYPE) in refusals(got)


def test_a_mean_over_part_of_the_row_is_refused():
    def block(x):
        wide = reduce(x * 2).float()
        scale = torch.rsqrt(wide[..., : HIDDEN // 2].pow(2).mean(-1, keepdim=True) + EPS)
        return ops.quantize((wide * scale).to(x.dtype), FP8, SCALE)[0]

    got = check(block, rows(3, HIDDEN), kinds=[])
    assert ("norm", Reason.PARTIAL_ROW) in refusals(got)


def test_a_mean_over_another_dimension_is_refused():
    def block(x):
        wide = reduce(x * 2).float()
        return (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + EPS)).to(x.dtype)

    got = check(block, rows(HIDDEN, HIDDEN), kinds=[])
    assert ("norm", Reason.PARTIAL_ROW) in refusals(got)


def test_an_unreadable_spelling_is_refused():
    def block(x, gate):
        wide = reduce(x * 2).float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * gate).to(x.dtype)

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, dtype=torch.float32), kinds=[])
    assert ("norm", Reason.NORM_SPELLING) in refusals(got)


@pytest.mark.parametrize("root", [torch.sqrt, lambda v: v**0.5], ids=["sqrt", "pow"])
def test_division_by_the_root_is_refused_with_what_would_fuse(root):
    def block(x):
        wide = reduce(x * 2).float()
        return (wide / root(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    got = check(block, rows(3, HIDDEN), kinds=[])
    assert ("norm", Reason.NORM_SPELLING) in refusals(got)
    (detail,) = [r.detail for r in got.report.refused if r.part == "norm"]
    assert "x * rsqrt(v)" in detail


def test_the_division_of_something_else_is_no_norm_and_nothing_to_complain_of():
    def block(x, y):
        wide = reduce(x * 2).float()
        return y / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, dtype=torch.float32), kinds=[])
    assert [reason for part, reason in refusals(got) if part == "norm"] == []


def test_a_scale_computed_from_the_norm_is_refused_and_the_rest_fuses():
    def block(x, residual):
        h = reduce(x * 2) + residual
        y = norm(h)
        scale = y.float().abs().amax() / 448
        return ops.quantize(y, FP8, scale)[0], h

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=["all_reduce + residual + rms_norm"])
    assert refusals(got) == [("fp8_static", Reason.DEPENDENCE)]


def test_a_residual_computed_from_the_sum_is_refused():
    def block(x):
        s = reduce(x * 2)
        return ops.quantize(norm(s + s.abs()), FP8, SCALE)[0]

    got = check(block, rows(3, HIDDEN), kinds=["rms_norm + fp8_static"])
    assert ("residual", Reason.DEPENDENCE) in refusals(got)


def test_a_scale_of_another_dtype_is_refused():
    def block(x):
        y = norm(reduce(x * 2))
        return (y.float() / SCALE.double()).clamp(-448, 448).to(torch.float8_e4m3fn)

    got = check(block, rows(3, HIDDEN), kinds=["all_reduce + rms_norm"])
    assert refusals(got) in ([], [("fp8_static", Reason.DTYPE)])


@pytest.mark.parametrize(
    ("config", "kinds", "part"),
    [
        (SeamConfig(fuse_all_reduce=False), ["residual + rms_norm + fp8_static"], "all_reduce"),
        (SeamConfig(schemes=("nvfp4",)), ["all_reduce + residual + rms_norm"], "fp8_static"),
    ],
)
def test_configuration_switches_parts_off(config, kinds, part):
    def block(x, residual):
        h = reduce(x * 2) + residual
        return ops.quantize(norm(h), FP8, SCALE)[0], h

    got = check(block, rows(3, HIDDEN), rows(3, HIDDEN, seed=1), kinds=kinds, config=config)
    assert refusals(got) == [(part, Reason.DISABLED)]


def test_norm_quant_alone_can_be_switched_off():
    def block(x):
        return ops.quantize(norm(x * 2), FP8, SCALE)[0]

    got = check(block, rows(3, HIDDEN), kinds=[], config=SeamConfig(fuse_norm_quant=False))
    assert refusals(got) == [("norm", Reason.DISABLED)]


def test_a_plain_norm_is_no_seam_unless_exactness_is_asked_for():
    got = check(lambda x: norm(x * 2), rows(3, HIDDEN), kinds=[])
    assert (got.report.plain_norms, got.report.exact_norms, got.report.refused) == (1, 0, ())
    got = check(lambda x: norm(x * 2), rows(3, HIDDEN), kinds=[], config=SeamConfig(exact=True))
    assert (got.report.plain_norms, got.report.exact_norms) == (0, 1)
    assert "torchseam.seam" in got.after[0]


def test_an_unsaturated_cast_is_not_taken_for_a_quantiser():
    def block(x):
        return (norm(reduce(x * 2)).float() / SCALE).clamp(-400, 400).to(torch.float8_e4m3fn)

    check(block, rows(3, HIDDEN), kinds=["all_reduce + rms_norm"])


def test_every_refusal_names_the_users_line():
    got = check(lambda x: reduce(x * 2) * 3, rows(3, HIDDEN), kinds=[])
    assert "test_find.py" in got.report.refused[0].source
    assert got.report.refused[0].remedy
