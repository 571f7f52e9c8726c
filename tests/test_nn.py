"""QuantLinear against the oracle's quantiser and torch's own matrix product."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import cases
import oracle
from torchseam import ops
from torchseam.nn import QuantLinear, encode_factor, scaled_mm_available
from torchseam.seam import SCHEMES, Quant

IN, OUT = 256, 24
#: nn.QuantLinear's documented dtypes.
DTYPES = (torch.bfloat16, torch.float16)
TINY = 2.0**-126  # the least normal fp32: a weight row has a floor only so that it is not 0/0


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on two, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_as_stored(weight: Tensor, quant: Quant) -> Tensor:
    """dequantise(quantise(w)) by the oracle, in the weight's dtype."""
    factor = None
    if quant.scheme == "nvfp4":
        recipe = Quant("nvfp4", scale_layout="linear")
        factor = encode_factor(weight.abs().amax())  # has a test of its own below
    elif quant.scheme == "fp8_group":
        recipe = Quant("fp8_group", quant.group_size)
    else:
        recipe = Quant("fp8_token", scale_floor=TINY)
    return oracle.quantize(weight, recipe, factor).values.to(torch.float32).to(weight.dtype)


def expected_output(x: Tensor, weight: Tensor, quant: Quant, scale: Tensor | None) -> Tensor:
    values = oracle.quantize(x, quant, scale).values.to(torch.float32).to(weight.dtype)
    return F.linear(values.reshape(x.shape), weight_as_stored(weight, quant))


