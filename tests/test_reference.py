"""The reference against the float64 oracle, against eager modules, and row against row.

Tolerances are those of DESIGN section 4: residual_out and codes bitwise, the norm within 1 ulp of the
activation dtype and never worse than eager. Inputs are seeded, so a result is the same on every run.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cases
import oracle
from torchseam import reference
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

HIDDEN = (256, 640)  # both fit every group size; 640 is no power of two, so its mean rounds
TOKENS = (0, 1, 5)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on two, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(x: Tensor) -> Tensor:
    """Comparable bit for bit: -0.0 isn't 0.0, and every NaN is the same (its payload is no result)."""
    if x.is_floating_point() and x.dtype.itemsize > 1:
        x = torch.where(x.isnan(), torch.full_like(x, NAN), x)
    elif x.dtype == torch.float8_e4m3fn:
        x = x.view(torch.uint8)
        x = torch.where(x % 128 == 127, 127, x)
    return x.contiguous().flatten().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def all_same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def run(seam: Seam, given: dict, **keywords) -> list[Tensor]:
    return reference.run(seam, Operands(**given), **keywords)


# ---- eager: the spellings of the models themselves ----------------------------------------------


class LlamaRMSNorm(nn.Module):
    """transformers 5, models/llama/modeling_llama.py."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaRMSNorm(nn.Module):
    """transformers 5, models/gemma3/modeling_gemma3.py."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class WeightlessRMSNorm(nn.Module):
    """transformers 5, models/gemma3n/modeling_gemma3n.py with with_scale=False."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


def eager(norm: Norm, weight: Tensor | None, hidden: int) -> nn.Module:
    if norm.weight == "none":
        return WeightlessRMSNorm(norm.eps)
    if norm.weight == "after_cast":
        return LlamaRMSNorm(weight, norm.eps)
    if norm.offset:
        return GemmaRMSNorm(weight, norm.eps)
    module = nn.RMSNorm(hidden, eps=norm.eps)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def is_torchs_own(norm: Norm) -> bool:
    """nn.RMSNorm: the order of its row reduction is torch's business."""
    return norm.weight == "before_cast" and not norm.offset


# ---- against the oracle ---------------------------------------------------------------------------


@pytest.mark.parametrize("stretch", cases.STRETCHES, ids=str)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_every_seam_against_the_oracle_and_eager(stretch):
    """One seam with all 45 quantisers at once: their scales must reach them in order."""
    seam = stretch.seam(quants=cases.QUANTS)
    for hidden, tokens in itertools.product(HIDDEN, TOKENS):
        given = cases.arguments(seam, (tokens,), hidden, stretch.dtype, stretch.weight_dtype, seed=hidden + tokens)
        values, quantized = cases.split(seam, run(seam, given))

        s, module = given["x"], eager(stretch.norm, given["weight"], hidden)
        if stretch.kind == "sandwich":
            inner_module = eager(stretch.norm, given["inner_weight"], hidden)
            inner = reference.rms_norm(s, given["inner_weight"], seam.inner_norm)
            assert oracle.rms_norm(s, given["inner_weight"], seam.inner_norm).allows(inner)
            if not is_torchs_own(stretch.norm):
                assert same(inner, inner_module(s))
            s = inner.to(stretch.dtype)
        h = s
        if stretch.kind != "none":
            h = values["residual"]
            assert h.dtype == stretch.dtype
            assert torch.equal(h.double(), oracle.add(s, given["residual"], stretch.dtype))
            assert same(h, s + given["residual"])

        y, expected = values["norm"], oracle.rms_norm(h, given["weight"], stretch.norm)
        assert y.dtype == expected.dtype and y.shape == h.shape and y.is_contiguous()
        assert expected.allows(y)
        in_eager = module(h)
        if is_torchs_own(stretch.norm):
            assert expected.allows(in_eager.to(y.dtype))
        else:
            assert same(y, in_eager)
        if tokens:
            assert expected.error(y).max() <= expected.error(in_eager).max()

        check_codes(seam, y, quantized, given["scales"])


def check_codes(seam: Seam, y: Tensor, quantized: list[list[Tensor]], scales: list[Tensor]) -> None:
    """Codes and scales are the oracle's for the rounded norm y, in the layout that the recipe says."""
    rest = iter(scales)
    for quant, results in zip(seam.quants, quantized, strict=True):
        expected = oracle.quantize(y, quant, next(rest) if quant.takes_scale else None)
        name = cases.describe(quant)
        assert torch.equal(oracle.read_codes(results[0], quant), expected.codes), name
        assert len(results) == 1 + (expected.scales is not None)
        if expected.scales is not None:
            found = oracle.read_scales(results[1], quant, tuple(y.shape[:-1]), y.shape[-1])
            assert torch.equal(found.nan_to_num(-1.0), expected.scales.nan_to_num(-1.0)), name


