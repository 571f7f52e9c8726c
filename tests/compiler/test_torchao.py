"""torchao's own quantisers, as the installed release spells them: nothing here is a copy of its nodes."""

from __future__ import annotations

import warnings

import pytest
import torch

from blocks import HIDDEN, same_bits
from graphs import run_fused
from quant_blocks import SHARED, TOKENS, Block, check, rows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it says of itself when it is imported is not ours to mend
    pytest.importorskip("torchao", reason="torchao is not installed (pip install torchseam[torchao])")
    from torchao.quantization import Float8Tensor
    from torchao.quantization.granularity import PerRow, PerTensor
    from torchao.quantization.quant_primitives import _quantize_affine_float8
    from torchao.quantization.quantize_.common import KernelPreference

pytestmark = pytest.mark.usefixtures("one_rank")


def per_row(y, **bounds):
    quantised = Float8Tensor.from_hp(y, granularity=PerRow(), kernel_preference=KernelPreference.TORCH, **bounds)
    return quantised.qdata, quantised.scale


@pytest.mark.parametrize("shape", [(TOKENS,), (2, 3), (1,)], ids=str)
@pytest.mark.parametrize("floor", [None, 1e-12, 2.5])
def test_per_row_dynamic_is_fused(shape, floor):
    report = check(lambda y, h: per_row(y, hp_value_lb=floor), "fp8_token", x=rows(*shape, HIDDEN))
    (quant,) = report.fused[0].seam.quants
    assert (quant.rule, quant.scale_rule, quant.scale_rounding) == ("divide", "divide", "activation")
    low = torch.tensor(floor or 0.0).bfloat16()
    assert quant.scale_floor == float(low / 448)


def test_per_row_dynamic_with_symbolic_sizes():
    block = Block(lambda y, h: per_row(y.view(-1, HIDDEN)))
    for batch in (2, 5):
        x, residual = rows(batch, 4, HIDDEN), rows(batch, 4, HIDDEN, seed=1)
        got = run_fused(block, x, residual, dynamic=True)
        assert got.kinds() == [f"{SHARED} + fp8_token"]
        assert all(same_bits(a, b) for a, b in zip(block(x, residual), got.results, strict=True))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_per_tensor_static_is_fused(shape):
    scale = torch.nn.Parameter(torch.full(shape, 0.01), requires_grad=False)
    report = check(lambda y, h: [_quantize_affine_float8(y, scale * 1)], "fp8_static")
    assert report.fused[0].seam.quants[0].rule == "divide"


def test_what_no_recipe_has_is_left_alone():
    check(lambda y, h: per_row(y, hp_value_ub=1.0))
    per_tensor = Float8Tensor.from_hp

    def dynamic(y, h):
        quantised = per_tensor(y, granularity=PerTensor(), kernel_preference=KernelPreference.TORCH)
        return quantised.qdata, quantised.scale

    check(dynamic)
