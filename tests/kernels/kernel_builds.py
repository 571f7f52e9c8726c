"""Offline compilations of the local kernel, and what can be read from them, with no GPU. Not a test module."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchseam.kernels import launch, local
from torchseam.seam import Norm, Quant, Seam

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def nvidia(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, 32)


def seam_of(quant: Quant) -> Seam:
    """What benchmarks/local.py times: residual + RMSNorm + quantiser, the sum emitted."""
    return Seam(Norm(1e-6), residual=True, quants=(quant,), outputs=("residual",))


def build(
    seam: Seam,
    hidden: int,
    target: GPUTarget,
    x: str = "bf16",
    w: str = "bf16",
    choice: launch.Launch | None = None,
) -> Any:
    """The kernel as a launch on contiguous tensors of activations `x` and weights `w` (Triton's names) compiles it."""
    quant = seam.quants[0] if seam.quants else None
    constants = {
        **local.attributes(hidden, seam.inner_norm, seam.norm, quant, seam.residual),
        "HAS_RESIDUAL_OUT": "residual" in seam.outputs,
        "HAS_NORM_OUT": "norm" in seam.outputs,
        "NATIVE": local.native_level(divmod(target.arch, 10)) if target.backend == "cuda" else 0,
        "PDL": target.backend == "cuda" and target.arch >= 90,
    }
    one_byte_scales = quant is not None and quant.scale_dtype in ("ue8m0", "float8_e4m3fn")
    packed = quant is not None and quant.scale_layout == "tma_aligned_packed"
    types = {
        "x_ptr": f"*{x}",
        "residual_ptr": f"*{x}",
        "inner_weight_ptr": f"*{w}",
        "weight_ptr": f"*{w}",
        "scale_ptr": "*fp32",
        "residual_out_ptr": f"*{x}",
        "norm_out_ptr": f"*{'fp32' if seam.norm.weight == 'after_cast' and w != x else x}",
        "codes_ptr": "*u8",
        "scales_ptr": "*i32" if packed else "*u8" if one_byte_scales else "*fp32",
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
    return triton.compile(source, target=target, options=(choice or launch.choose(hidden)).options())


def disassembled(built: Any, tool: str, *options: str) -> str:
    """What `cuobjdump` or `nvdisasm` of Triton's package says of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        return subprocess.run(
            [str(TOOLS / tool), *options, file.name], capture_output=True, text=True, check=True
        ).stdout
