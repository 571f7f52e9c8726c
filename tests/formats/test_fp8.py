"""FP8 recipes against a table of all e4m3 values searched in float64, and exact fp32 rounding by float64.

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
from torch.utils._python_dispatch import TorchDispatchMode

from torchseam.formats import fp8, layout

FLOOR = 1.0 / (448.0 * 512.0)
NAN, INF = float("nan"), float("inf")
SCALE_DTYPES = tuple(layout.GROUP_SCALE_DTYPES)

#: Magnitudes of codes 0x00..0x7E (0x7F is NaN): 4 exponent bits of bias 7, 3 mantissa bits.
E4M3_TABLE = torch.tensor(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127],
    dtype=torch.float64,
)


def all_bfloat16() -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def e4m3_codes(x: torch.Tensor) -> torch.Tensor:
    """Nearest entry of the table, the even code on a tie, by search."""
    exact = x.double().flatten()
    distance = (exact.abs().clamp(max=448.0)[:, None] - E4M3_TABLE).abs()
    nearest = distance == distance.amin(dim=1, keepdim=True)
    even_first = nearest * (1 + (torch.arange(127) % 2 == 0))
    code = torch.where(exact.isnan(), 0x7F, even_first.to(torch.uint8).argmax(dim=1))
    negative = torch.tensor([math.copysign(1.0, v) < 0 for v in exact.tolist()])
    return (code + 128 * negative).to(torch.uint8).reshape(x.shape)


def fp32(exact: torch.Tensor) -> torch.Tensor:
    """float64 rounded once to fp32, held as float64."""
    return exact.float().double()


def bits(x: torch.Tensor) -> torch.Tensor:
    """Comparable bit for bit: NaN equals NaN, -0.0 isn't 0.0."""
    return x.flatten().contiguous().view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values whose rows differ in magnitude by up to 2^12."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * 2.0 ** torch.randint(-6, 6, (*shape[:-1], 1), generator=generator)).to(dtype)


SCHEMES = {
    **{f"static-{r}": lambda y, r=r: (fp8.quantize_static(y, y.new_full((1,), 0.37, dtype=torch.float32), r),)
       for r in fp8.RULES},
    **{f"token-{r}": lambda y, r=r: fp8.quantize_token(y, FLOOR, r) for r in fp8.RULES[:2]},
    **{f"group-{g}-{d}-{n}": lambda y, g=g, d=d, n=n: fp8.quantize_group(y, g, FLOOR, d, n)
       for g in fp8.GROUP_SIZES for d in SCALE_DTYPES for n in layout.GROUP_SCALE_LAYOUTS["float32"]},
    "group-reciprocal": lambda y: fp8.quantize_group(y, 128, FLOOR, rule="reciprocal"),
}  # fmt: skip
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


# --- the cast ------------------------------------------------------------------------------------


def test_to_e4m3_of_every_bfloat16():
    x = all_bfloat16().float()
    codes = fp8.to_e4m3(x).view(torch.uint8)
    assert torch.equal(codes, e4m3_codes(x))
    assert codes[x.isnan()].unique().tolist() == [0x7F, 0xFF]
    assert not bool(((codes[~x.isnan()] & 0x7F) == 0x7F).any())


def test_to_e4m3_at_every_tie_and_its_neighbours():
    ties = ((E4M3_TABLE[1:] + E4M3_TABLE[:-1]) / 2).float()
    above, below = torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)
    x = torch.cat([ties, above, below, torch.tensor([448.0, 463.9, 464.0, 465.0, 480.0, INF, 1e-45, 0.0])])
    x = torch.cat([x, -x])
    assert torch.equal(fp8.to_e4m3(x).view(torch.uint8), e4m3_codes(x))


def test_the_cast_sees_nothing_beyond_the_range():
    # This torch's cast saturates by itself and others' don't, so the result alone can't tell.
    class Casts(TorchDispatchMode):
        largest = 0.0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if (kwargs or {}).get("dtype") == torch.float8_e4m3fn:
                self.largest = max(self.largest, float(args[0].abs().max()))
            return func(*args, **(kwargs or {}))

    with Casts() as casts:
        fp8.to_e4m3(torch.tensor([-INF, 1e9, 449.0, 0.0]))
    assert casts.largest == 448.0


def test_to_e4m3_refuses_to_round_twice():
    with pytest.raises(ValueError, match="bfloat16"):
        fp8.to_e4m3(torch.zeros(3, dtype=torch.bfloat16))


