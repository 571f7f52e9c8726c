"""vLLM's quantisers in the graphs that functionalisation makes of them, by operators of the same schema."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

import vllm_ops
from blocks import HIDDEN, LlamaNorm, same_bits
from graphs import run_fused
from quant_blocks import SHARED, TOKENS, Block, rows
from torchseam import Quant
from torchseam.compiler.report import Reason

pytestmark = pytest.mark.usefixtures("one_rank")

E4M3 = torch.float8_e4m3fn
SCALE = torch.full((1,), 0.01)


@pytest.fixture(autouse=True, scope="module")
def operators():
    vllm_ops.register()


def static(y, group_shape=None, out=None):
    codes = torch.empty_like(y, dtype=E4M3) if out is None else out
    torch.ops._C.static_scaled_fp8_quant(codes, y, SCALE.to(y.device), group_shape)
    return (codes,)


def per_token(y, scale_ub=None):
    codes, scales = torch.empty_like(y, dtype=E4M3), y.new_empty((y.shape[0], 1), dtype=torch.float32)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(codes, y, scales, scale_ub)
    return codes, scales


def per_group(y, size=128, layout="row_major", ue8m0=False, bound=448.0, eps=1e-10):
    tokens, groups = y.shape[0], y.shape[1] // size
    if layout == "row_major":
        scales = y.new_empty((tokens, groups), dtype=torch.float32)
    elif layout == "column_major":
        scales = y.new_empty((groups, tokens), dtype=torch.float32).permute(-1, -2)
    else:
        scales = torch.empty_strided((tokens, groups), (1, (tokens + 3) // 4 * 4), dtype=torch.float32)
    codes = torch.empty_like(y, dtype=E4M3)
    how = (size, eps, -bound, bound, ue8m0, layout != "row_major", layout == "tma_aligned")
    torch.ops._C.per_token_group_fp8_quant(y, codes, scales, *how)
    return codes, scales


def per_group_packed(y, size=128, bound=448.0, eps=1e-10, scales=None, codes=None):
    scales = vllm_ops.packed_buffer(y, size) if scales is None else scales
    codes = torch.empty_like(y, dtype=E4M3) if codes is None else codes
    torch.ops._C.per_token_group_fp8_quant_packed(y, codes, scales, size, eps, -bound, bound)
    return codes, scales


def fp4(y, swizzled=True, functional=False):
    if functional:
        codes, scales = torch.ops._C.scaled_fp4_quant(y, SCALE, swizzled)
    else:
        codes, scales = vllm_ops.fp4_buffers(y, swizzled)
        torch.ops._C.scaled_fp4_quant.out(y, SCALE, swizzled, output=codes, output_scale=scales)
    return codes, scales.view(E4M3)


def fuse(quantise, version, tokens=TOKENS, **how):
    block = Block(lambda y, h: quantise(y))
    x, residual = rows(tokens, HIDDEN), rows(tokens, HIDDEN, seed=1)
    with inductor_config.patch(enable_auto_functionalized_v2=version == 2):
        got = run_fused(block, x, residual, **how)
    want = block(x, residual)
    assert len(want) == len(got.results)
    for i, (a, b) in enumerate(zip(want, got.results, strict=True)):
        assert same_bits(a, b), f"output {i} differs"
    return got


GROUP_FLOOR = float(torch.tensor(1e-10) / 448)
QUANTISERS = {
    "static": (static, Quant("fp8_static", rule="reciprocal")),
    "token": (per_token, Quant("fp8_token")),
    **{
        f"group-{size}-{layout}-{'ue8m0' if ue8m0 else 'fp32'}": (
            lambda y, size=size, layout=layout, ue8m0=ue8m0: per_group(y, size, layout, ue8m0),
            Quant(
                "fp8_group",
                size,
                "ue8m0_float32" if ue8m0 else "float32",
                layout,
                scale_floor=1e-10 if ue8m0 else GROUP_FLOOR,
            ),
        )
        for size in (64, 128)
        for layout in ("row_major", "column_major", "tma_aligned")
        for ue8m0 in (False, True)
    },
    "group-packed": (
        per_group_packed,
        Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed", scale_floor=1e-10),
    ),
    "group-packed-large-eps": (
        lambda y: per_group_packed(y, eps=1.0),
        Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed", scale_floor=float(torch.tensor(1.0) / 448)),
    ),
    **{
        f"nvfp4-{layout}-{'functional' if functional else 'out'}": (
            lambda y, swizzled=layout == "swizzled", functional=functional: fp4(y, swizzled, functional),
            Quant("nvfp4", scale_layout=layout),
        )
        for layout in ("swizzled", "linear")
        for functional in (False, True)
    },
}


@pytest.mark.parametrize("dynamic", [False, True], ids=("static", "symbolic"))
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quantise", "quant"), QUANTISERS.values(), ids=QUANTISERS.keys())
def test_each_operator_is_fused(quantise, quant, version, dynamic):
    got = fuse(quantise, version, tokens=7, dynamic=dynamic)
    assert got.kinds() == [f"{SHARED} + {quant.scheme}"]
    assert got.report.fused[0].seam.quants == (quant,)
    assert got.report.refused == ()
    assert got.wrapped == [], "a wrapper is left"
    assert "_C." not in got.after[0]
    assert "aten.empty" not in got.after[0], "a buffer is left that nobody writes"


@pytest.mark.parametrize("version", [1, 2])
def test_several_readers_and_views(version):
    def quantise(y):
        return *static(y), *static(y.view(-1, HIDDEN)), *per_token(y.view(-1, HIDDEN)), *fp4(y.view(-1, HIDDEN))

    got = fuse(quantise, version)
    assert got.kinds() == [f"{SHARED} + fp8_static + fp8_token + nvfp4"]


@pytest.mark.parametrize("dynamic", [False, True], ids=("static", "symbolic"))
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
@pytest.mark.parametrize("version", [1, 2])
def test_packed_scales_are_rows_of_words_whatever_the_leading_dimensions(version, lead, dynamic):
    """Five groups: two words a row, the second with three bytes that no group has."""
    block = Block(lambda y, h: per_group_packed(y))
    block.norm = LlamaNorm(torch.linspace(0.5, 1.5, 640).bfloat16())
    x, residual = rows(*lead, 640), rows(*lead, 640, seed=1)
    with inductor_config.patch(enable_auto_functionalized_v2=version == 2):
        got = run_fused(block, x, residual, dynamic=dynamic)
    assert got.kinds() == [f"{SHARED} + fp8_group"]
    tokens = torch.Size(lead).numel()
    assert got.results[1].shape == (tokens, 2) and got.results[1].stride() == (1, (tokens + 3) // 4 * 4)
    assert all(same_bits(a, b) for a, b in zip(block(x, residual), got.results, strict=True))


NEAR_MISSES = {
    "a group shape": lambda y: static(y, [1, HIDDEN]),
    "an upper bound": lambda y: per_token(y, torch.full((1,), 1e30)),
    "another largest code": lambda y: per_group(y, bound=240.0),
    "groups of 32": lambda y: per_group(y, 32),
    "packed, another largest code": lambda y: per_group_packed(y, bound=240.0),
    "packed, words one after another": lambda y: per_group_packed(
        y, scales=y.new_empty((y.shape[0], y.shape[1] // 512 + bool(y.shape[1] % 512)), dtype=torch.int32)
    ),
    "codes inside a larger buffer": lambda y: static(y, out=torch.empty(2, *y.shape, dtype=E4M3)[1]),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("quantise", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_a_near_miss_stays_and_is_explained(quantise, version):
    got = fuse(quantise, version)
    if version == 1 and quantise is NEAR_MISSES["codes inside a larger buffer"]:
        # Version 1 hands the operator the part alone and puts it into the buffer afterwards.
        assert got.kinds() == [f"{SHARED} + fp8_static"]
        return
    assert got.kinds() == [SHARED]
    assert [(r.part, r.reason) for r in got.report.refused] == [("quantiser", Reason.QUANT_SPELLING)]
