"""Calls of the collective kernels, what they must give, and the comparison. Not a test module.

What a call gives must have the same bytes on all ranks, and those of the sum in rank order run through the local
kernel and, with the kernels' own row reduction, through the reference.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import kernel_cases
import torch
from kernel_cases import DTYPES, STRUCTURES, bits, canonical_reduction, norms, poisoned_outputs, quantizers, storage
from shared_ranks import make_channels, run_in_turn, run_ranks
from torch import Tensor

from torchseam import reference
from torchseam.kernels import local
from torchseam.kernels.channel import Channel
from torchseam.operands import Operands
from torchseam.seam import OUTPUTS, Quant, Reduce, Seam

#: 384, 464, 640 and 144 do not fill a power of two of lanes; 464 and 144 have a tile of scale columns that is not full.
HIDDENS = (384, 464, 256, 640, 144)
TOKENS = (1, 3, 2, 9, 5, 0, 1)


@dataclass(frozen=True)
class Call:
    """One collective call: the seam, every rank's x, what else it reads, and what launches it.

    `run` is `run` of a collective kernel's module, `launch` its keyword argument.
    """

    run: Callable[..., list[Tensor]]
    seam: Seam
    terms: tuple[Tensor, ...]
    operands: Operands
    launch: Any = None

    def __str__(self) -> str:
        x = self.terms[0]
        return f"{self.run.__module__} T={x.shape[0]} H={x.shape[1]} {x.dtype} {self.launch} {self.seam.to_json()}"

    def on(self, channel: Channel) -> list[Tensor]:
        """This rank's part of the call."""
        return self.run(self.seam, self.operands_of(self.terms[channel.rank]), channel, launch=self.launch)

    def operands_of(self, x: Tensor) -> Operands:
        return dataclasses.replace(self.operands, x=x)

    def total(self) -> Tensor:
        """The sum in rank order, fp32, rounded once."""
        total = self.terms[0].float()
        for term in self.terms[1:]:
            total = total + term.float()
        return total.to(self.terms[0].dtype)

    def by_kernel(self) -> list[Tensor]:
        """All outputs, of the total through the local kernel."""
        total = self.total()
        first = [total] if "reduced" in self.seam.outputs else []
        return first + local.run(self.seam.local(), self.operands_of(total))

    def expected(self) -> list[tuple[str, list[Tensor]]]:
        """(what it was computed with, all outputs)."""
        with canonical_reduction():
            by_reference = reference.run(
                self.seam, self.operands_of(self.total()), lambda x: x, lambda residual: residual
            )
        return [("the local kernel", self.by_kernel()), ("the reference", by_reference)]


def call_of(
    run: Callable[..., list[Tensor]],
    case: kernel_cases.Case,
    world_size: int,
    tokens: int,
    *,
    reduced: bool = False,
    launch: Any = None,
    seed: int = 0,
) -> Call:
    """A case of the kernels' table as a call: random rows, each rank its own."""
    assert case.seam is not None
    given = [kernel_cases.inputs(case, tokens, special=False, seed=100 * seed + r) for r in range(world_size)]
    outputs = tuple(o for o in OUTPUTS if o in case.seam.outputs or (reduced and o == "reduced"))
    seam = dataclasses.replace(case.seam, reduce=Reduce("group"), outputs=outputs)
    return Call(run, seam, tuple(g.x for g in given), given[0].operands(), launch)


def table(run: Callable[..., list[Tensor]], world_size: int, launches: Sequence[Any] = (None,)) -> list[Call]:
    """Every quantiser, the rest dealt in turn: dtype, T, H, structure, norm, what is emitted, launch."""
    dtypes, tokens, hiddens = itertools.cycle(DTYPES), itertools.cycle(TOKENS), itertools.cycle(HIDDENS)
    structures, parts, dealt_launches = itertools.cycle(STRUCTURES), itertools.cycle(norms()), itertools.cycle(launches)
    emitted = itertools.cycle(itertools.product((False, True), ((), ("residual",), ("norm",), ("residual", "norm"))))
    calls = []
    for index, quant in enumerate([None, *quantizers(), None]):
        (residual, has_inner), (norm, weight_dtype), (reduced, outputs) = next(structures), next(parts), next(emitted)
        own = tuple(o for o in outputs if residual or o != "residual")
        if quant is None and "norm" not in own:
            own = (*own, "norm")
        inner = next(parts)[0] if has_inner else None
        seam = Seam(norm, None, inner, residual, (quant,) if quant else (), own)
        hidden = next(h for h in hiddens if h % (quant.multiple_of if quant else 1) == 0)
        case = kernel_cases.Case(seam, None, hidden, next(dtypes), weight_dtype)
        arguments = {"reduced": reduced, "launch": next(dealt_launches), "seed": index}
        calls.append(call_of(run, case, world_size, next(tokens), **arguments))
    return calls


