"""Settings: one frozen `SeamConfig`, and the environment variables that fill its defaults."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from torchseam.seam import SCHEMES

VERSION = "0.1.0"

#: What DESIGN section 5 names. Those that this version does not have are known by name, so that a
#: choice of one is answered with the reason instead of "unknown".
BACKENDS = ("auto", "collective", "symmetric", "mnnvl", "trtllm")

BACKEND_VARIABLE = "TORCHSEAM_BACKEND"
#: vLLM's own choice between FlashInfer's two backends; it counts where ours is unset.
VLLM_BACKEND_VARIABLE = "VLLM_FLASHINFER_ALLREDUCE_BACKEND"
LOG_VARIABLE = "TORCHSEAM_LOG"
DUMP_VARIABLE = "TORCHSEAM_DUMP"
CACHE_VARIABLE = "TORCHSEAM_CACHE"
#: 0: launches as shipped, whatever `torchseam tune` wrote.
TUNED_VARIABLE = "TORCHSEAM_TUNED"


def cache_dir() -> Path:
    """TORCHSEAM_CACHE, else XDG_CACHE_HOME/torchseam, else ~/.cache/torchseam. ValueError for a user without a home."""
    try:
        if own := os.environ.get(CACHE_VARIABLE):
            return Path(own).expanduser()
        if shared := os.environ.get("XDG_CACHE_HOME"):
            return Path(shared) / "torchseam"
        return Path.home() / ".cache" / "torchseam"
    except RuntimeError as error:  # what pathlib raises for a user without a home
        raise ValueError(f"there is no folder for the cache ({error}); set {CACHE_VARIABLE} to one") from error


def _backend_from_environment() -> str:
    own = os.environ.get(BACKEND_VARIABLE)
    # vLLM's variable is for vLLM: another program on the machine does not ask for it.
    theirs = os.environ.get(VLLM_BACKEND_VARIABLE) if "vllm" in sys.modules else None
    return own or theirs or "auto"


@dataclass(frozen=True)
class SeamConfig:
    """What to fuse and how.

    fuse_all_reduce: fuse seams that begin with an all_reduce.
    fuse_norm_quant: fuse (+ residual) -> RMSNorm -> quantise where there is no all_reduce.
    backend: `auto` (the best that every rank of the group can run) or one by name; the default is
        read from TORCHSEAM_BACKEND, or else, where vLLM is imported, from its
        VLLM_FLASHINFER_ALLREDUCE_BACKEND. A backend that cannot work here is a ValueError.
    schemes: quantisation schemes that may be fused; a quantiser of another scheme stays its own op.
    strict: a compilation that leaves a seam unfused fails with `torchseam.SeamsNotFusedError`, which
        lists them all (torch wraps it: it is the `inner_exception` of the error that arrives).
    exact: compile so that a fused model can be compared with eager bit for bit. Sets Inductor's
        `emulate_precision_casts` (every bf16 rounding of eager happens) and runs also the norms
        that are no part of a seam through torchseam's operator, whose row reduction has one fixed
        order. Slower; for parity tests.
    shard_residual: leave the rows of a residual with the ranks that own them (`torchseam.seam.owned_rows`) from seam to
        seam, and gather them only where something else reads it. For backends `auto` and `symmetric`; not measured on
        several GPUs yet, hence off.
    """

    fuse_all_reduce: bool = True
    fuse_norm_quant: bool = True
    backend: str = field(default_factory=_backend_from_environment)
    schemes: tuple[str, ...] = SCHEMES
    strict: bool = False
    exact: bool = False
    shard_residual: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(
                f"backend is {self.backend!r} (SeamConfig.backend, {BACKEND_VARIABLE} or {VLLM_BACKEND_VARIABLE}); "
                f"allowed: {', '.join(BACKENDS)}"
            )
        if isinstance(self.schemes, str):
            raise ValueError(f"schemes is the string {self.schemes!r}; give a tuple, such as ({self.schemes!r},)")
        unknown = [s for s in self.schemes if s not in SCHEMES]
        if unknown:
            raise ValueError(f"schemes has {unknown[0]!r}; allowed: {', '.join(SCHEMES)}")
        object.__setattr__(self, "schemes", tuple(self.schemes))
