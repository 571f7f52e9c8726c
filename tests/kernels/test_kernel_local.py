"""The local kernel in Triton's interpreter against the reference: DESIGN section 4 over the whole table."""

from __future__ import annotations

import dataclasses

import kernel_cases
import pytest
import torch
from kernel_cases import Case, Inputs, canonical_reduction, inputs, same, storage
from torch import Tensor

from torchseam import reference
from torchseam.kernels import launch, local
from torchseam.seam import SCALE_ROUNDINGS, SCALE_RULES, Norm, Quant, Seam

TABLE = kernel_cases.cases()
ALL_OUT = ("residual", "norm")

#: The interpreter computes with NumPy, which warns of what IEEE arithmetic defines (0 * inf).
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def run(seam: Seam, given: Inputs) -> list[Tensor]:
    return local.run(seam, given.operands())


def expected(seam: Seam, given: Inputs) -> list[Tensor]:
    with canonical_reduction():
        return reference.run(seam, given.operands())


@pytest.fixture
def poisoned():
    with kernel_cases.poisoned_outputs():
        yield


@pytest.mark.parametrize("index", range(len(TABLE)))
def test_every_combination_meets_the_contract(index):
    case = TABLE[index]
    # Every third also as the case itself, which emits less than all there is.
    broken = kernel_cases.check(case, inputs(case, tokens=2), local.run, local.quantize, also_own=index % 3 == 0)
    assert not broken, f"{case}: {broken}"


def test_rows_whose_squares_are_subnormal_are_normalised():
    case, given = kernel_cases.tiny_case()
    assert not kernel_cases.check(case, given, local.run, local.quantize)


@pytest.mark.parametrize("tokens", [0, 1, 5, 129])
@pytest.mark.parametrize(
    "quant",
    [
        *kernel_cases.PADDED_QUANTIZERS,
        Quant("fp8_static"),
        Quant("fp8_group", scale_layout="column_major"),
        Quant("nvfp4", scale_layout="linear"),
    ],
    ids=lambda q: f"{q.scheme}-{q.scale_dtype}-{q.scale_layout}",
)
@pytest.mark.parametrize("hidden", [640])
def test_every_byte_of_the_outputs_is_written(quant, tokens, hidden, poisoned):
    seam = Seam(norm=Norm(1e-6), residual=True, quants=(quant,), outputs=ALL_OUT)
    given = inputs(Case(seam, None, hidden, torch.bfloat16), tokens, special=False)
    for got, wanted in zip(run(seam, given), expected(seam, given), strict=True):
        assert same(got, wanted)
        assert torch.equal(storage(got), storage(wanted))


@pytest.mark.parametrize("hidden", [16, 464, 1040])
def test_swizzled_columns_are_padded_with_zeros(hidden, poisoned):
    quant, y = Quant("nvfp4"), torch.randn(33, hidden)
    scale = torch.tensor([700.0])
    for got, wanted in zip(local.quantize(y, quant, scale), reference.quantize(y, quant, scale), strict=True):
        assert torch.equal(storage(got), storage(wanted))


@pytest.mark.parametrize("hidden", [128, 256, 384, 512, 640, 1024])
def test_packed_words_are_filled_with_zeros_past_the_last_group_and_token(hidden, poisoned):
    """From one group in a word to four, in programs with fewer lanes than a word has bytes too."""
    quant = Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed")
    for tokens in (1, 2, 3, 4, 5):
        y = torch.randn(tokens, hidden)
        for got, wanted in zip(local.quantize(y, quant, None), reference.quantize(y, quant), strict=True):
            assert same(got, wanted)
            assert torch.equal(storage(got), storage(wanted))


@pytest.mark.parametrize("quant", [Quant("fp8_token"), Quant("fp8_group"), Quant("nvfp4", scale_layout="linear")])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(quant):
    seam = Seam(norm=Norm(1e-6), residual=True, quants=(quant,), outputs=ALL_OUT)
    given = inputs(Case(seam, None, 640, torch.bfloat16), 4)
    together = run(seam, given)
    poisoned = dataclasses.replace(given, x=given.x.clone())
    poisoned.x[1::2] = torch.nan
    beside_nan = run(seam, poisoned)
    for row in range(0, given.x.shape[0], 2):
        alone = run(seam, given.rows(slice(row, row + 1)))
        for one, many, mixed in zip(alone, together, beside_nan, strict=True):
            assert torch.equal(kernel_cases.bits(one[0]), kernel_cases.bits(many[row]))
            assert torch.equal(kernel_cases.bits(one[0]), kernel_cases.bits(mixed[row]))


def _strided() -> dict[str, Tensor]:
    base = torch.randn(2, 3, 1280).bfloat16()
    return {
        "leading dims": base,
        "half of each row": base[..., :640],
        "every second row": base[:, ::2],
        "transposed leading dims": base.transpose(0, 1),
        "one row, repeated": base[0, :1].expand(4, -1),
        "last dim not contiguous": base[..., ::2],
        "one dim": base[0, 0],
    }


