"""Which of FlashInfer's fused kernels, if any, computes what a seam asks for.

FlashInfer fuses one chain: all_reduce + residual + RMSNorm (+ one quantiser). A seam goes there as far as
what the kernel computes is what the seam says, down to the order of its roundings; the rest of the seam
runs in our local kernel behind it. What the kernels compute is read from the sources of 0.7.4
(trtllm_allreduce_fusion.cuh, trtllm_mnnvl_allreduce.cuh).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from torchseam.backends.flashinfer_api import Installed
from torchseam.formats import layout
from torchseam.seam import SCALE_FLOORS, Quant, Seam

ALL_REDUCE = "kAllReduce"
NORM = "kARResidualRMSNorm"
#: Scheme -> (pattern, the same that emits the norm too, its name among the quantisers of mnnvl, "" without one).
QUANTS = {
    "fp8_static": ("kARResidualRMSNormFP8Quant", "kARResidualRMSNormOutFP8Quant", "FP8"),
    "nvfp4": ("kARResidualRMSNormFP4Quant", "kARResidualRMSNormOutFP4Quant", "NVFP4"),
    "fp8_token": ("kARResidualRMSNormDynamicFP8Quant", "kARResidualRMSNormOutDynamicFP8Quant", "DYNAMIC_FP8"),
    "fp8_group": (
        "kARResidualRMSNormPerTokenGroupFP8PackedQuant",
        "kARResidualRMSNormOutPerTokenGroupFP8PackedQuant",
        "",
    ),
}
#: The least scale of its group quantiser, before it is rounded up to a power of two (compute_ue8m0_scale).
PACKED_FLOOR = 1e-10
LAYOUTS = {"swizzled": "SWIZZLED_128x4", "linear": "LINEAR"}
#: Below, the NVFP4 kernels compile to nothing: codes 0, no scales (cvt_warp_fp16_to_fp4).
NVFP4_SINCE = (10, 0)
WORLD_SIZES = {"trtllm": (2, 4, 8), "mnnvl": (2, 4, 8, 16, 32, 64)}
#: 16 bytes a thread; whole warps, because older versions reduce a row over partial ones wrongly.
_THREAD_VALUES, _WARP, _MAX_THREADS, _MAX_CLUSTER, _MIN_BLOCK = 8, 32, 1024, 8, 128


@dataclass(frozen=True)
class Plan:
    """How a seam runs: `pattern` on FlashInfer, then what is left on our own kernels.

    left: nothing; the quantisers, of the norm that FlashInfer emits; or all of the seam but its sum.
    why: why not more of it is in one kernel; None when all of it is.
    """

    pattern: str
    left: Literal["nothing", "quantisers", "seam"]
    why: str | None = None

    @property
    def remark(self) -> str:
        """For reports: how far FlashInfer goes."""
        done = {"nothing": "all", "quantisers": "all but the quantiser", "seam": "only the sum"}[self.left]
        return f"{done} in FlashInfer's kernel" + (f": {self.why}" if self.why else "")


@functools.lru_cache(maxsize=1024)
def plan(seam: Seam, x: torch.dtype, weight: torch.dtype | None, backend: str, abilities: Abilities) -> Plan:
    """What of a seam FlashInfer runs."""
    why = _norm_differs(seam, x, weight)
    if why is not None:
        return Plan(ALL_REDUCE, "seam", why)
    if not seam.quants:
        return Plan(NORM, "nothing")
    why = _quants_differ(seam.quants, backend, abilities)
    if why is not None:
        return Plan(NORM, "quantisers", why)
    return Plan(QUANTS[seam.quants[0].scheme]["norm" in seam.outputs], "nothing")


def _norm_differs(seam: Seam, x: torch.dtype, weight: torch.dtype | None) -> str | None:
    if not seam.residual:
        return "no residual, and the kernel would read one"
    if seam.inner_norm is not None:
        return "a norm before the residual"
    if "reduced" in seam.outputs:
        return "the sum itself is read too"
    if seam.norm.weight == "after_cast":
        return "the model rounds the norm before it multiplies with the weight, the kernel only after"
    if weight is not None and weight != x:
        return f"the weight is {weight}, and the kernel reads it as {x}"
    return None


def _quants_differ(quants: tuple[Quant, ...], backend: str, abilities: Abilities) -> str | None:
    if len(quants) > 1:
        return f"{len(quants)} quantisers"
    quant = quants[0]
    if quant.scheme == "fp8_group" and quant.scale_layout != layout.PACKED:
        return (
            f"the kernel packs four UE8M0 scales into a word, the seam's are {quant.scale_dtype} {quant.scale_layout}"
        )
    if not abilities.takes(quant.scheme, backend):
        return f"{quant.scheme} is not fused by flashinfer {'.'.join(map(str, abilities.version))} in {backend}"
    if quant.scheme == "nvfp4" and abilities.capability < NVFP4_SINCE:
        return f"its nvfp4 needs compute capability 10.0, this is {'.'.join(map(str, abilities.capability))}"
    if quant.scheme == "nvfp4" and quant.global_scale != "encode":
        return f"the kernel multiplies by an encode factor, the seam's global scale is {quant.global_scale!r}"
    if quant.scheme == "fp8_static" and quant.rule != "reciprocal":
        return f"the kernel computes y * (1 / scale), the seam's rule is {quant.rule!r}"
    if quant.scheme == "fp8_token":
        floor = SCALE_FLOORS["fp8_token"]
        asked = (quant.rule, quant.scale_rule, quant.scale_rounding, quant.scale_floor)
        if asked != ("divide", "divide", "none", floor):
            return f"the kernel computes y / max(amax / 448, {floor:.3g}), the seam another recipe"
    # Whether y is divided by a power of two or multiplied by its reciprocal is the same.
    made = (quant.scale_rule, quant.scale_rounding, quant.scale_floor)
    if quant.scheme == "fp8_group" and made != ("divide", "none", PACKED_FLOOR):
        return f"the kernel rounds max(amax / 448, {PACKED_FLOOR:.3g}) up, the seam another number"
    return None


@dataclass(frozen=True)
class Abilities:
    """What one installation can fuse on one architecture (an `Installed` that can be hashed)."""

    version: tuple[int, ...]
    capability: tuple[int, int]
    patterns: frozenset[str]
    mnnvl_quants: frozenset[str]

    @staticmethod
    def of(installed: Installed, capability: tuple[int, int]) -> Abilities:
        return Abilities(installed.version, capability, frozenset(installed.patterns), installed.mnnvl_quants)

    def takes(self, scheme: str, backend: str) -> bool:
        pattern, with_norm, mnnvl = QUANTS[scheme]
        return {pattern, with_norm} <= self.patterns and (backend != "mnnvl" or mnnvl in self.mnnvl_quants)


def row_refused(hidden: int) -> str | None:
    """Why FlashInfer's kernels cannot be launched on rows of this length, or None.

    A row is shared by a cluster of blocks, one thread for 8 values; the blocks are found as
    allreduce_fusion_kernel_launcher finds them.
    """
    if hidden % _THREAD_VALUES:
        return f"hidden size {hidden} is no multiple of {_THREAD_VALUES}"
    threads, cluster = hidden // _THREAD_VALUES, _MAX_CLUSTER
    while threads % cluster:
        cluster //= 2
    block = threads // cluster
    while block < _MIN_BLOCK and cluster > 1:
        block, cluster = block * 2, cluster // 2
    if block % _WARP:
        return f"hidden size {hidden} makes blocks of {block} threads, which are no whole warps"
    if block > _MAX_THREADS:
        return f"hidden size {hidden} needs blocks of {block} threads; {_MAX_THREADS} is the most"
    return None


def compatibility(installed: Installed) -> Iterator[tuple[str, str, str, str]]:
    """(backend, fused with all_reduce + residual + RMSNorm, compute capability, world sizes) of one installation."""
    for backend, sizes in WORLD_SIZES.items():
        since = {"trtllm": "9.0", "mnnvl": "9.0 on one node, 10.0 on several; NVLink multicast"}[backend]
        worlds = ", ".join(map(str, sizes))
        yield backend, "nothing more", since, worlds
        for scheme in QUANTS:
            if Abilities.of(installed, NVFP4_SINCE).takes(scheme, backend):
                nvfp4 = since.replace("9.0 on one node, 10.0 on several", "10.0").replace("9.0", "10.0")
                name = f"{scheme}, `{layout.PACKED}`" if scheme == "fp8_group" else scheme
                yield backend, name, nvfp4 if scheme == "nvfp4" else since, worlds
