"""NVFP4 against tables of all e2m1 and e4m3 values searched in float64, and exact fp32 rounding by float64.

A product or quotient of two fp32 values, computed in float64 and rounded to fp32, is the correctly
rounded fp32 result (53 >= 2*24 + 2 bits), so `fp32(...)` below is exact and shares no code with formats.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from torchseam.formats import layout, nvfp4

NAN, INF = float("nan"), float("inf")
E2M1_TABLE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E4M3_TABLE = torch.tensor(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127],
    dtype=torch.float64,
)


def nearest_even(magnitude: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index of the nearest entry, the even one on a tie, by search; saturates at the last."""
    distance = (magnitude.double().flatten().clamp(max=float(table[-1]))[:, None] - table).abs()
    nearest = distance == distance.amin(dim=1, keepdim=True)
    even_first = nearest * (1 + (torch.arange(len(table)) % 2 == 0))
    return even_first.to(torch.uint8).argmax(dim=1).reshape(magnitude.shape)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    negative = torch.tensor([math.copysign(1.0, v) < 0 for v in x.flatten().tolist()]).reshape(x.shape)
    codes = nearest_even(x.abs(), E2M1_TABLE) + 8 * negative
    codes[x.isnan()] = 7
    return codes.to(torch.uint8)


def fp32(exact: torch.Tensor) -> torch.Tensor:
    """float64 rounded once to fp32, held as float64."""
    return exact.float().double()


def oracle(y: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, H] (one a byte) and block scale bytes [T, H/16] of y [T, H], by the recipe of the brief."""
    encode = fp32(torch.tensor(global_scale, dtype=torch.float64))
    sixth = fp32(torch.tensor(1 / 6, dtype=torch.float64))
    blocks = y.double().reshape(y.shape[0], -1, 16)
    amax = torch.where(blocks.isnan().any(-1), NAN, blocks.abs().nan_to_num(posinf=INF).sort(-1)[0][..., -1])
    wanted = fp32(encode * fp32(amax * sixth))
    scale_bytes = torch.where(wanted.isnan(), 0x7E, nearest_even(wanted.nan_to_num(posinf=INF), E4M3_TABLE))
    stored = E4M3_TABLE[scale_bytes][..., None]
    multiplier = torch.where(stored == 0, 0.0, fp32(1 / fp32(stored * fp32(1 / encode))))
    codes = e2m1_codes(fp32(blocks * multiplier))
    codes[(stored == 0).expand_as(codes)] = 0
    return codes.reshape(y.shape), scale_bytes.to(torch.uint8)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """bf16 normals whose rows and blocks differ in magnitude: scales from 0 over subnormal to 448."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).reshape(*shape[:-1], -1, 16)
    exponents = torch.randint(-18, 3, (*x.shape[:-1], 1), generator=generator)
    return (x * 2.0**exponents).reshape(shape).bfloat16()


def encode_scale(y: torch.Tensor) -> torch.Tensor:
    return (448.0 * 6.0 / y.float().abs().nan_to_num(0.0, posinf=0.0).max()).reshape(1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


# --- the cast and the nibbles --------------------------------------------------------------------


def test_values_are_the_table():
    assert nvfp4.E2M1_VALUES[:8] == tuple(E2M1_TABLE.tolist())
    assert [math.copysign(1, v) * -1 for v in nvfp4.E2M1_VALUES[8:]] == [1.0] * 8
    assert [-v for v in nvfp4.E2M1_VALUES[8:]] == E2M1_TABLE.tolist()
    assert (nvfp4.E2M1_MAX, nvfp4.BLOCK) == (6.0, 16)


def test_to_e2m1_of_every_bfloat16():
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = nvfp4.to_e2m1(x)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, e2m1_codes(x))
    assert codes[x.isnan()].unique().tolist() == [7]
    assert codes[x == INF].tolist() == [7] and codes[x == -INF].tolist() == [15]


def test_ties_go_to_even_and_their_neighbours_do_not():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.tensor(nvfp4.E2M1_VALUES)
    assert values[nvfp4.to_e2m1(ties).long()].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert nvfp4.to_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    above, below = torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)
    assert values[nvfp4.to_e2m1(above).long()].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[nvfp4.to_e2m1(below).long()].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    x = torch.cat([ties, above, below])
    x = torch.cat([x, -x])
    assert torch.equal(nvfp4.to_e2m1(x), e2m1_codes(x))


def test_signs_of_zero_and_saturation():
    x = torch.tensor([0.0, -0.0, -1e-45, -0.25, 6.0, 6.1, -7.0, 3e38, NAN, -NAN])
    assert nvfp4.to_e2m1(x).tolist() == [0, 8, 8, 8, 7, 7, 15, 7, 7, 7]