@pytest.mark.parametrize("name", _strided())
def test_strides_and_leading_dims_are_honoured(name):
    x = _strided()[name]
    seam = Seam(norm=Norm(1e-6), residual=True, quants=(Quant("fp8_group"),), outputs=ALL_OUT)
    weight = torch.randn(2 * x.shape[-1])[::2]
    given = Inputs(x, torch.randn(x.shape).bfloat16(), None, weight, [])
    for got, wanted in zip(run(seam, given), expected(seam, given), strict=True):
        assert same(got, wanted)


def test_rows_are_viewed_without_a_copy():
    x = torch.randn(2, 3, 1280)
    for view in (x, x[..., :640], x[0]):
        assert local.as_rows(view).data_ptr() == view.data_ptr()


@pytest.mark.parametrize("outputs", [(), ("norm",), ALL_OUT])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_several_quantisers_read_the_same_norm(outputs, weight_dtype):
    quants = (Quant("nvfp4"), Quant("fp8_static"), Quant("fp8_group", scale_layout="tma_aligned"))
    seam = Seam(norm=Norm(1e-6, "after_cast"), residual=True, quants=quants, outputs=outputs)
    given = inputs(Case(seam, None, 640, torch.bfloat16, weight_dtype), 3)
    for got, wanted in zip(run(seam, given), expected(seam, given), strict=True):
        assert same(got, wanted)


@pytest.mark.parametrize("how", [("divide", "none"), ("reciprocal", "activation")], ids="-".join)
@pytest.mark.parametrize("floor", [0.0, 1e-3, 1e-40])
@pytest.mark.parametrize("scheme", ["fp8_token", "fp8_group"])
def test_the_scale_floor_is_the_recipes(scheme, floor, how):
    quant = Quant(scheme, scale_floor=floor, scale_rule=how[0], scale_rounding=how[1])
    y = torch.cat([torch.zeros(1, 256), torch.randn(2, 256) * torch.tensor([[1e-4], [1.0]])])
    for got, wanted in zip(local.quantize(y, quant, None), reference.quantize(y, quant), strict=True):
        assert same(got, wanted)


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", kernel_cases.DTYPES)
def test_scales_are_made_as_the_format_makes_them_for_every_amax(dtype, rule, rounding):
    """One row an amax: all 32,768 positive bf16 or fp16 values, inf and NaN among them; random ones for fp32."""
    if dtype == torch.float32:
        amax = torch.randn(32768, generator=torch.Generator().manual_seed(0)) * 1e3
    else:
        amax = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    y = torch.zeros(512, 4096, dtype=dtype).view(512, 64, 64)
    y[:, :, 17] = amax.view(512, 64)
    quant = Quant("fp8_group", 64, scale_rule=rule, scale_rounding=rounding)
    for got, wanted in zip(
        local.quantize(y.view(512, 4096), quant, None), reference.quantize(y.view(512, 4096), quant), strict=True
    ):
        assert same(got, wanted)


def test_an_epsilon_of_zero_or_below_the_normal_range_is_kept():
    x = torch.cat([torch.randn(2, 128) * 1e-19, torch.zeros(1, 128)])
    for eps in (0.0, 1e-40):
        seam = Seam(norm=Norm(eps, "none"), outputs=("norm",))
        given = Inputs(x, None, None, None, [])
        assert same(run(seam, given)[0], expected(seam, given)[0])


@pytest.mark.parametrize("inner_norm", [None, Norm(0.0, "none")])
def test_lanes_past_the_row_never_reach_a_reduction(inner_norm):
    # The squares are 0 in fp32 and the factor inf: inf in each place of the row, 0 * inf past its end.
    x = torch.full((2, 464), 1e-30)
    seam = Seam(
        norm=Norm(0.0, "none"), inner_norm=inner_norm, residual=True, quants=(Quant("fp8_token"),), outputs=ALL_OUT
    )
    given = Inputs(x, torch.zeros_like(x), None, None, [])
    for got, wanted in zip(run(seam, given), expected(seam, given), strict=True):
        assert same(got, wanted)


def test_a_scale_that_is_not_one_float32_is_refused():
    with pytest.raises(ValueError, match="must be float32"):
        local.quantize(torch.randn(2, 64), Quant("fp8_static"), torch.ones(1, dtype=torch.float64))


def test_what_the_kernel_cannot_do_has_a_reason():
    assert local.unsupported(torch.empty(1, launch.MAX_HIDDEN, device="meta")) is None
    assert "32769" in local.unsupported(torch.empty(1, 32769, device="meta"))
    assert "rows" in local.unsupported(torch.empty(2**31, 8, device="meta"))


def test_the_largest_row_that_fits_runs():
    seam = Seam(norm=Norm(1e-6), residual=True, quants=(Quant("nvfp4", scale_layout="linear"),), outputs=ALL_OUT)
    case = Case(seam, None, launch.MAX_HIDDEN, torch.bfloat16)
    assert not kernel_cases.check(case, inputs(case, 2, special=False), local.run, local.quantize)
