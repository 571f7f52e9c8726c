"""The local kernel compiles for every architecture, with no GPU: what its machine code must have and must not."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")

from triton.backends import backends  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from torchseam.kernels import launch, local  # noqa: E402
from torchseam.seam import Norm, Quant, Seam  # noqa: E402

NVIDIA = [GPUTarget("cuda", arch, 32) for arch in (89, 90, 100, 120)]
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
    "nvfp4-5120-bf16-bf16": Seam(Norm(1e-6), residual=True, quants=(Quant("nvfp4"),), outputs=("residual",)),
    "nvfp4-464-fp32-fp32": Seam(Norm(1e-6, "none"), quants=(Quant("nvfp4", scale_layout="linear"),)),
    "norm-32768-bf16-bf16": Seam(Norm(1e-6), residual=True, outputs=("residual", "norm")),
}


def build(name: str, target: GPUTarget):
    _, hidden, x, w = name.split("-")
    seam = SEAMS[name]
    quant = seam.quants[0] if seam.quants else None
    constants = {
        **local.attributes(int(hidden), seam.inner_norm, seam.norm, quant, seam.residual),
        "HAS_RESIDUAL_OUT": "residual" in seam.outputs,
        "HAS_NORM_OUT": "norm" in seam.outputs,
        "NATIVE": target.backend == "cuda",
    }
    one_byte_scales = quant is not None and quant.scale_dtype in ("ue8m0", "float8_e4m3fn")
    types = {
        "x_ptr": f"*{x}",
        "residual_ptr": f"*{x}",
        "inner_weight_ptr": f"*{w}",
        "weight_ptr": f"*{w}",
        "scale_ptr": "*fp32",
        "residual_out_ptr": f"*{x}",
        "norm_out_ptr": f"*{'fp32' if seam.norm.weight == 'after_cast' and w != x else x}",
        "codes_ptr": "*u8",
        "scales_ptr": "*u8" if one_byte_scales else "*fp32",
        "tokens": "i32",
        "x_stride": "i32",
        "residual_stride": "i32",
        "column_stride": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    names = local.local_kernel.arg_names
    # What a launch finds out of allocations and of row strides that are multiples of 16.
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n in types
        if n.endswith("_ptr") or n in ("x_stride", "residual_stride")
    }
    source = ASTSource(local.local_kernel, {n: types[n] for n in names}, constants, aligned)
    return triton.compile(source, target=target, options=launch.choose(int(hidden)).options())


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("target", NVIDIA, ids=lambda t: f"sm_{t.arch}")
@pytest.mark.parametrize("name", SEAMS)
def test_the_kernel_builds_for_nvidia(name, target):
    built = build(name, target)
    assert built.asm["cubin"]
    ptx = built.asm["ptx"]
    # A contracted multiply-add, an approximate quotient or a flushed subnormal would break the contract.
    # `casts.divide` asks for two fused multiply-adds itself; nothing else may have one.
    divides = name.startswith(("static", "token")) and "reciprocal" not in SEAMS[name].quants[0].rule
    assert bool(re.search(r"\bfma\.\w+\.(ftz\.)?f(32|64)", ptx)) == divides
    # The one estimate is where Newton's steps to the inverse root begin.
    estimates = re.findall(r"\b\w+\.approx[.\w]*|\b\w+\.full[.\w]*|\b\w+[.\w]*\.ftz[.\w]*", ptx)
    assert set(estimates) <= {"rsqrt.approx.ftz.f32"}
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (not name.startswith(("nvfp4", "norm")))
    # Sixteen bytes a thread at once: all loads of rows, but for rows that do not fill their threads.
    if name != "nvfp4-464-fp32-fp32":
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


@pytest.mark.skipif("amd" not in backends, reason="this Triton was built without its AMD backend")
@pytest.mark.parametrize("name", ["static-4096-bf16-bf16", "nvfp4-5120-bf16-bf16", "group-2880-fp16-fp32"])
def test_the_kernel_builds_for_amd(name):
    assert build(name, AMD).asm["hsaco"]