def payloads(run: Callable[..., list[Tensor]], world_size: int, hidden: int = 256) -> list[Call]:
    """-0.0, all ones (the word that means absent), NaN, infinities, subnormals, random bits; for every scheme."""
    calls = []
    schemes = itertools.cycle((Quant("fp8_token"), Quant("nvfp4"), Quant("fp8_static"), Quant("fp8_group")))
    for dtype, integer in ((torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)):
        patterns = [torch.full((hidden,), -0.0, dtype=dtype), torch.full((hidden,), -1, dtype=integer).view(dtype)]
        for value in (float("nan"), float("inf"), float("-inf"), torch.finfo(dtype).smallest_normal / 8):
            row = torch.linspace(-2, 2, hidden).to(dtype)
            row[::7] = value
            patterns.append(row)
        generator = torch.Generator().manual_seed(3)
        noise = torch.randint(-(2**15), 2**15, (hidden,), generator=generator).to(torch.int16)
        patterns.append(noise.to(integer).view(dtype))
        rows = torch.stack(patterns)
        terms = tuple(rows.roll(rank, 0) if rank % 2 else rows for rank in range(world_size))
        for alike in (True, False):
            quant = next(schemes)
            scales = (kernel_cases.scale_for(quant),) if quant.takes_scale else ()
            seam = Seam(kernel_cases.Norm(1e-6, "none"), Reduce("group"), None, True, (quant,), OUTPUTS)
            own = tuple(rows for _ in range(world_size)) if alike else terms
            calls.append(Call(run, seam, own, Operands(rows, torch.zeros_like(rows), scales=scales)))
    return calls


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Alike in dtype, shape, strides and every bit, those of padding too; any two NaNs are."""
    alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return alike and torch.equal(bits(storage(a).view(a.dtype)), bits(storage(b).view(b.dtype)))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Alike in strides and every byte, those of padding too."""
    return a.stride() == b.stride() and torch.equal(storage(a), storage(b))


def check(
    calls: Sequence[Call],
    *,
    slot_bytes: int = 1 << 16,
    multiprocessors: int = 1,
    longest_sleep: float = 0.0,
    alike: Callable[[Tensor, Tensor], bool] = same_bytes,
) -> list[str]:
    """Run the calls one after another on one channel, outputs poisoned, and return what is wrong; [] when nothing.

    `alike`: how the ranks' outputs must be alike. CPUs, unlike GPUs, keep the bits of a NaN that is added.
    """
    world_size = len(calls[0].terms)
    channels, buffers = make_channels(world_size, slot_bytes=slot_bytes, multiprocessors=multiprocessors)
    with poisoned_outputs():
        own = [lambda rank, call=call: call.on(channels[rank]) for call in calls]
        counters = [lambda rank: int(channels[rank].counter)]
        *results, counted = zip(*run_ranks(world_size, run_in_turn, own + counters, longest_sleep), strict=True)
    broken = []
    # The counter counts calls in units of 2^20.
    if set(counted) != {sum(call.terms[0].numel() > 0 for call in calls) << 20}:
        broken.append(f"the ranks counted {counted}")
    for call, got in zip(calls, results, strict=True):
        for rank, outputs in enumerate(got[1:], 1):
            if not all(alike(a, b) for a, b in zip(outputs, got[0], strict=True)):
                broken.append(f"{call}: rank {rank} differs from rank 0")
        for source, expected in call.expected():
            wrong = [i for i, (a, b) in enumerate(zip(got[0], expected, strict=True)) if not same_storage(a, b)]
            if wrong:
                broken.append(f"{call}: outputs {wrong} are not those of {source}")
    broken += [
        f"the buffer of rank {r} is not all absent" for r, b in enumerate(buffers) if not bool((b == 0xFF).all())
    ]
    return broken


def shuffled(calls: Sequence[Call], seed: int) -> list[Call]:
    """The calls in another order, the same for each seed."""
    order = list(calls)
    random.Random(seed).shuffle(order)
    return order