# --- static --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", (1.0, 0.013, 3.7, 1.0 / 3.0, 2.0**-40, 1e30))
@pytest.mark.parametrize("shape", ((), (1,), (1, 1, 1)))
def test_static_codes_follow_their_rule(scale, shape):
    s = torch.tensor(scale, dtype=torch.float32).reshape(shape)
    y = rows(64, 96, dtype=torch.float32)
    exact, d = y.double(), s.double().reshape(())
    wanted = {
        "divide": fp32(exact / d),
        "reciprocal": fp32(exact * fp32(1 / d)),
        "multiply": fp32(exact * d),
    }
    for rule, quotient in wanted.items():
        codes = fp8.quantize_static(y, s, rule)
        assert torch.equal(codes.view(torch.uint8), e4m3_codes(quotient))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
def test_every_activation_dtype_is_read_as_fp32(dtype):
    y = rows(5, 128, dtype=dtype)
    for run in SCHEMES.values():
        for a, b in zip(run(y), run(y.float()), strict=True):
            assert same(a, b)


# --- per token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ("divide", "reciprocal"))
@pytest.mark.parametrize("hidden", (1, 7, 464, 4096))
def test_token_scales_and_codes(rule, hidden):
    y = rows(33, hidden)
    codes, scales = fp8.quantize_token(y, FLOOR, rule)
    amax = torch.tensor([max(abs(v) for v in row) for row in y.double().tolist()], dtype=torch.float64)
    scale = torch.maximum(fp32(amax / 448.0), fp32(torch.tensor(FLOOR, dtype=torch.float64)))[:, None]
    assert scales.dtype == torch.float32 and tuple(scales.shape) == (33, 1) and scales.is_contiguous()
    assert torch.equal(scales.double(), scale)
    exact = y.double()
    quotient = fp32(exact / scale) if rule == "divide" else fp32(exact * fp32(1 / scale))
    assert torch.equal(codes.view(torch.uint8), e4m3_codes(quotient))


def test_a_zero_row_gets_the_floor_and_zero_codes():
    codes, scales = fp8.quantize_token(torch.zeros(3, 64, dtype=torch.bfloat16), FLOOR)
    assert scales.tolist() == [[torch.tensor(FLOOR).item()]] * 3
    assert not bool(codes.view(torch.uint8).any())
    tiny = torch.full((1, 64), 448.0 * FLOOR / 4)
    codes, scales = fp8.quantize_token(tiny, FLOOR)
    assert scales.item() == torch.tensor(FLOOR).item() and bool((codes.float() == 112.0).all())


# --- per group -----------------------------------------------------------------------------------


def power_above(value: float) -> float:
    """The least power of two >= value within 2^-126..2^127, from frexp: value = m * 2^e, 0.5 <= m < 1."""
    if math.isnan(value):
        return NAN
    if math.isinf(value):
        return 2.0**127
    m, e = math.frexp(value)
    return 2.0 ** min(max(e - 1 if m == 0.5 else e, -126), 127) if value else 2.0**-126


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("scale_rounding", fp8.SCALE_ROUNDINGS)
@pytest.mark.parametrize("scale_rule", fp8.SCALE_RULES)
def test_how_a_scale_is_made_of_amax(scale_rule, scale_rounding, dtype):
    """Against fp64: a quotient or product of two fp32 numbers has one rounding there that shows."""
    y = torch.randn(256, 128, generator=torch.Generator().manual_seed(3)).to(dtype)
    amax = y.double().abs().amax(-1, keepdim=True)
    inverse = float(torch.tensor(1 / 448, dtype=torch.float32))
    want = (amax / 448 if scale_rule == "divide" else amax * inverse).float()
    if scale_rounding == "activation":
        want = want.to(dtype).float()
    want = want.clamp(min=0.006)
    codes, scales = fp8.quantize_token(y, 0.006, "divide", scale_rule, scale_rounding)
    assert torch.equal(scales, want)
    assert torch.equal(codes.view(torch.uint8), fp8.to_e4m3(y.float() / want).view(torch.uint8))
    if (scale_rule, scale_rounding) != ("divide", "none") and not (scale_rule == "divide" and dtype is torch.float32):
        assert not torch.equal(fp8.quantize_token(y, 0.006)[1], scales), "the attributes make no difference"
    group = fp8.quantize_group(y, 128, 0.006, scale_rule=scale_rule, scale_rounding=scale_rounding)
    assert torch.equal(group[1], want)
    assert torch.equal(group[0].view(torch.uint8), codes.view(torch.uint8))