@pytest.mark.parametrize(
    ("inner", "outer"), list(itertools.product(cases.NORMS, repeat=2)), ids=lambda n: f"{n.weight}{n.offset}"
)
@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
def test_a_sandwich_of_two_spellings_is_the_two_norms_one_after_the_other(inner, outer, dtype):
    seam = Seam(outer, inner_norm=Norm(0.5, inner.weight, inner.offset), residual=True, outputs=("residual", "norm"))
    given = cases.arguments(seam, (5,), 256, dtype, FP32)
    residual, norm = run(seam, given)
    # eps 0.5 against 1e-6: were norms or weights swapped, neither line below would hold.
    first = reference.rms_norm(given["x"], given["inner_weight"], seam.inner_norm)
    assert oracle.rms_norm(given["x"], given["inner_weight"], seam.inner_norm).allows(first)
    assert torch.equal(residual.double(), oracle.add(first.to(dtype), given["residual"], dtype))
    assert oracle.rms_norm(residual, given["weight"], outer).allows(norm)


@pytest.mark.parametrize("eps", (*cases.EPSILONS, 0.0, 1.0))
@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
def test_epsilon_is_in_the_mean_also_where_it_is_most_of_it(eps, dtype):
    """Rows of about sqrt(eps) and of far less: there eps outside the root, or lost, shows."""
    for magnitude in (1.0, 1e-3, 1e-6):
        h = (torch.randn(3, 640, generator=torch.Generator().manual_seed(1)) * magnitude).to(dtype)
        if not h.double().square().sum(-1).all():
            continue  # fp16 has no 1e-6 squared; a zero row is another test
        norm = Norm(eps, "none")
        assert oracle.rms_norm(h, None, norm).allows(reference.rms_norm(h, None, norm))


def test_the_norm_reads_the_rounded_sum():
    """Rule 2: every fp32 sum below rounds in bf16, so a norm of the unrounded one differs."""
    seam = Seam(Norm(1e-6, "none"), residual=True, outputs=("residual", "norm"), quants=(Quant("fp8_token"),))
    given = cases.arguments(seam, (64,), 640, BF16)
    residual, norm, codes, _ = run(seam, given)
    unrounded = given["x"].float() + given["residual"].float()
    assert same(norm, reference.rms_norm(residual, None, seam.norm))
    assert not same(norm, reference.rms_norm(unrounded, None, seam.norm).to(BF16))
    assert same(codes, reference.quantize(norm, seam.quants[0])[0])


def test_gemma_weights_near_a_thousandth_are_not_lost():
    """FIELD 4.3: 1 + w in bf16 has steps of 2^-7, so it would be 1 for every w here."""
    norm = Norm(1e-6, "before_cast", 1)
    h = torch.randn(4, 640, generator=torch.Generator().manual_seed(2)).to(BF16)
    weight = (torch.rand(640, generator=torch.Generator().manual_seed(3)) * 4e-3).to(BF16)
    y = reference.rms_norm(h, weight, norm)
    expected = oracle.rms_norm(h, weight, norm)
    assert expected.allows(y)
    lost = reference.rms_norm(h, torch.zeros_like(weight), norm)
    assert expected.error(y).max() <= 0.5 + 2**-8 < expected.error(lost).max()


@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize("ranks", (1, 2, 3, 8))
def test_a_seam_that_reduces_goes_on_from_the_sum(ranks, dtype):
    seam = Seam(Norm(1e-6), Reduce("tp"), residual=True, outputs=("reduced", "residual", "norm"))
    given = cases.arguments(seam, (5,), 640, dtype)
    others = [cases.arguments(seam, (5,), 640, dtype, seed=r)["x"] for r in range(1, ranks)]
    total = oracle.reduce([given["x"], *others], dtype).to(dtype)
    reduced, *rest = run(seam, given, all_reduce=lambda x: total.clone() if x is given["x"] else None)
    assert same(reduced, total)
    assert all_same(rest, run(seam.local(), {**given, "x": total}))


