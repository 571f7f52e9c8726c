"""How a kernel is launched: the choice as a value, and the options that the contract needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torchseam.seam import Quant

#: Bytes of a packet (kernels/packets.py).
PACKET = 16
#: Threads of a warp (NVIDIA).
WARP = 32

#: Elements of a row in each thread, which bounds the registers: 16, 32 for blocks of 8192 and more, and 64 for rows
#: that do not fill a block of 8192. H200, 2026-12-01, `python benchmarks/local.py --launches`, us at T = 4096 for 4, 8,
#: 16 and 32 warps: H 8192: per-token 59.0, 58.7, 60.3, 62.8, NVFP4 61.7, 61.2, 64.5, 64.0; H 7168: 51.6, 56.0, 57.1,
#: 61.6, and 50.8, 57.0, 57.1, 103.6; H 5120: 37.6, 37.5, 50.7, 55.5, and 37.2, 39.8, 52.5, 97.4; H 16384: 135.1, 134.7,
#: 134.3, 141.3, and 152.0, 145.9, 143.5, 146.7. At T = 1 fewer are as good or better up to H = 8192. Rows that do not
#: fill a block of 16384 or 32768, and H = 32768, were not measured.
_ELEMENTS_PER_WARP, _ELEMENTS_PER_WARP_OF_LONG_ROWS, _ELEMENTS_PER_WARP_OF_PADDED_ROWS = 16 * 32, 32 * 32, 64 * 32
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

    def options(self, pdl: bool = False) -> dict[str, Any]:
        """Keyword arguments of a launch, or the options of an offline compilation.

        `pdl` where the GPU has programmatic dependent launch: the kernel may be launched while the one before it
        runs. `enable_fp_fusion`: a contracted multiply-add rounds once where the contract rounds twice (on by
        default in Triton 3.6, off in 3.9).
        """
        own = {"launch_pdl": True} if pdl else {}
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, **own}


#: Everything that `choose` can return.
CHOICES = (Launch(4), Launch(8), Launch(16), Launch(32))


@dataclass(frozen=True)
class OneShot:
    """One launch choice of the one-shot kernel. Whatever it is, the bits of the results are the same.

    A multiprocessor runs one program, so that all programs run at once.

    parts: programs that share a row; more than 1 only where each program has one part of one row.
    pushers: 0: every program pushes its rows and reduces them; else so many programs only push (`ahead` rows on
        their way to each), and the others only reduce.
    launch_pdl: let the kernel after this one be launched while this one runs (sm_90 and later).
    """

    num_warps: int
    parts: int = 1
    pushers: int = 0
    ahead: int = 1
    launch_pdl: bool = True

    def grid(self, tokens: int, multiprocessors: int) -> tuple[int, int, int]:
        """(programs, those that push: below this number, those that reduce: from this number on)."""
        if self.pushers:
            return multiprocessors, self.pushers, self.pushers
        programs = min(tokens * self.parts, multiprocessors)
        if self.parts > 1 and tokens * self.parts > multiprocessors:
            raise ValueError(
                f"{tokens} rows in {self.parts} parts are more than the {multiprocessors} programs that run at once"
            )
        return programs, programs, 0

    def options(self, pdl: bool) -> dict[str, Any]:
        """As `Launch.options`; `pdl` where the GPU has programmatic dependent launch."""
        own = {"launch_pdl": True} if pdl else {}
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, **own}


# The figures of the next two come of sweeps on two H200s, torch 2.11, Triton 3.6, before `benchmarks/collective.py
# --launches` existed, which prints such tables; that itself has not run yet.

#: More rows than multiprocessors: eight programs keep NVLink as busy as all do, with four rows on their way each,
#: and the others are free to reduce. Two H200s, 2026-12-01, us for 4, 8, 12, 16, 24 pushers and none, T = 1024:
#: H 4096: 52.2, 28.2, 29.4, 29.0, 29.9, 36.8; H 8192: 98.9, 52.6, 58.5, 55.9, 56.8, 70.4 (pushing alone: 47.4).
_PUSHERS, _AHEAD = 8, 4
#: Rows of more packets than this (H = 4096 in bf16) are shared by eight programs while they are few. Two H200s,
#: 2026-12-01, us for 1, 2, 4, 8, 16 parts: H 8192, T 1: 4.4, 4.3, 3.8, 3.6, 3.6; T 8: 4.9, 4.8, 4.5, 4.3, 4.2;
#: T 16: 5.2, 5.2, 5.0, 4.8, -; T 32: 5.8, 6.1, 5.9, -, -. H 4096, T 1: 3.4, 3.5, 3.5, 3.6, 4.0; T 8: 3.8, 4.2, 3.8,
#: 4.0, 4.2: there the exchange between the parts costs what the split gains.
_PACKETS_OF_LONG_ROW, _PARTS, _ROWS_TO_SPLIT = 512, 8, 16


def choose_one_shot(tokens: int, hidden: int, itemsize: int, quant: Quant | None, multiprocessors: int) -> OneShot:
    """The launch choice of the one-shot kernel for T rows of H elements on a GPU of so many multiprocessors.

    Measured with two ranks; more ranks push more often but at the same rate, and share the choice.
    """
    packets = hidden * itemsize // PACKET
    if packets > _PACKETS_OF_LONG_ROW and tokens <= _ROWS_TO_SPLIT:
        unit = PACKET // itemsize * _PARTS
        if quant is not None:
            unit = math.lcm(unit, quant.multiple_of * _PARTS)
        if hidden % unit == 0 and tokens * _PARTS <= multiprocessors:
            return OneShot(_warps_for(packets // _PARTS), _PARTS)
    if tokens > multiprocessors > 2 * _PUSHERS:
        return OneShot(_warps_for(packets), pushers=_PUSHERS, ahead=_AHEAD)
    return OneShot(_warps_for(packets))


@dataclass(frozen=True)
class Roles:
    """Who does what in a launch of the two-shot kernel: programs below `pushers` push, `reducers` from
    `first_reducer` on reduce, those from `first_gatherer` on gather."""

    programs: int
    pushers: int
    first_reducer: int
    reducers: int
    first_gatherer: int


@dataclass(frozen=True)
class TwoShot:
    """One launch choice of the two-shot kernel. Whatever it is, the bits of the results are the same.

    A multiprocessor runs one program, so that all programs run at once.

    pushers, reducers: 0: every program pushes, reduces and gathers; else so many programs only push, so many only
        reduce, and the others only gather.
    ahead: rows for each peer that a pusher has on their way.
    launch_pdl: let the kernel after this one be launched while this one runs (sm_90 and later).
    """

    num_warps: int
    pushers: int = 0
    reducers: int = 0
    ahead: int = 1
    launch_pdl: bool = True

    def roles(self, rows: int, multiprocessors: int) -> Roles:
        """For owners of `rows` rows at most."""
        if not self.pushers:
            programs = min(rows, multiprocessors)
            return Roles(programs, programs, 0, programs, 0)
        first_gatherer = self.pushers + self.reducers
        if self.reducers < 1 or first_gatherer >= multiprocessors:
            raise ValueError(
                f"{self.pushers} pushers and {self.reducers} reducers; there must be at least one reducer, and one of "
                f"the {multiprocessors} programs that run at once must be left to gather"
            )
        return Roles(multiprocessors, self.pushers, self.pushers, self.reducers, first_gatherer)

    def options(self, pdl: bool) -> dict[str, Any]:
        """As `OneShot.options`."""
        return OneShot(self.num_warps).options(pdl)


def choose_two_shot(rows: int, hidden: int, itemsize: int, world_size: int, multiprocessors: int) -> TwoShot:
    """The launch choice of the two-shot kernel for owners of `rows` rows of H elements. Not measured yet.

    Reducers and gatherers move about as many bytes for two ranks, and share the multiprocessors evenly.
    """
    warps = _warps_for(hidden * itemsize // PACKET)
    if rows > multiprocessors > 2 * _PUSHERS:
        ahead = max(_AHEAD // (world_size - 1), 1)
        return TwoShot(warps, _PUSHERS, (multiprocessors - _PUSHERS) // 2, ahead)
    return TwoShot(warps)


def _warps_for(packets: int) -> int:
    """A thread for each packet (two threads of one packet would both push it), a power of two, at most 32 warps."""
    return min(max(1 << (packets - 1).bit_length() >> 5, 1), _MOST_WARPS)


def check_threads(num_warps: int, width: int, itemsize: int) -> None:
    """ValueError if a program that holds `width` elements has more threads than packets: two threads would hold the
    same packet, each would push it, and the second copy could arrive after the first was read and set back."""
    packets = block_of(width) * itemsize // PACKET
    if num_warps * WARP > packets:
        raise ValueError(
            f"{num_warps} warps have {num_warps * WARP} threads; {width} elements of {itemsize} bytes are exchanged as "
            f"{packets} packets of {PACKET} bytes, and no packet may be pushed by two threads: num_warps can be at "
            f"most {packets // WARP}"
        )


def block_of(hidden: int) -> int:
    """Lanes of a program that holds a whole row: the least power of two >= H, and at least 128."""
    return max(_SMALLEST_BLOCK, 1 << (hidden - 1).bit_length())


def choose(hidden: int) -> Launch:
    """The launch choice for rows of H elements, each held by one program."""
    block = block_of(hidden)
    elements = _ELEMENTS_PER_WARP if block < _LONG_ROW else _ELEMENTS_PER_WARP_OF_LONG_ROWS
    if hidden < block == _LONG_ROW:
        elements = _ELEMENTS_PER_WARP_OF_PADDED_ROWS
    return Launch(min(max(block // elements, _FEWEST_WARPS), _MOST_WARPS))