@pytest.mark.parametrize("quant", cases.QUANTS, ids=cases.describe)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_is_the_product_of_what_was_quantised(dtype, quant):
    weight, scale = random(OUT, IN, dtype=dtype, seed=0), cases.scale_for(quant)
    layer = QuantLinear(weight, None, quant, scale)
    for lead in ((5,), (2, 3), (), (0,), (1,)):
        x = random(*lead, IN, dtype=dtype, seed=1)
        y = layer(x)
        assert same(y, expected_output(x, weight, quant, scale))
        assert y.shape == (*lead, OUT)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_strided_weight_is_the_same_layer(scheme):
    quant = Quant(scheme)
    weight, x = random(OUT, IN, dtype=torch.bfloat16, seed=0), random(5, IN, dtype=torch.bfloat16, seed=1)
    strided = weight.t().contiguous().t()
    scale = cases.scale_for(quant)
    assert same(QuantLinear(strided, None, quant, scale)(x), QuantLinear(weight, None, quant, scale)(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_given_weight_and_input_are_left_alone(scheme):
    quant = Quant(scheme)
    weight, x = random(OUT, IN, dtype=torch.bfloat16, seed=0), random(5, IN, dtype=torch.bfloat16, seed=1)
    before = weight.clone(), x.clone()
    layer = QuantLinear(weight, None, quant, cases.scale_for(quant))
    layer(x)
    assert same(weight, before[0]) and same(x, before[1])
    assert all(b.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr() for b in layer.buffers())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bias_is_added_after_the_product(scheme):
    quant = Quant(scheme)
    weight, x = random(OUT, IN, dtype=torch.bfloat16, seed=0), random(5, IN, dtype=torch.bfloat16, seed=1)
    bias, scale = random(OUT, dtype=torch.bfloat16, seed=2), cases.scale_for(quant)
    without = QuantLinear(weight, None, quant, scale)(x)
    assert same(QuantLinear(weight, bias, quant, scale)(x), without + bias)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_whole_it_gives_the_same_bits(scheme):
    quant = Quant(scheme)
    weight, bias = random(OUT, IN, dtype=torch.bfloat16, seed=0), random(OUT, dtype=torch.bfloat16, seed=2)
    layer = QuantLinear(weight, bias, quant, cases.scale_for(quant))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lead in ((5,), (2, 3), (7,)):
        x = random(*lead, IN, dtype=torch.bfloat16, seed=1)
        assert same(compiled(x), layer(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_zero_row_and_a_zero_weight_stay_zero(scheme):
    quant = Quant(scheme)
    x = random(5, IN, dtype=torch.bfloat16, seed=1)
    weight = random(OUT, IN, dtype=torch.bfloat16, seed=0)
    weight[3] = 0.0
    y = QuantLinear(weight, None, quant, cases.scale_for(quant))(x)
    assert bool((y[:, 3] == 0).all()) and bool(y.isfinite().all()) and bool(y.any())
    nothing = QuantLinear(torch.zeros_like(weight), None, quant, cases.scale_for(quant))(x)
    assert torch.equal(nothing, torch.zeros_like(y))


#: Half an ulp at the start of a binade, the largest relative error of a value in range: 2^-4 for e4m3
#: (3 mantissa bits), 2^-2 for e2m1 (1 bit). Errors of weight and input are independent, so that a sum
#: of many products is off by sqrt(2) of it at most; the codes of a scheme are all used, so it is
#: off by a tenth of it at least.
HALF_ULP = {"fp8_static": 2.0**-4, "fp8_token": 2.0**-4, "fp8_group": 2.0**-4, "nvfp4": 2.0**-2}


@pytest.mark.parametrize("quant", [q for q in cases.QUANTS if q.rule != "multiply"], ids=cases.describe)
def test_the_error_against_the_float_layer_is_that_of_the_format(quant):
    weight, x = random(64, 1024, dtype=torch.bfloat16, seed=0), random(32, 1024, dtype=torch.bfloat16, seed=1)
    scale = torch.tensor(448.0 * 6.0 / 5.0 if quant.scheme == "nvfp4" else 5.0 / 448.0) if quant.takes_scale else None
    y = QuantLinear(weight, None, quant, scale)(x).double()
    exact = x.double() @ weight.double().t()
    error = float((y - exact).norm() / exact.norm())
    assert 0.1 * HALF_ULP[quant.scheme] < error < 2**0.5 * HALF_ULP[quant.scheme]


def test_four_bits_are_coarser_than_eight():
    weight, x = random(64, 1024, dtype=torch.bfloat16, seed=0), random(32, 1024, dtype=torch.bfloat16, seed=1)
    exact = x.double() @ weight.double().t()
    four = QuantLinear(weight, None, Quant("nvfp4"), encode_factor(x.abs().amax()))(x)
    eight = QuantLinear(weight, None, Quant("fp8_token"))(x)
    assert (four - exact).norm() > 2 * (eight - exact).norm()


@pytest.mark.parametrize(
    ("quant", "features"), ((Quant("fp8_group"), 320), (Quant("fp8_group", 64), 96), (Quant("nvfp4"), 24))
)
def test_a_size_that_does_not_fit_is_refused(quant, features):
    with pytest.raises(ValueError) as caught:
        QuantLinear(torch.zeros(OUT, features, dtype=torch.bfloat16), None, quant, cases.scale_for(quant))
    for word in (f"{features} input features", quant.scheme, f"multiple of {quant.multiple_of}"):
        assert word in str(caught.value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scale_that_does_not_fit_the_scheme_is_refused(scheme):
    quant = Quant(scheme)
    layer = QuantLinear(
        torch.ones(OUT, IN, dtype=torch.bfloat16), None, quant, None if quant.takes_scale else torch.ones(())
    )
    with pytest.raises(ValueError, match=f"{scheme} takes (a|no) scale"):
        layer(torch.ones(5, IN, dtype=torch.bfloat16))


AMAX = (1.0, 3.3, 1e-3, 448.0, 65504.0)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=str)
def test_encode_factor_maps_amax_to_the_largest_block_within_an_ulp(dtype):
    for amax in AMAX:
        given = torch.tensor(amax).to(dtype)
        factor = encode_factor(given)
        assert factor.dtype == torch.float32 and factor.shape == ()
        exact = 448.0 * 6.0 / given.double()
        assert (factor.double() - exact).abs() <= oracle.ulp(exact, torch.float32)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=str)
def test_encode_factor_is_the_rounded_quotient(dtype):
    for amax in AMAX:
        given = torch.tensor(amax).to(dtype)
        assert float(encode_factor(given)) == float(oracle.round_to(448.0 * 6.0 / given.double(), torch.float32))


@pytest.mark.parametrize(("rows", "columns", "native"), [(64, 64, True), (24, 64, False), (64, 72, False)])
def test_scaled_mm_is_chosen_for_shapes_that_it_takes(rows, columns, native, monkeypatch):
    monkeypatch.setattr("torchseam.nn.scaled_mm_available", lambda device: True)
    layer = QuantLinear(torch.randn(rows, columns).bfloat16(), None, Quant("fp8_token"))
    assert (layer.gemm == "torch._scaled_mm") is native


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=str)
def test_encode_factor_of_an_all_zero_tensor_is_one(dtype):
    assert float(encode_factor(torch.zeros((), dtype=dtype))) == 1.0
    codes, scales = ops.quantize(
        torch.zeros(5, IN, dtype=dtype), Quant("nvfp4"), encode_factor(torch.zeros((), dtype=dtype))
    )
    assert not codes.any() and not scales.view(torch.uint8).any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_its_repr_says_sizes_scheme_and_what_multiplies(scheme):
    quant = Quant(scheme)
    layer = QuantLinear(torch.ones(OUT, IN, dtype=torch.bfloat16), None, quant, cases.scale_for(quant))
    assert layer.extra_repr() == f"in={IN}, out={OUT}, {scheme}, dequantise and multiply"
    assert repr(layer) == f"QuantLinear({layer.extra_repr()})"


def test_the_cpu_has_no_scaled_mm():
    assert scaled_mm_available(torch.device("cpu")) is False


def test_its_tensors_are_buffers_that_move_with_the_module():
    layer = QuantLinear(
        torch.ones(OUT, IN, dtype=torch.bfloat16),
        torch.ones(OUT, dtype=torch.bfloat16),
        Quant("fp8_static"),
        torch.ones(()),
    )
    assert not list(layer.parameters())
    assert set(layer.state_dict()) == {"weight", "bias", "input_scale"}
    assert all(b.device.type == "meta" for b in layer.to("meta").buffers())


@pytest.fixture
def group(tmp_path):
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.usefixtures("fresh_dynamo")
def test_row_parallel_over_one_rank_is_the_layer_alone(scheme, group):
    quant = Quant(scheme)
    weight, x = random(OUT, IN, dtype=torch.bfloat16, seed=0), random(5, IN, dtype=torch.bfloat16, seed=1)
    bias, scale = random(OUT, dtype=torch.bfloat16, seed=2), cases.scale_for(quant)
    alone = QuantLinear(weight, bias, quant, scale)(x)
    layer = QuantLinear(weight, bias, quant, scale, group)
    assert same(layer(x) + 0, alone)
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return gm

    assert same(torch.compile(layer, fullgraph=True, backend=keep)(x) + 0, alone)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    reduce = [i for i, name in enumerate(called) if "all_reduce" in name]
    assert len(reduce) == 1, "the sum over the ranks must be there, once"
    assert any("add" in name for name in called[reduce[0] :]), "bias is added once, after the sum"
