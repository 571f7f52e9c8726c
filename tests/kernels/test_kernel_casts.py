"""Every rounding of `kernels.casts` against `formats`: exhaustive over bf16, and around every tie."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from torchseam.formats import fp8, nvfp4
from torchseam.kernels import casts

#: All 65,536 bf16 values, as fp32: every sign, exponent and NaN, and each tie of e4m3 and e2m1.
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def neighbours(values: torch.Tensor) -> torch.Tensor:
    """Each fp32 value, the next below and the next above it, of both signs."""
    up = torch.nextafter(values, torch.full_like(values, torch.inf))
    down = torch.nextafter(values, torch.full_like(values, -torch.inf))
    magnitudes = torch.cat([values, up, down])
    return torch.cat([magnitudes, -magnitudes])


def ties(values: torch.Tensor) -> torch.Tensor:
    """fp32 around the midpoints of sorted non-negative values, and around the values themselves."""
    return torch.cat([neighbours((values[1:] + values[:-1]) / 2), neighbours(values)])


@triton.jit
def _apply(x_ptr, out_ptr, count, CAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    if CAST == "to_e4m3":
        out = casts.to_e4m3(x)
    elif CAST == "to_e2m1":
        out = casts.to_e2m1(x)
    elif CAST == "to_e8m0":
        out = casts.to_e8m0(x)
    elif CAST == "power_of_two":
        out = casts.from_e8m0(casts.to_e8m0(x))
    elif CAST == "from_e4m3":
        out = casts.from_e4m3(x)
    elif CAST == "to_float32":
        out = casts.to_float32(x)
    else:
        out = casts.round_to(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=at < count)


def apply(cast: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    block = 32768
    _apply[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), CAST=cast, BLOCK=block)
    return out


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, every NaN alike."""
    nan = a.isnan() & b.isnan()
    integer = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return bool((nan | (a.view(integer) == b.view(integer))).all())


E4M3_VALUES = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E2M1_VALUES = torch.tensor(nvfp4.E2M1_VALUES[:8])
RANDOM = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 100


@pytest.mark.parametrize("x", [ALL_BF16, ties(E4M3_VALUES), RANDOM], ids=["bf16", "ties", "random"])
def test_e4m3_codes_are_those_of_the_format(x):
    assert torch.equal(apply("to_e4m3", x, torch.int32), fp8.to_e4m3(x).view(torch.uint8).int())


def test_nan_becomes_e4m3_nan_with_its_sign():
    x = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert apply("to_e4m3", x, torch.int32).tolist() == [0x7F, 0xFF, 0x7F, 0x7F]


@pytest.mark.parametrize("x", [ALL_BF16, ties(E2M1_VALUES), RANDOM / 50], ids=["bf16", "ties", "random"])
def test_e2m1_codes_are_those_of_the_format(x):
    assert torch.equal(apply("to_e2m1", x, torch.int32), nvfp4.to_e2m1(x).int())


def test_e2m1_ties_go_to_the_even_code():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, torch.inf, torch.nan])
    codes = nvfp4.to_e2m1(torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0]))
    assert torch.equal(apply("to_e2m1", x, torch.int32), codes.int())


def test_e4m3_codes_are_read_back_exactly():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.int32)
    expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert equal(apply("from_e4m3", codes, torch.float32), expected)


@pytest.mark.parametrize("x", [ALL_BF16.abs(), neighbours(torch.exp2(torch.arange(-149.0, 128.0))).abs()])
def test_scales_are_rounded_up_to_powers_of_two(x):
    assert torch.equal(apply("to_e8m0", x, torch.int32), fp8._biased_exponent(x))
    assert equal(apply("power_of_two", x, torch.float32), fp8.ceil_to_power_of_two(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_to_is_torchs_cast(dtype):
    narrow = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    exact = narrow.view(torch.bfloat16 if dtype == torch.float32 else dtype).float()
    finite = exact[exact.isfinite() & (exact >= 0)].sort().values.double()
    halfway = ((finite[1:] + finite[:-1]) / 2).float()
    for x in (exact, neighbours(halfway), ALL_BF16, RANDOM):
        assert equal(apply("round_to", x, dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_to_float32_is_exact(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert equal(apply("to_float32", x, torch.float32), x.float())