def test_powers_of_two_round_up_exactly():
    powers = torch.tensor([2.0**e for e in range(-149, 128)])
    x = torch.cat([
        powers,
        torch.nextafter(powers, torch.tensor(INF)),
        torch.nextafter(powers, torch.tensor(0.0)),
        powers * 1.5,
        torch.tensor([0.0, 3.4e38, INF, NAN]),
        torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 4,
    ])  # fmt: skip
    wanted = torch.tensor([power_above(v) for v in x.tolist()])
    got = fp8.ceil_to_power_of_two(x)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("group_size", (64, 128))
def test_group_scales_and_codes(scale_dtype, group_size):
    y = rows(17, 640, seed=1)
    y[2], y[3, 5], y[4, 5] = 0.0, INF, NAN
    y[5] = 448.0  # amax / 448 is a power of two already
    codes, scales = fp8.quantize_group(y, group_size, FLOOR, scale_dtype)
    groups = y.double().reshape(17, 640 // group_size, group_size)
    amax = torch.where(groups.isnan().any(-1), NAN, groups.abs().nan_to_num(nan=0.0, posinf=INF).sort(-1)[0][..., -1])
    wanted = fp32(amax / 448.0)
    wanted = torch.where(wanted < FLOOR, fp32(torch.tensor(FLOOR, dtype=torch.float64)), wanted)
    if scale_dtype != "float32":
        wanted = torch.tensor([[power_above(v) for v in row] for row in wanted.tolist()], dtype=torch.float64)
    assert scales.dtype == layout.GROUP_SCALE_DTYPES[scale_dtype] and tuple(scales.shape) == wanted.shape
    stored = scales.float().double()
    assert torch.equal(stored.isnan(), wanted.isnan())
    assert torch.equal(stored.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))
    # codes are of the quotient by what is stored; NaN's sign is nobody's business
    quotient = fp32(groups / stored[..., None]).reshape(17, 640)
    got, want = codes.view(torch.uint8), e4m3_codes(quotient)
    nan = quotient.isnan()
    assert torch.equal(got[~nan], want[~nan]) and bool(((got[nan] & 0x7F) == 0x7F).all())
    assert bool(nan[4, :group_size].all()) and not bool(nan[4, group_size:].any())
    if scale_dtype != "float32":
        assert not bool(nan[3].any()) and int(got[3, 5]) == 0x7E


def test_ue8m0_bytes_are_the_biased_exponents():
    y = torch.stack([torch.full((64,), v) for v in (448.0, 448.5, 448.0 * 2**-20, INF, NAN, 0.0)])
    _, scales = fp8.quantize_group(y, 64, 0.0, "ue8m0")
    assert scales.view(torch.uint8).flatten().tolist() == [127, 128, 107, 254, 255, 1]


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_layouts_hold_the_same_scales_with_their_strides(scale_dtype):
    y = rows(2, 3, 640)
    codes, row_major = fp8.quantize_group(y, 128, FLOOR, scale_dtype)
    assert tuple(row_major.shape) == (2, 3, 5) and row_major.is_contiguous()
    for name, strides in (
        ("column_major", (1, 6)),
        ("tma_aligned", (1, 16 if scale_dtype == "ue8m0" else 8)),
    ):
        same_codes, scales = fp8.quantize_group(y, 128, FLOOR, scale_dtype, name)
        assert same(codes, same_codes)
        assert tuple(scales.shape) == (6, 5) and scales.stride() == strides
        assert same(scales, row_major.reshape(6, 5))
        assert torch.equal(fp8.dequantize(codes, scales, 128), fp8.dequantize(codes, row_major, 128))