@pytest.mark.parametrize("quant", cases.QUANTS, ids=cases.describe)
def test_dequantize_gives_what_the_codes_stand_for(quant):
    for lead in ((5,), (2, 3), (0,), ()):
        y = (torch.randn(*lead, 640, generator=torch.Generator().manual_seed(4)) * 3).to(BF16)
        scale = cases.scale_for(quant)
        results = reference.quantize(y, quant, scale)
        if quant.scheme == "nvfp4":
            back = reference.dequantize(results[0], scale, quant, results[1])
        else:
            back = reference.dequantize(results[0], results[1] if quant.emits_scale else scale, quant)
        assert back.dtype == FP32 and back.shape == y.shape
        expected = oracle.quantize(y, quant, scale).values
        assert torch.equal(back.double().reshape(expected.shape), expected)


# ---- payloads ---------------------------------------------------------------------------------------


def payload_rows(dtype: torch.dtype, hidden: int) -> Tensor:
    """One kind of trouble a row; the first is ordinary."""
    smallest = torch.finfo(dtype).smallest_normal
    rows = torch.randn(12, hidden, generator=torch.Generator().manual_seed(5))
    rows[1] = 0.0
    rows[2] = -0.0
    rows[3] *= 0.25 * smallest  # subnormals
    rows[4, 7] = NAN
    rows[5, 7] = INF
    rows[6, 7] = -INF
    rows[7, 7], rows[7, 8] = INF, -INF
    rows[8] = NAN
    rows[9, 1:] = 0.0  # a single number: most groups are zero
    rows[10, ::2] = -0.0
    rows[11, :16] = 0.0  # one zero block of NVFP4
    return rows.to(dtype)


@pytest.mark.parametrize("norm", cases.NORMS, ids=lambda n: f"{n.weight}{n.offset}")
@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
def test_payloads_match_the_oracle(dtype, norm):
    seam = Seam(norm, residual=True, outputs=("residual", "norm"), quants=cases.QUANTS)
    given = cases.arguments(seam, (12,), 640, dtype)
    for x, residual in (
        (payload_rows(dtype, 640), torch.zeros(12, 640, dtype=dtype)),
        (payload_rows(dtype, 640), torch.full((12, 640), -0.0, dtype=dtype)),
        (given["x"], payload_rows(dtype, 640)),
    ):
        values, quantized = cases.split(seam, run(seam, {**given, "x": x, "residual": residual}))
        h, y = values["residual"], values["norm"]
        expected = oracle.add(x, residual, dtype)
        assert torch.equal(bits(h.double()), bits(expected))
        assert oracle.rms_norm(h, given["weight"], norm).allows(y)
        check_codes(seam, y, quantized, given["scales"])


@pytest.mark.parametrize("quant", cases.QUANTS, ids=cases.describe)
@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
def test_payloads_quantise_as_the_oracle_says(dtype, quant):
    y = payload_rows(dtype, 640)
    scale = cases.scale_for(quant)
    seam = Seam(Norm(1e-6, "none"), quants=(quant,))
    check_codes(seam, y, [reference.quantize(y, quant, scale)], [] if scale is None else [scale])


