"""The one table of what a seam can be: for tests and benchmarks, generated from the vocabulary of seam.py.

A new scheme, layout, norm spelling or dtype appears here by itself; nothing is listed by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from torchseam import ops
from torchseam import seam as vocabulary
from torchseam.seam import Norm, Quant, Reduce, Seam

#: Of real models: Llama 1e-5, Qwen and Gemma 1e-6, T5-like 1e-12, and 1e-6 that went through fp32 (GGUF).
EPSILONS = (1e-6, 1e-5, 9.999999974752427e-07, 1e-12)
#: What stands before the norm: nothing, an added residual, or Gemma's norm-then-add.
KINDS = ("none", "residual", "sandwich")
_OFFSETS = get_args(get_type_hints(Norm)["offset"])


def _valid(make: Any, *axes: Sequence[Any]) -> tuple[Any, ...]:
    """What `make` accepts of the product of the axes, each once."""
    found: dict[Any, None] = {}
    for values in itertools.product(*axes):
        try:
            found[make(*values)] = None
        except ValueError:
            continue
    return tuple(found)


QUANTS: tuple[Quant, ...] = _valid(
    Quant,
    vocabulary.SCHEMES,
    (0, *vocabulary.FP8_GROUP_SIZES, vocabulary.NVFP4_BLOCK),
    tuple(dict.fromkeys(itertools.chain(*vocabulary.SCALE_DTYPES.values()))),
    tuple(dict.fromkeys(itertools.chain(*vocabulary.SCALE_LAYOUTS.values()))),
    vocabulary.RULES,
)
NORMS: tuple[Norm, ...] = _valid(Norm, EPSILONS[:1], vocabulary.WEIGHT_MODES, _OFFSETS)
ACTIVATION_DTYPES = WEIGHT_DTYPES = ops.ACTIVATION_DTYPES


@dataclass(frozen=True)
class Case:
    """A seam without its collective, and the dtypes that it meets. `weight_dtype` is that of every norm weight."""

    norm: Norm
    kind: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    quant: Quant | None = None

    def seam(
        self,
        quants: Sequence[Quant] | None = None,
        reduce: Reduce | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Seam:
        """The seam; `quants` instead of the case's own, and all intermediate values unless `outputs` says which."""
        if quants is None:
            quants = () if self.quant is None else (self.quant,)
        residual = self.kind != "none"
        exist = {"reduced": reduce is not None, "residual": residual, "norm": True}
        return Seam(
            norm=self.norm,
            reduce=reduce,
            inner_norm=self.norm if self.kind == "sandwich" else None,
            residual=residual,
            quants=tuple(quants),
            outputs=tuple(o for o in vocabulary.OUTPUTS if (exist[o] if outputs is None else o in outputs)),
        )

    def __str__(self) -> str:
        short = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
        weight = f"{self.norm.weight}{'+1' if self.norm.offset else ''}"
        if self.norm.has_weight:
            weight += f"-{short[str(self.weight_dtype)]}"
        return "-".join((short[str(self.dtype)], self.kind, weight, *([describe(self.quant)] if self.quant else ())))


def describe(quant: Quant) -> str:
    """A short name: `fp8_group-128-ue8m0-tma_aligned-divide`."""
    parts = (quant.scheme, quant.group_size, quant.scale_dtype, quant.scale_layout, quant.rule)
    return "-".join(str(p) for p in parts if p)


def _stretches() -> tuple[Case, ...]:
    table: dict[Case, None] = {}
    for norm, kind, dtype, weight_dtype in itertools.product(NORMS, KINDS, ACTIVATION_DTYPES, WEIGHT_DTYPES):
        table[Case(norm, kind, dtype, weight_dtype if norm.has_weight else dtype)] = None
    return tuple(table)


#: Every case without a quantiser, and every case with each quantiser or none.
STRETCHES = _stretches()
CASES = tuple(Case(s.norm, s.kind, s.dtype, s.weight_dtype, quant) for s in STRETCHES for quant in (None, *QUANTS))


def spread(count: int) -> list[Case]:
    """`count` cases from all over the table, the same every time: steps of the golden section, so that
    every axis is sampled and not only the fast one."""
    golden = (math.sqrt(5) - 1) / 2
    picks = dict.fromkeys(int(len(CASES) * (i * golden % 1)) for i in range(count))
    return [CASES[i] for i in picks]


# --- tensors ---------------------------------------------------------------------------------------

#: |y| of a norm of normal numbers seldom exceeds it, but does: so static scales saturate somewhere.
_USUAL_AMAX = 3.0


def scale_for(quant: Quant, device: str = "cpu") -> Tensor | None:
    """A scale for y of amax about 3, no power of two (its reciprocal rounds); None where none is taken."""
    if not quant.takes_scale:
        return None
    if quant.scheme == "nvfp4":
        value = 448.0 * 6.0 / _USUAL_AMAX * 1.1
    else:
        value = 448.0 / _USUAL_AMAX if quant.rule == "multiply" else _USUAL_AMAX / 448.0
    return torch.tensor(value, dtype=torch.float32, device=device)


def arguments(
    seam: Seam,
    lead: tuple[int, ...],
    hidden: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Keyword arguments of `torchseam.ops.seam` (without the seam itself) with x [*lead, hidden].

    Rows differ in magnitude by powers of two up to 2^8. Weights of offset 1 are near 0 as Gemma's
    are, others near 1.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows() -> Tensor:
        magnitude = torch.exp2(torch.randint(-4, 5, (*lead, 1), generator=generator).float())
        return (torch.randn(*lead, hidden, generator=generator) * magnitude).to(dtype).to(device)

    def weight(norm: Norm | None) -> Tensor | None:
        if norm is None or not norm.has_weight:
            return None
        values = 0.25 * torch.randn(hidden, generator=generator) + (0.0 if norm.offset else 1.0)
        return values.to(weight_dtype or dtype).to(device)

    return {
        "x": rows(),
        "residual": rows() if seam.residual else None,
        "weight": weight(seam.norm),
        "inner_weight": weight(seam.inner_norm),
        "scales": [s for q in seam.quants if (s := scale_for(q, device)) is not None],
    }


def positional(seam: Seam, given: dict[str, Any]) -> tuple[Any, ...]:
    """`arguments` in the order of the operator's schema, the seam's JSON last."""
    return (*(given[n] for n in ("x", "residual", "inner_weight", "weight", "scales")), seam.to_text())


def split(seam: Seam, results: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """An operator's results -> ({output name: value}, [[codes] or [codes, scales] of each quantiser])."""
    rest = list(results)
    values = {name: rest.pop(0) for name in seam.outputs}
    quantized = [[rest.pop(0) for _ in range(1 + q.emits_scale)] for q in seam.quants]
    assert not rest, f"{len(rest)} results too many"
    return values, quantized
