"""The local kernel compiles for every architecture, with no GPU: what its machine code must have and must not."""

from __future__ import annotations

import functools
import re

import pytest

triton = pytest.importorskip("triton")

from kernel_builds import build, disassembled, nvidia, seam_of  # noqa: E402
from triton.backends import backends  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from torchseam.kernels import launch, local  # noqa: E402
from torchseam.seam import Norm, Quant, Seam  # noqa: E402

NVIDIA = (89, 90, 100, 120)
AMD = GPUTarget("hip", "gfx942", 64)

#: One of each scheme; between them every structure, weight mode, weight dtype and padded layout.
SEAMS = {
    "static-4096-bf16-bf16": Seam(Norm(1e-6), residual=True, quants=(Quant("fp8_static"),), outputs=("residual",)),
    "token-8192-bf16-fp32": Seam(
        Norm(1e-6, "before_cast", 1),
        inner_norm=Norm(1e-6, "before_cast", 1),
        residual=True,
        quants=(Quant("fp8_token", rule="reciprocal"),),
        outputs=("residual", "norm"),
    ),
    "group-2880-fp16-fp32": Seam(
        Norm(1e-5, "after_cast"),
        quants=(Quant("fp8_group", 64, "ue8m0", "tma_aligned"),),
        outputs=("norm",),
    ),
    "packed-2944-bf16-bf16": Seam(
        Norm(1e-6),
        residual=True,
        quants=(Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed"),),
        outputs=("residual",),
    ),
    "nvfp4-5120-bf16-bf16": Seam(Norm(1e-6), residual=True, quants=(Quant("nvfp4"),), outputs=("residual",)),
    "nvfp4-464-fp32-fp32": Seam(Norm(1e-6, "none"), quants=(Quant("nvfp4", scale_layout="linear"),)),
    "norm-32768-bf16-bf16": Seam(Norm(1e-6), residual=True, outputs=("residual", "norm")),
}


#: The shapes of benchmarks/local.py.
BENCHMARK_HIDDENS = (4096, 5120, 7168, 8192, 16384)
BENCHMARK_SCHEMES = ("fp8_static", "fp8_token", "fp8_group", "nvfp4")
#: Blackwell's own, where its instructions make another kernel than Hopper's.
BLACKWELL_SHAPES = (("nvfp4", 4096), ("nvfp4", 7168), ("fp8_token", 8192))


@functools.cache
def built(name: str, arch: int):
    _, hidden, x, w = name.split("-")
    return build(SEAMS[name], int(hidden), nvidia(arch), x, w)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("arch", NVIDIA)
@pytest.mark.parametrize("name", SEAMS)
def test_the_kernel_builds_for_nvidia(name, arch):
    kernel = built(name, arch)
    assert kernel.asm["cubin"]
    ptx = kernel.asm["ptx"]
    check_arithmetic(ptx)
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (not name.startswith("norm"))
    # Sixteen bytes a thread at once: all loads of rows, but for rows that do not fill their threads.
    if name != "nvfp4-464-fp32-fp32":
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


def check_arithmetic(ptx: str) -> None:
    """No contracted multiply-add (what says its rounding is never contracted), no approximation but first guesses."""
    assert not re.search(r"\b(add|sub|mul)\.(ftz\.)?f(32|64)", ptx)
    assert not re.search(r"\b(div|sqrt)\.(approx|full)|\b(add|sub|mul|fma|div|min|max|cvt)\.\S*ftz", ptx)
    # Each is mended by a step of its own: `divisions.inverse_root`, of two norms at most, and `reciprocal_native`.
    roots = len(re.findall(r"\brsqrt\.approx\.ftz\.f32", ptx))
    assert roots <= 2
    guesses = len(re.findall(r"\brcp\.approx\.ftz\.f32 first", ptx))
    assert len(re.findall(r"\.approx\b", ptx)) == roots + guesses


@pytest.mark.parametrize("arch", NVIDIA)
def test_e2m1_codes_are_converted_by_the_instruction_from_blackwell_on(arch):
    ptx = built("nvfp4-5120-bf16-bf16", arch).asm["ptx"]
    assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx) == (arch >= 100)


def row_accesses(ptx: str) -> list[str]:
    """The widths of loads and stores, but for scales: `v4.b32`, `b8` ..."""
    return re.findall(r"\b(?:ld|st)\.global\S*?\.((?:v\d\.)?b\d+)", ptx)


def check_benchmark_kernel(scheme: str, hidden: int, arch: int) -> None:
    kernel = build(seam_of(Quant(scheme)), hidden, nvidia(arch))
    ptx = kernel.asm["ptx"]
    check_arithmetic(ptx)
    usage = disassembled(kernel, "cuobjdump", "-res-usage")
    assert re.search(r"\bSTACK:0\b.*\bLOCAL:0\b", usage), f"registers are spilled: {usage}"
    # Each thread: x, residual and weight in, the sum out, 16 bytes at a time; of 8 elements the codes.
    vectors = launch.block_of(hidden) // (8 * 32 * launch.choose(hidden).num_warps)
    codes = "b32" if scheme == "nvfp4" else "v2.b32"
    expected = ["v4.b32"] * 4 * vectors + [codes] * vectors
    widths = row_accesses(ptx)
    for width in expected:
        assert width in widths, f"{width} is missing in {row_accesses(ptx)}"
        widths.remove(width)
    # What is left: the static scale or encode factor, and scales that are stored.
    assert len(widths) <= 1 + max(2, vectors) and not any(w.startswith("v4") for w in widths), widths
    # The rows themselves never go through shared memory: what is laid out anew there are the scales.
    moved = re.findall(r"convert_layout \S+ : tensor<(\d+)x", kernel.asm["ttgir"])
    assert all(int(n) <= launch.block_of(hidden) // 8 for n in moved), moved


@pytest.mark.slow
@pytest.mark.parametrize("hidden", BENCHMARK_HIDDENS)
@pytest.mark.parametrize("scheme", BENCHMARK_SCHEMES)
def test_the_benchmarks_kernels_spill_nothing_and_move_16_bytes_at_a_time(scheme, hidden):
    check_benchmark_kernel(scheme, hidden, 90)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "hidden"), BLACKWELL_SHAPES)
def test_blackwells_kernels_spill_nothing_either(scheme, hidden):
    check_benchmark_kernel(scheme, hidden, 100)


def test_the_level_of_native_follows_the_compute_capability():
    assert [local.native_level(divmod(c, 10)) for c in (80, 86, 89, 90, 100, 103, 120)] == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.skipif("amd" not in backends, reason="this Triton was built without its AMD backend")
@pytest.mark.parametrize("name", ["static-4096-bf16-bf16", "nvfp4-5120-bf16-bf16", "group-2880-fp16-fp32"])
def test_the_kernel_builds_for_amd(name):
    _, hidden, x, w = name.split("-")
    assert build(SEAMS[name], int(hidden), AMD, x, w).asm["hsaco"]