def test_pack_puts_the_even_element_low():
    assert nvfp4.pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    codes = torch.randint(0, 16, (2, 3, 64), dtype=torch.uint8)
    packed = nvfp4.pack(codes)
    assert tuple(packed.shape) == (2, 3, 32) and packed.is_contiguous()
    assert torch.equal(nvfp4.unpack(packed), codes)
    assert torch.equal(nvfp4.pack(nvfp4.unpack(torch.arange(256, dtype=torch.uint8))), torch.arange(256).byte())


# --- the recipe ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", (464, 1040, 4096))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_codes_and_scales_follow_the_recipe(hidden, dtype):
    y = rows(33, hidden).to(dtype)
    if dtype == torch.float32:
        y = y * 1.2345  # fill the fp32 mantissa
    y[1, 3], y[2, 20], y[3, :16], y[4, :16] = NAN, INF, 0.0, -0.0
    encode = encode_scale(y)
    codes, scales = oracle(y, float(encode))
    # the grid of rows() reaches what it must: zero, subnormal and saturated block scales
    assert {0, 1, 7, 0x7E} <= set(scales.unique().tolist())
    for shape in ((), (1,), (1, 1)):
        packed, linear = nvfp4.quantize(y, encode.reshape(shape), "linear")
        assert packed.dtype == torch.uint8 and tuple(packed.shape) == (33, hidden // 2)
        assert linear.dtype == torch.float8_e4m3fn and tuple(linear.shape) == (33, hidden // 16)
        assert torch.equal(linear.view(torch.uint8), scales)
        assert torch.equal(nvfp4.unpack(packed), codes)
        assert packed.is_contiguous() and linear.is_contiguous()
    packed_again, swizzled = nvfp4.quantize(y, encode)
    assert same(packed, packed_again)
    assert tuple(swizzled.shape) == layout.swizzled_shape(33, hidden // 16)
    assert same(layout.unswizzle(swizzled, 33, hidden // 16), linear)


def test_a_global_scale_too_large_saturates_at_0x7e():
    y = torch.linspace(-8, 8, 64).reshape(1, 64)
    packed, scales = nvfp4.quantize(y, torch.tensor(1e6), "linear")
    assert scales.view(torch.uint8).unique().tolist() == [0x7E]
    codes, wanted = oracle(y, 1e6)
    assert torch.equal(nvfp4.unpack(packed), codes) and torch.equal(scales.view(torch.uint8), wanted)


def test_a_block_whose_scale_is_zero_has_codes_zero():
    y = torch.zeros(3, 16)
    y[1] = -0.0
    y[2] = -(2.0**-40)  # not zero, but its scale underflows
    packed, scales = nvfp4.quantize(y, torch.tensor(1.0), "linear")
    assert not bool(scales.view(torch.uint8).any()) and not bool(packed.any())


def test_nan_and_inf_stay_in_their_block():
    y = rows(4, 64)
    encode = encode_scale(y)
    clean, clean_scales = nvfp4.quantize(y, encode, "linear")
    y[1, 18], y[2, 40] = NAN, -INF
    packed, scales = nvfp4.quantize(y, encode, "linear")
    assert int(scales.view(torch.uint8)[1, 1]) == 0x7E and int(scales.view(torch.uint8)[2, 2]) == 0x7E
    codes = nvfp4.unpack(packed)
    assert int(codes[1, 18]) == 7 and int(codes[2, 40]) == 15
    touched = torch.zeros(4, 4, dtype=torch.bool)
    touched[1, 1] = touched[2, 2] = True
    assert torch.equal(bits(scales)[~touched], bits(clean_scales)[~touched])
    untouched = ~touched.repeat_interleave(8, dim=1)
    assert torch.equal(packed[untouched], clean[untouched])


def test_a_row_alone_has_the_same_bits():
    y = rows(7, 464, seed=5)
    encode = encode_scale(y)
    packed, linear = nvfp4.quantize(y, encode, "linear")
    _, swizzled = nvfp4.quantize(y, encode)
    assert same(layout.unswizzle(swizzled, 7, 29), linear)
    for i in range(7):
        one, scale = nvfp4.quantize(y[i : i + 1], encode, "linear")
        assert same(one, packed[i : i + 1]) and same(scale, linear[i : i + 1])
        one, scale = nvfp4.quantize(y[i : i + 1], encode)
        assert same(one, packed[i : i + 1])
        assert same(layout.unswizzle(scale, 1, 29), linear[i : i + 1])


@pytest.mark.parametrize("scale_layout", nvfp4.LAYOUTS)
def test_leading_dims_no_rows_and_strided_input(scale_layout):
    y = rows(2, 3, 464)
    encode = encode_scale(y)
    packed, scales = nvfp4.quantize(y, encode, scale_layout)
    flat, flat_scales = nvfp4.quantize(y.reshape(6, 464), encode, scale_layout)
    assert tuple(packed.shape) == (2, 3, 232) and same(packed.reshape(6, -1), flat)
    assert tuple(scales.shape) == ((2, 3, 29) if scale_layout == "linear" else (128, 32))
    assert same(scales.reshape(flat_scales.shape), flat_scales)
    back = nvfp4.dequantize(packed, scales, encode, scale_layout)
    assert back.shape == y.shape and back.dtype == torch.float32
    assert same(back.reshape(6, 464), nvfp4.dequantize(flat, flat_scales, encode, scale_layout))
    strided = y.transpose(0, 1).contiguous().transpose(0, 1)
    assert same(nvfp4.quantize(strided, encode, scale_layout)[0], packed)
    alone, _ = nvfp4.quantize(y[1, 2], encode, scale_layout)
    assert same(alone, packed[1, 2])
    none, no_scales = nvfp4.quantize(y[:0], encode, scale_layout)
    assert tuple(none.shape) == (0, 3, 232)
    assert tuple(no_scales.shape) == ((0, 3, 29) if scale_layout == "linear" else (0, 32))
    assert tuple(nvfp4.dequantize(none, no_scales, encode, scale_layout).shape) == (0, 3, 464)


@pytest.mark.parametrize("scale_layout", nvfp4.LAYOUTS)
@pytest.mark.parametrize("shape", ((5, 464), (1, 16), (2, 3, 64), (129, 64), (0, 64), (64,)))
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(shape, scale_layout):
    def run(y, encode):
        packed, scales = nvfp4.quantize(y, encode, scale_layout)
        return packed, scales, nvfp4.dequantize(packed, scales, encode, scale_layout)

    real = run(torch.ones(shape, dtype=torch.bfloat16), torch.ones(1))
    with FakeTensorMode():
        fake = run(torch.empty(shape, dtype=torch.bfloat16), torch.empty(1))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_torch_compile_traces_it_with_dynamic_rows():
    def round_trip(y, encode):
        packed, scales = nvfp4.quantize(y, encode)
        return packed, scales, nvfp4.dequantize(packed, scales, encode), layout.as_int32(scales)

    compiled = torch.compile(round_trip, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (130, 300):  # 2 and 3 tiles of rows; the size 1 would be compiled apart
        y = rows(tokens, 464, seed=tokens)
        encode = encode_scale(y)
        for a, b in zip(compiled(y, encode), round_trip(y, encode), strict=True):
            assert same(a, b) and a.stride() == b.stride()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("scale_layout", nvfp4.LAYOUTS)
def test_a_gpu_gives_the_bits_of_the_cpu(scale_layout):
    y = rows(300, 1040)
    y[7, 3], y[8, 5], y[9] = NAN, INF, 0.0
    encode = encode_scale(y)
    packed, scales = nvfp4.quantize(y, encode, scale_layout)
    gpu_packed, gpu_scales = nvfp4.quantize(y.cuda(), encode.cuda(), scale_layout)
    assert same(packed, gpu_packed.cpu()) and same(scales, gpu_scales.cpu())
    back = nvfp4.dequantize(gpu_packed, gpu_scales, encode.cuda(), scale_layout)
    assert same(nvfp4.dequantize(packed, scales, encode, scale_layout), back.cpu())


# --- and back ------------------------------------------------------------------------------------


def test_dequantize_of_every_code_and_scale():
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    scale_bytes = torch.arange(127, dtype=torch.uint8).reshape(127, 1)
    signed = torch.cat([E2M1_TABLE, -E2M1_TABLE])
    wanted = fp32(E4M3_TABLE[:, None] * signed / fp32(torch.tensor(0.3, dtype=torch.float64)))
    for scales in (scale_bytes, scale_bytes.view(torch.float8_e4m3fn)):
        linear = nvfp4.dequantize(nvfp4.pack(codes), scales, torch.tensor([0.3]), "linear")
        swizzled = nvfp4.dequantize(nvfp4.pack(codes), layout.swizzle(scales), torch.tensor([0.3]))
        assert same(linear, wanted.float()) and same(swizzled, linear)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
    special=st.lists(st.floats(-(2.0**10), 2.0**10, width=32), max_size=6),
    scale_layout=st.sampled_from(nvfp4.LAYOUTS),
)
def test_round_trip_error_is_half_the_widest_step(seed, exponent, special, scale_layout):
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(seed))
    x[0, : len(special)] = torch.tensor(special)
    x = x * 2.0**exponent
    encode = encode_scale(x)
    packed, scales = nvfp4.quantize(x, encode, scale_layout)
    back = nvfp4.dequantize(packed, scales, encode, scale_layout)
    # A block's step is amax/6 within e4m3's 2^-4 (or 2^-10 of global units where that is subnormal).
    # The widest gap, 4 to 6, is 2 steps, half of it 1; saturation loses less than that, or, where the
    # scale is subnormal, 6 times what its rounding lost.
    amax = x.double().reshape(3, 3, 16).abs().amax(-1, keepdim=True)
    lost = 2.0**-10 / encode.double()
    bound = (amax / 6 * (1 + 2.0**-4) + 6 * lost) * (1 + 2.0**-20)
    error = (back.double() - x.double()).reshape(3, 3, 16).abs()
    assert bool((error <= bound).all())


# --- errors --------------------------------------------------------------------------------------


def test_errors_say_what_is_allowed():
    y, one = torch.ones(2, 32), torch.ones(1)
    packed, scales = nvfp4.quantize(y, one, "linear")
    cases = [
        (lambda: nvfp4.quantize(y[:, :24].contiguous(), one), r"H = 24; NVFP4 needs a positive multiple"),
        (lambda: nvfp4.quantize(y, one, "row_major"), "'row_major'; allowed: 'swizzled', 'linear'"),
        (lambda: nvfp4.quantize(y, torch.ones(2)), "global_scale is .*one element"),
        (lambda: nvfp4.quantize(y, one.bfloat16()), "bfloat16"),
        (lambda: nvfp4.quantize(y, torch.ones(1, device="meta")), "on meta"),
        (lambda: nvfp4.quantize(y.byte(), one), "uint8; a quantiser reads"),
        (lambda: nvfp4.to_e2m1(y.double()), "float64"),
        (lambda: nvfp4.pack(torch.zeros(3, dtype=torch.uint8)), "H even"),
        (lambda: nvfp4.pack(y), "float32"),
        (lambda: nvfp4.unpack(y), "float32"),
        (lambda: nvfp4.dequantize(packed, scales, one), r"\(2, 2\).*\(128, 4\)"),
        (lambda: nvfp4.dequantize(packed, scales[:1], one, "linear"), "2 a row"),
        (lambda: nvfp4.dequantize(packed, scales.float(), one, "linear"), "float32; allowed: float8_e4m3fn"),
        (lambda: nvfp4.dequantize(packed[:, :4], scales, one, "linear"), "H = 8"),
        (lambda: nvfp4.dequantize(packed, scales, one, "128x4"), "'128x4'"),
    ]
    for run, message in cases:
        with pytest.raises(ValueError, match=message):
            run()


# ---- torchao's recipe -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0, 0.003], ids=str)
def test_torchao_recipe_step_by_step(scale):
    y = torch.randn(37, 64, generator=torch.Generator().manual_seed(5)) * torch.logspace(-6, 3, 37)[:, None]
    y[0] = 0
    given = None if scale is None else torch.tensor(scale)
    blocks = y.reshape(37, 4, 16)
    wanted = blocks.abs().amax(-1) / 6
    wanted = wanted if given is None else wanted / given
    stored = wanted.clamp(2.0**-6, 448).to(torch.float8_e4m3fn)
    multiplier = 1 / stored.float() if given is None else (1 / given) / stored.float()
    packed, scales = nvfp4.quantize(y, given, "linear", "none" if given is None else "decode")
    assert torch.equal(nvfp4.unpack(packed), e2m1_codes((blocks * multiplier[..., None]).reshape(37, 64)))
    assert torch.equal(scales.float(), stored.float())
    assert (scales[0].float() == 2.0**-6).all(), "a zero block has the smallest scale, not 0"
    values = nvfp4.dequantize(packed, scales, given, "linear", "none" if given is None else "decode")
    factor = stored.float() if given is None else stored.float() * given
    within = wanted <= 448
    error = (values.reshape(blocks.shape) - blocks).abs().amax(-1)
    assert (error <= 1.1 * factor)[within].all(), "codes are at most one apart above 4, and the scale may be 1/16 small"


def test_torchao_recipe_of_nan_is_a_nan_scale():
    y = torch.ones(2, 32)
    y[0, 3] = math.nan
    packed, scales = nvfp4.quantize(y, None, "linear", "none")
    assert scales.view(torch.uint8).tolist()[0][0] == 0x7F
    assert not scales[:, 1].float().isnan().any() and not scales[1].float().isnan().any()
    assert nvfp4.dequantize(packed, scales, None, "linear", "none")[0, :16].isnan().all()


@pytest.mark.parametrize(("scale", "kind"), [(torch.ones(()), "none"), (None, "decode"), (None, "encode")], ids=str)
def test_a_global_scale_of_another_kind_is_refused(scale, kind):
    packed, block_scales = nvfp4.quantize(torch.ones(1, 16), torch.ones(()), "linear")
    with pytest.raises(ValueError, match=f"its kind is '{kind}'"):
        nvfp4.quantize(torch.ones(1, 16), scale, "linear", kind)
    with pytest.raises(ValueError, match=f"its kind is '{kind}'"):
        nvfp4.dequantize(packed, block_scales, scale, "linear", kind)
