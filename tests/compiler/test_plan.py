"""What only shows when several seams of one graph are planned together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as funcol

from blocks import HIDDEN, GemmaNorm, LlamaNorm, same_bits
from graphs import run_fused
from pretend_group import pretend_group
from torchseam import Quant, SeamConfig, ops
from torchseam.compiler.report import Reason

pytestmark = pytest.mark.usefixtures("one_rank")

FP8 = Quant("fp8_static")
SCALE = torch.tensor(0.01)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def norms() -> tuple[torch.nn.Module, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(n((torch.rand(HIDDEN, generator=generator) + 0.5).bfloat16()) for n in (LlamaNorm, GemmaNorm))


@pytest.fixture
def reduce(one_rank):
    name = pretend_group(3)
    return lambda x: funcol.all_reduce(x, "sum", name)


def check(function, config=None):
    """Same bits as eager; returns the kinds and the refusals."""
    want = function(rows(0), rows(1))
    got = run_fused(function, rows(0), rows(1), config=config)
    assert all(same_bits(a, b) for a, b in zip(want, got.results, strict=True))
    return got.kinds(), [(r.part, r.reason) for r in got.report.refused]


def test_two_seams_whose_scales_need_each_others_norm(reduce):
    """Each may fuse while the other does not; both together would be a cycle."""
    first, second = norms()

    def model(x, y):
        a, b = first(reduce(x * 2)), second(reduce(y * 2))
        from_b, from_a = (n.float().abs().amax() / 448 for n in (b, a))
        return *ops.quantize(a, FP8, from_b), *ops.quantize(b, FP8, from_a)

    assert check(model) == (
        ["all_reduce + rms_norm + fp8_static", "all_reduce + rms_norm"],
        [("fp8_static", Reason.DEPENDENCE)],
    )


def test_two_seams_whose_residuals_need_each_others_sum(reduce):
    first, second = norms()

    def model(x, y):
        a, b = reduce(x * 2), reduce(y * 2)
        return first(a + b.abs()), second(b + a.abs())

    # The first sum also has another collective before its norm, which is refused before the ring is looked at.
    assert check(model) == (["all_reduce + residual + rms_norm"], [("all_reduce", Reason.COLLECTIVE_BETWEEN)])


def test_three_seams_in_a_ring(reduce):
    """No two of them need each other."""
    first, second = norms()

    def model(x, y):
        a, b, c = first(reduce(x * 2)), second(reduce(y * 2)), first(reduce(x * 3))
        scales = [n.float().abs().amax() / 448 for n in (b, c, a)]
        return tuple(ops.quantize(n, FP8, s)[0] for n, s in zip((a, b, c), scales, strict=True))

    kinds, refused = check(model)
    assert sorted(kinds) == ["all_reduce + rms_norm", *["all_reduce + rms_norm + fp8_static"] * 2]
    assert refused == [("fp8_static", Reason.DEPENDENCE)]


def test_a_scale_from_the_seam_before_is_no_obstacle(reduce):
    first, second = norms()

    def model(x, y):
        a = first(reduce(x * 2))
        b = second(reduce(y * 2) + x)
        return *ops.quantize(a, FP8, SCALE), *ops.quantize(b, FP8, a.float().abs().amax() / 448)

    assert check(model) == (["all_reduce + rms_norm + fp8_static", "all_reduce + residual + rms_norm + fp8_static"], [])


def test_layers_that_share_an_inverted_scale_and_a_norm_fuse_all(reduce):
    """`1 / scale` and the widened weight are computed once, before the first layer: they belong to no seam."""
    (_, shared) = norms()

    def model(x, y):
        inverse, weight = SCALE.reciprocal(), 1.0 + shared.weight.float()

        def norm(h):
            wide = h.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(h.dtype)

        h, outs = norm(y), []  # a plain norm: the first residual needs the weight
        for i in range(3):
            h = h + reduce(x * (i + 1))
            outs.append((norm(h).float() * inverse).clamp(-448.0, 448.0).to(torch.float8_e4m3fn))
            x = outs[-1].to(torch.bfloat16) * 0.01
        return *outs, h

    assert check(model) == (["all_reduce + residual + rms_norm + fp8_static"] * 3, [])


def test_a_norm_that_is_no_seam_leaves_the_residual_to_one_that_is():
    first, second = norms()

    def model(x, y):
        h = x * 2 + y
        return first(h), *ops.quantize(second(h), FP8, SCALE)

    assert check(model) == (["residual + rms_norm + fp8_static"], [])
    kinds, refused = check(model, SeamConfig(exact=True))
    assert (kinds, refused) == (["residual + rms_norm + fp8_static"], [])


def exact_and_not(function):
    return tuple(check(function, SeamConfig(exact=exact))[0] for exact in (False, True))


def test_with_exactness_an_inner_norm_that_is_read_elsewhere_is_an_operator_too(reduce):
    """Otherwise Inductor computes it again for its other reader, in another order than eager's."""
    first, second = norms()

    def model(x, y):
        n = first(reduce(x * 2))
        return *ops.quantize(second(y + n), FP8, SCALE), n.abs()

    assert exact_and_not(model) == (
        ["all_reduce + rms_norm + residual + rms_norm + fp8_static"],
        ["all_reduce + rms_norm", "rms_norm + fp8_static"],
    )


def test_with_exactness_a_sandwich_whose_sum_is_read_elsewhere_stays_whole(reduce):
    first, second = norms()

    def model(x, y):
        s = reduce(x * 2)
        return *ops.quantize(second(y.view(1, 3, HIDDEN) + first(s.view(1, 3, HIDDEN))), FP8, SCALE), s.abs()

    assert exact_and_not(model) == (["all_reduce + rms_norm + residual + rms_norm + fp8_static"],) * 2


@pytest.mark.parametrize("exact", [False, True])
def test_both_norms_of_a_sandwich_without_its_sum_are_counted(one_rank, exact):
    first, second = norms()
    name = pretend_group(3)

    def model(x, y):
        return second(y + first(funcol.all_reduce(x * 2, "avg", name)))

    want = model(rows(0), rows(1))
    got = run_fused(model, rows(0), rows(1), config=SeamConfig(exact=exact))
    assert same_bits(want, got.results)
    counts = (got.report.plain_norms, got.report.exact_norms, got.after[0].count("torchseam.seam"))
    assert counts == ((0, 2, 2) if exact else (2, 0, 0))
    assert [r.reason for r in got.report.refused] == [Reason.ALL_REDUCE_NOT_SUM]
