"""Which seams a machine's backends are checked with, and their inputs.

Every kind of seam meets every number of rows. `thorough` makes each norm meet each quantiser, which compiles some
hundred kernels; else the norms are dealt to the quantisers in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchseam.formats.fp8 import E4M3_MAX
from torchseam.formats.nvfp4 import E2M1_MAX
from torchseam.operands import Operands
from torchseam.seam import Norm, Output, Quant, Reduce, Seam

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: One row; few; about a tile of 128 scales; more than any GPU has multiprocessors.
TOKENS = (1, 2, 5, 16, 64, 127, 128, 129, 1000)
HIDDENS = (2048, 4096, 5120, 8192)
PACKED = Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed", scale_floor=1e-10)
QUANTS: tuple[tuple[Quant, ...], ...] = (
    (),
    (Quant("fp8_static", rule="reciprocal"),),
    (Quant("fp8_static"),),
    (Quant("fp8_token"),),
    (Quant("fp8_group"),),
    (Quant("fp8_group", 64, "ue8m0", "tma_aligned"),),
    (PACKED,),
    (Quant("nvfp4"),),
    (Quant("nvfp4", scale_layout="linear"),),
    (Quant("fp8_token"), Quant("nvfp4")),
)
#: With the dtype of the weight; None means that of the activations.
NORMS: tuple[tuple[Norm, torch.dtype | None], ...] = (
    (Norm(1e-6), None),
    (Norm(1e-5, offset=1), None),
    (Norm(1e-6), F32),
    (Norm(1e-6, "after_cast"), None),
    (Norm(1e-6, "none"), None),
)
#: Ten groups: the last word of a row of packed scales is half padding.
HALF_WORD = 1280


@dataclass(frozen=True)
class Case:
    """One seam at one size. `str` of it is what a mismatch is told with."""

    seam: Seam
    tokens: int
    hidden: int
    dtype: torch.dtype
    weight_dtype: torch.dtype

    def __str__(self) -> str:
        x, weight = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.weight_dtype))
        return f"T={self.tokens} H={self.hidden} x={x} weight={weight} {self.seam.to_json()}"


def cases(reduce: Reduce | None, *, thorough: bool = False) -> Iterator[Case]:
    """The table, for seams that `reduce`, or that reduce nothing."""
    kinds = list(_kinds(thorough))
    for index, (norm, weight, quants, with_norm) in enumerate(kinds):
        outputs: tuple[Output, ...] = ("residual", "norm") if with_norm or not quants else ("residual",)
        yield from _sizes(Seam(norm, reduce, residual=True, quants=quants, outputs=outputs), weight, index, thorough)
    sum_too: tuple[Output, ...] = ("norm",) if reduce is None else ("reduced", "norm")
    yield from _sizes(Seam(Norm(1e-6), reduce, outputs=sum_too), None, 1, thorough)
    packed = Seam(Norm(1e-6), reduce, residual=True, quants=(PACKED,), outputs=("residual",))
    for tokens in TOKENS:
        yield Case(packed, tokens, HALF_WORD, BF16, BF16)


def _kinds(thorough: bool) -> Iterator[tuple[Norm, torch.dtype | None, tuple[Quant, ...], bool]]:
    """(norm, dtype of its weight, quantisers, whether the norm is an output too)."""
    if thorough:
        for (norm, weight), quants, with_norm in itertools.product(NORMS, QUANTS, (True, False)):
            if quants or with_norm:
                yield norm, weight, quants, with_norm
        return
    dealt = itertools.cycle(NORMS)
    for index, quants in enumerate(QUANTS):
        norm, weight = next(dealt)
        yield norm, weight, quants, index % 2 == 0


def _sizes(seam: Seam, weight: torch.dtype | None, index: int, thorough: bool) -> Iterator[Case]:
    """Every number of rows; hidden sizes and dtypes take turns, with `thorough` from one number to the next."""
    for step, tokens in enumerate(TOKENS):
        turn = index * len(TOKENS) + step if thorough else index
        dtype = F16 if turn % 5 == 3 else BF16
        yield Case(seam, tokens, HIDDENS[turn % len(HIDDENS)], dtype, weight or dtype)


def operands(case: Case, device: torch.device, rank: int, seed: int) -> Operands:
    """Random inputs: x is each rank's own, everything else the same on all ranks."""
    own = torch.Generator(device).manual_seed(1000 * seed + rank + 1)
    shared = torch.Generator(device).manual_seed(1000 * seed)
    shape = (case.tokens, case.hidden)
    x = torch.randn(shape, device=device, generator=own).to(case.dtype)
    residual = torch.randn(shape, device=device, generator=shared).to(case.dtype) if case.seam.residual else None
    weight = None
    if case.seam.norm.has_weight:
        weight = (torch.rand(case.hidden, device=device, generator=shared) + 0.5).to(case.weight_dtype)
    # Scales for values of up to about 6: some saturate.
    numbers = {"fp8_static": 0.013, "nvfp4": E4M3_MAX * E2M1_MAX / 8.0}
    scales = tuple(torch.tensor([numbers[q.scheme]], device=device) for q in case.seam.quants if q.takes_scale)
    return Operands(x, residual, weight=weight, scales=scales)