class Fp8Casts(TorchDispatchMode):
    """Keeps the largest magnitude that is cast to e4m3."""

    largest = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.float8_e4m3fn:
            self.largest = max(self.largest, float(args[0].abs().nan_to_num(0.0, INF).max()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("quant", cases.QUANTS, ids=cases.describe)
def test_values_are_clamped_before_the_cast(quant):
    """What a cast makes of more than 448 differs between torch versions and devices; this one's saturates."""
    y = payload_rows(BF16, 640) * 1e4
    with Fp8Casts() as casts:
        reference.quantize(y, quant, cases.scale_for(quant))
    assert 0.0 < casts.largest <= 448.0


def test_minus_zero_stays_minus_zero():
    seam = Seam(Norm(1e-6, "none"), residual=True, outputs=("residual", "norm"))
    zeros = torch.full((2, 256), -0.0, dtype=BF16)
    for value in reference.run(seam, Operands(zeros, zeros)):
        assert bool((value.view(torch.int16) == -32768).all())


# ---- rows know nothing of each other ----------------------------------------------------------------

#: 32768 is where aten begins to share the sum of one row between threads; from 32768 + 128 on that
#: changes the bits (two halves of 32768 happen to be summed as the whole is).
ROW_SIZES = (640, 4096, 32768, 32768 + 128, 65536)


@pytest.fixture
def two_threads(one_thread):
    torch.set_num_threads(2)


@pytest.mark.parametrize("hidden", ROW_SIZES)
@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
@pytest.mark.usefixtures("two_threads")
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(dtype, hidden):
    h = torch.randn(24, hidden, generator=torch.Generator().manual_seed(6)).to(dtype)
    norm = Norm(1e-6, "none")
    batch = reference.rms_norm(h, None, norm)
    # The mean of squares is where order could show; in bf16 the norm hides most of it.
    means = reference._mean_of_squares(h.float())
    for i in range(len(h)):
        for alone in (h[i : i + 1], h[i], h[i].reshape(1, 1, -1)):
            mean = reference._mean_of_squares(alone.float())
            assert mean.shape == (*alone.shape[:-1], 1)
            assert torch.equal(mean.flatten(), means[i])
            assert same(reference.rms_norm(alone, None, norm), batch[i].reshape(alone.shape))
    for part in (h[:2], h[3:8], h[:23].contiguous()):
        start = int((h == part[0]).all(-1).nonzero()[0])
        assert torch.equal(reference._mean_of_squares(part.float()), means[start : start + len(part)])


@pytest.mark.usefixtures("two_threads")
def test_the_special_case_of_a_single_long_row_is_needed():
    """Without it the test above could not fail: aten's own sum of a row alone differs from the batch's."""
    rows = torch.randn(24, 65536, generator=torch.Generator().manual_seed(6)).square()
    alone = torch.cat([row.mean(-1, keepdim=True) for row in rows])
    if torch.equal(alone, rows.mean(-1)):
        pytest.skip(f"this torch does not split a row over {torch.get_num_threads()} threads")


@pytest.mark.parametrize("stretch", [s for s in cases.STRETCHES if s.weight_dtype == s.dtype], ids=str)
def test_every_seam_row_by_row_has_the_bits_of_the_batch(stretch):
    """The quantisers that have a scale per row or per part of it; layouts are flattened by the oracle's reader."""
    hidden, tokens = 640, 5
    seam = stretch.seam(quants=cases.QUANTS)
    given = cases.arguments(seam, (tokens,), hidden, stretch.dtype)
    values, quantized = cases.split(seam, run(seam, given))
    for i in range(tokens):
        one = {
            **given,
            "x": given["x"][i : i + 1],
            "residual": given["residual"][i : i + 1] if seam.residual else None,
        }
        row_values, row_quantized = cases.split(seam, run(seam, one))
        for name, value in values.items():
            assert same(row_values[name], value[i : i + 1])
        for quant, many, single in zip(seam.quants, quantized, row_quantized, strict=True):
            assert same(single[0], many[0][i : i + 1])
            if quant.emits_scale:
                alone = oracle.read_scales(single[1], quant, (1,), hidden)
                assert torch.equal(alone[0], oracle.read_scales(many[1], quant, (tokens,), hidden)[i])


def test_leading_dimensions_are_only_rows():
    case = cases.Case(Norm(1e-6), "residual", BF16, BF16)
    seam = case.seam(quants=cases.QUANTS)
    flat = cases.arguments(seam, (6,), 640, BF16)
    values, quantized = cases.split(seam, run(seam, flat))
    for lead in ((2, 3), (1, 6), (2, 1, 3)):
        shaped = {
            **flat,
            "x": flat["x"].reshape(*lead, 640),
            "residual": flat["residual"].reshape(*lead, 640),
        }
        shaped_values, shaped_quantized = cases.split(seam, run(seam, shaped))
        for name, value in values.items():
            assert same(shaped_values[name], value.reshape(*lead, 640))
        for quant, many, other in zip(seam.quants, quantized, shaped_quantized, strict=True):
            assert torch.equal(bits(other[0]), bits(many[0])) and other[0].shape[:-1] == lead
            if quant.emits_scale:
                assert torch.equal(
                    oracle.read_scales(other[1], quant, lead, 640),
                    oracle.read_scales(many[1], quant, (6,), 640),
                )


def test_a_sharded_residual_is_gathered_before_it_is_added():
    x, whole = torch.randn(3, 64), torch.randn(3, 64)
    mine = whole.clone()
    mine[1:] = float("nan")
    reduce = Reduce("g", residual_in="sharded", residual_out="sharded")
    seam = Seam(Norm(1e-6, "none"), reduce, residual=True, outputs=("residual", "norm"))
    full = dataclasses.replace(seam, reduce=Reduce("g"))
    got = reference.run(seam, Operands(x, mine), lambda t: t * 2, lambda residual: whole)
    expected = reference.run(full, Operands(x, whole), lambda t: t * 2)
    assert all(map(torch.equal, got, expected))
