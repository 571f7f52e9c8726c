"""How a kernel is launched: the choice as a value, and the options that the contract needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Elements of a row in each thread, which bounds the registers: 16, and 32 for blocks of 8192 and more. H200,
#: 2026-11-30, `python benchmarks/local.py --launches`, us for 8, 16 and 32 warps at H = 8192: per-token 66.3, 69.1,
#: 106.5 and NVFP4 77.4, 81.6, 121.4 at T = 4096; at T = 1 all take 3.4 and 4.4. Blocks of 16384 and more follow
#: that of 8192; they were not measured.
_ELEMENTS_PER_WARP, _ELEMENTS_PER_WARP_OF_LONG_ROWS = 16 * 32, 32 * 32
_LONG_ROW = 8192
_FEWEST_WARPS = 4
#: A CUDA thread block has at most 1024 threads.
_MOST_WARPS = 32
#: Enough for the four padded columns of the narrowest NVFP4 row (H = 16), and a warp's worth of work.
_SMALLEST_BLOCK = 128
#: A row beyond this does not fit in the registers of one program: 32 elements a thread, 1024 threads.
MAX_HIDDEN = 32768


@dataclass(frozen=True)
class Launch:
    """One launch choice. Whatever it is, the bits of the results are the same."""

    num_warps: int

    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch, or the options of an offline compilation.

        `enable_fp_fusion`: a contracted multiply-add rounds once where the contract rounds twice (on by
        default in Triton 3.6, off in 3.9).
        """
        return {"num_warps": self.num_warps, "enable_fp_fusion": False}


#: Everything that `choose` can return.
CHOICES = (Launch(4), Launch(8), Launch(16), Launch(32))


def block_of(hidden: int) -> int:
    """Lanes of a program that holds a whole row: the least power of two >= H, and at least 128."""
    return max(_SMALLEST_BLOCK, 1 << (hidden - 1).bit_length())


def choose(hidden: int) -> Launch:
    """The launch choice for rows of H elements, each held by one program."""
    block = block_of(hidden)
    warps = block // (_ELEMENTS_PER_WARP if block < _LONG_ROW else _ELEMENTS_PER_WARP_OF_LONG_ROWS)
    return Launch(min(max(warps, _FEWEST_WARPS), _MOST_WARPS))