def test_packed_scales_are_the_bytes_of_row_major_ones():
    y = rows(2, 3, 640)
    codes, row_major = fp8.quantize_group(y, 128, FLOOR, "ue8m0")
    same_codes, packed = fp8.quantize_group(y, 128, FLOOR, "ue8m0", layout.PACKED)
    assert same(codes, same_codes)
    assert (packed.dtype, tuple(packed.shape), packed.stride()) == (torch.int32, (6, 2), (1, 8))
    assert same(layout.unpack_group_scales(packed, 5), row_major.reshape(6, 5))
    assert torch.equal(fp8.dequantize(codes, packed, 128), fp8.dequantize(codes, row_major, 128))
    for lead in ((0,), (1,), (2, 3), ()):
        some = rows(*lead, 640)
        codes, packed = fp8.quantize_group(some, 128, FLOOR, "ue8m0", layout.PACKED)
        tokens = torch.Size(lead).numel()
        assert tuple(packed.shape) == (tokens, 2) and packed.stride() == (1, (tokens + 3) // 4 * 4)
        assert fp8.dequantize(codes, packed, 128).shape == some.shape
        with FakeTensorMode():
            fake = fp8.quantize_group(torch.empty(*lead, 640), 128, FLOOR, "ue8m0", layout.PACKED)[1]
        assert (fake.shape, fake.stride(), fake.dtype) == (packed.shape, packed.stride(), packed.dtype)


# --- what holds for every scheme -----------------------------------------------------------------


@every_scheme
def test_a_row_alone_has_the_same_bits(scheme):
    y = rows(7, 384, seed=3)
    batch = scheme(y)
    for i in range(7):
        for one, many in zip(scheme(y[i : i + 1]), batch, strict=True):
            assert same(one, many[i : i + 1])


@every_scheme
def test_nan_stays_in_its_row(scheme):
    y = rows(5, 256)
    clean = scheme(y)
    y[2, 17], y[4] = NAN, NAN
    for before, after in zip(clean, scheme(y), strict=True):
        assert not before.float().isnan().any()
        for i in (0, 1, 3):
            assert same(before[i], after[i])
        assert bool(after[2].float().isnan().any()) and bool(after[4].float().isnan().all())


@every_scheme
def test_leading_dims_no_rows_and_strided_input(scheme):
    y = rows(2, 3, 256)
    flat = scheme(y.reshape(6, 256))
    for a, b in zip(scheme(y), flat, strict=True):
        assert same(a.reshape(6, -1), b.reshape(6, -1))
    codes = scheme(y)[0]
    assert tuple(codes.shape) == (2, 3, 256) and codes.is_contiguous()
    strided = y.transpose(0, 1).contiguous().transpose(0, 1)
    for a, b in zip(scheme(strided), scheme(y), strict=True):
        assert same(a, b) and a.stride() == b.stride()
    for a, b in zip(scheme(y[0, 0]), flat, strict=True):
        assert same(a.reshape(-1), b[0].reshape(-1))
    for empty in scheme(y[:0]):
        assert empty.numel() == 0 and empty.shape[-1] == flat[-1 if empty.shape[-1] < 256 else 0].shape[-1]


@every_scheme
@pytest.mark.parametrize("shape", ((5, 256), (1, 128), (2, 3, 384), (0, 128), (256,)))
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(scheme, shape):
    real = scheme(torch.ones(shape, dtype=torch.bfloat16))
    with FakeTensorMode():
        fake = scheme(torch.empty(shape, dtype=torch.bfloat16))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_torch_compile_traces_every_scheme_with_dynamic_rows():
    # each dtype and layout once: tracing takes the time
    names = ["static-multiply", "token-divide", "group-64-float32-row_major", "group-reciprocal"]
    names += ["group-128-ue8m0_float32-column_major", "group-128-ue8m0-tma_aligned"]

    def everything(y):
        out = [t for name in names for t in SCHEMES[name](y)]
        for size, name in ((64, "tma_aligned"), (128, layout.PACKED)):
            out.append(fp8.dequantize(*fp8.quantize_group(y, size, FLOOR, "ue8m0", name), size))
        return out

    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        y = rows(tokens, 256, seed=tokens)
        for a, b in zip(compiled(y), everything(y), strict=True):
            assert same(a, b) and a.stride() == b.stride()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@every_scheme
def test_a_gpu_gives_the_bits_of_the_cpu(scheme):
    y = torch.cat([rows(300, 256), rows(300, 256, seed=9, dtype=torch.float16).bfloat16()])
    y[7], y[8, 3] = 0.0, NAN
    for cpu, gpu in zip(scheme(y), scheme(y.cuda()), strict=True):
        nan = cpu.float().isnan()
        assert torch.equal(nan, gpu.cpu().float().isnan()) and cpu.stride() == gpu.stride()
        assert torch.equal(cpu.float().nan_to_num(), gpu.cpu().float().nan_to_num())


# --- and back ------------------------------------------------------------------------------------


def test_dequantize_multiplies_by_the_right_scale():
    codes = torch.arange(1, 5).float().repeat_interleave(64).reshape(2, 1, 128).to(torch.float8_e4m3fn)
    static = fp8.dequantize(codes, torch.full((1, 1, 1, 1), 3.0))
    assert torch.equal(static, codes.float() * 3)
    for shape in ((2, 1, 1), (2, 1)):
        token = fp8.dequantize(codes, torch.tensor([2.0, 0.5]).reshape(shape))
        assert torch.equal(token[:, 0, ::64], torch.tensor([[2.0, 4.0], [1.5, 2.0]]))
    for scales in (torch.tensor([[2.0, 4.0], [8.0, 16.0]]), torch.tensor([[2.0, 8.0], [4.0, 16.0]]).t()):
        for stored in (scales, scales.to(torch.float8_e8m0fnu)):
            group = fp8.dequantize(codes, stored, 64)
            assert group.shape == codes.shape and group.dtype == torch.float32
            assert torch.equal(group[:, 0, ::64], torch.tensor([[2.0, 8.0], [24.0, 64.0]]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    exponent=st.integers(-12, 30),
    special=st.lists(st.floats(-(2.0**40), 2.0**40, width=32), max_size=6),
    scheme=st.sampled_from(["token", *SCALE_DTYPES]),
)
def test_round_trip_error_is_half_a_step(seed, exponent, special, scheme):
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    x[0, : len(special)] = torch.tensor(special)
    if scheme == "token":
        codes, scales = fp8.quantize_token(x, 2.0**-100)
        back, per_value = fp8.dequantize(codes, scales), scales.expand_as(x)
    else:
        codes, scales = fp8.quantize_group(x, 64, 2.0**-100, scheme)
        back, per_value = fp8.dequantize(codes, scales, 64), scales.float().repeat_interleave(64, dim=1)
    # half a step: 2^-4 of a normal value, 2^-10 of the scale for a subnormal; 2^-20 for fp32's own rounding
    bound = torch.maximum(x.double().abs() * 2.0**-4, per_value.double() * 2.0**-10) * (1 + 2.0**-20)
    assert bool(((back.double() - x.double()).abs() <= bound).all())
    # the largest of a row or group uses the upper octave of the range; powers of two waste at most one
    width = 128 if scheme == "token" else 64
    top = codes.float().abs().reshape(2, -1, width).amax(-1)
    assert bool((top[x.reshape(2, -1, width).abs().amax(-1) > 0] >= (448 if "ue8" not in scheme else 224)).all())


# --- errors --------------------------------------------------------------------------------------


def test_errors_say_what_is_allowed():
    y, one = torch.zeros(2, 192), torch.ones(1)
    cases = [
        (lambda: fp8.quantize_static(y, torch.ones(2)), "one element"),
        (lambda: fp8.quantize_static(y, one.double()), "float64"),
        (lambda: fp8.quantize_static(y, torch.ones(1, device="meta")), "on meta; it must be"),
        (
            lambda: fp8.quantize_static(y, one, "round"),
            "'round'; allowed: 'divide', 'reciprocal', 'multiply'",
        ),
        (lambda: fp8.quantize_static(y.int(), one), "int32"),
        (lambda: fp8.quantize_token(y, FLOOR, "multiply"), "allowed: 'divide', 'reciprocal'$"),
        (lambda: fp8.quantize_token(y, FLOOR, scale_rule="multiply"), "scale_rule is 'multiply'; allowed: 'divide'"),
        (lambda: fp8.quantize_token(y, FLOOR, scale_rounding="bf16"), "'bf16'; allowed: 'none', 'activation'"),
        (lambda: fp8.quantize_token(y[:, :0], FLOOR), "H > 0"),
        (lambda: fp8.quantize_token(y[0, 0], FLOOR), "H > 0"),
        (lambda: fp8.quantize_group(y, 128, FLOOR), r"\(2, 192\).*groups of 128"),
        (lambda: fp8.quantize_group(y, 96, FLOOR), "group_size is 96; allowed: 64, 128"),
        (lambda: fp8.quantize_group(y, 64, FLOOR, "fp32"), "'fp32'; allowed: 'float32'"),
        (lambda: fp8.quantize_group(y, 64, FLOOR, scale_layout="k_major"), "'k_major'; allowed: 'row_major'"),
        (lambda: fp8.quantize_group(y, 64, FLOOR, rule="multiply"), "quantize_group"),
        (lambda: fp8.quantize_group(y, 64, FLOOR, scale_layout=layout.PACKED), "of float32 scales is 'tma_aligned_pa"),
        (lambda: fp8.dequantize(fp8.to_e4m3(y), torch.ones(2, 2).int(), 64), r"3 groups a row are int32 \[T, 1\]"),
        (lambda: fp8.dequantize(y, one), "float32 codes"),
        (lambda: fp8.dequantize(fp8.to_e4m3(y), torch.ones(3, 1)), r"\(3, 1\) don't fit.*1 a row, 2 in all"),
        (lambda: fp8.dequantize(fp8.to_e4m3(y), torch.ones(2, 2), 64), "3 a row, 6 in all"),
    ]
    for run, message in cases:
        with pytest.raises(ValueError, match=message):
            run()
