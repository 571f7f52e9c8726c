"""Random models out of seam parts, as values that hypothesis draws, and what a person would say is fused in them.

A model is a residual stream through one to four blocks. `Model.forward` is plain PyTorch; `expected` reads
the same description and never looks at a graph.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as funcol
from hypothesis import strategies as st
from torch import Tensor

from blocks import (
    DTYPES,
    HIDDEN,
    NORMS,
    WEIGHT_DTYPES,
    AtenDynamic,
    AtenStatic,
    LlamaNorm,
    quantise,
    quantisers,
)
from torchseam import Quant

SHAPE = (2, 3, HIDDEN)
FLAT = (6, HIDDEN)

#: Where a static scale comes from: given, computed from an input (after the norm in the graph), from this
#: block's own norm (which forbids to fuse), or from the block before.
SCALES = ("given", "late", "own", "before")
#: What may be read besides what the model needs, and how: returned as it is, or computed with.
READABLE = ("sum", "inner", "h", "norm")


@dataclass(frozen=True)
class Quantiser:
    how: Quant | AtenStatic | AtenDynamic
    scale: str = "given"
    flat: bool = False

    @property
    def takes_scale(self) -> bool:
        return isinstance(self.how, AtenStatic) or (isinstance(self.how, Quant) and self.how.takes_scale)

    @property
    def recipe(self) -> object:
        """What makes two quantisers twins; for dynamic ones only the scheme, which the plan can tell."""
        if not self.takes_scale:
            return self.how if self.how.scheme == "nvfp4" else self.how.scheme
        return Quant("fp8_static", rule=self.how.rule) if isinstance(self.how, AtenStatic) else self.how


@dataclass(frozen=True)
class BlockPlan:
    """One block. `groups`: the groups of its all_reduces, one after another; `residual`: absent, on either side,
    or computed from the sum itself; `branch`: a second norm and quantiser that read the same h."""

    groups: tuple[int, ...]
    inner: type[LlamaNorm] | None
    residual: str
    norm: type[LlamaNorm] | None
    weight_dtype: torch.dtype
    quantisers: tuple[Quantiser, ...]
    flat_input: bool
    flat_norm: bool
    reads: tuple[tuple[str, str], ...]
    router: bool
    branch: tuple[type[LlamaNorm], Quantiser | None] | None
    next_reads: str


@dataclass(frozen=True)
class ModelPlan:
    dtype: torch.dtype
    stream_dtype: torch.dtype
    blocks: tuple[BlockPlan, ...]


def _weighted(*values):
    return st.sampled_from([value for value, times in values for _ in range(times)])


_quantiser = st.builds(
    Quantiser,
    st.sampled_from([q for q in quantisers() if q is not None]),
    _weighted(("given", 5), ("late", 2), ("own", 1), ("before", 2)),
    st.booleans(),
)


@st.composite
def _quantiser_lists(draw) -> tuple[Quantiser, ...]:
    """None to three; one in three lists has its first quantiser twice."""
    chosen = draw(st.lists(_quantiser, max_size=3))
    if chosen and draw(_weighted((False, 2), (True, 1))):
        chosen = [chosen[0], *chosen][:3]
    return tuple(chosen)


_norm = st.sampled_from(NORMS)
_block = st.builds(
    BlockPlan,
    groups=_weighted(((0,), 6), ((1,), 2), ((), 2), ((0, 1), 1)),
    inner=st.one_of(st.none(), st.none(), _norm),
    residual=_weighted(("left", 4), ("right", 4), ("none", 2), ("from sum", 1)),
    norm=st.one_of(_norm, _norm, _norm, st.none()),
    weight_dtype=st.sampled_from(WEIGHT_DTYPES),
    quantisers=_quantiser_lists(),
    flat_input=st.booleans(),
    flat_norm=st.booleans(),
    reads=st.lists(st.tuples(st.sampled_from(READABLE), st.sampled_from(("returned", "computed"))), max_size=2).map(
        tuple
    ),
    router=st.booleans(),
    branch=st.one_of(st.none(), st.none(), st.tuples(_norm, st.one_of(st.none(), _quantiser))),
    next_reads=st.sampled_from(("norm", "h")),
)

models = st.integers(0, 9).flatmap(
    lambda n: st.builds(
        ModelPlan,
        dtype=st.sampled_from(DTYPES),
        # one model in ten keeps its residual stream in fp32, whatever its activations are
        stream_dtype=st.just(torch.float32) if n == 9 else st.none(),
        blocks=st.lists(_block, min_size=1, max_size=4).map(tuple),
    ).map(lambda plan: ModelPlan(plan.dtype, plan.stream_dtype or plan.dtype, plan.blocks))
)


#: Blocks as most models have them, one part in eight otherwise: chains whose residual can be sharded, and their ends.
_stream_block = st.builds(
    BlockPlan,
    groups=_weighted(((0,), 14), ((1,), 1), ((), 1)),
    inner=st.one_of(st.none(), st.none(), _norm),
    residual=_weighted(("left", 7), ("right", 7), ("none", 1), ("from sum", 1)),
    norm=_norm,
    weight_dtype=st.just(torch.bfloat16),
    quantisers=_quantiser_lists(),
    flat_input=st.booleans(),
    flat_norm=st.booleans(),
    reads=_weighted(((), 14), ((("h", "returned"),), 1), ((("sum", "computed"),), 1)),
    router=st.booleans(),
    branch=_weighted((None, 14), ((LlamaNorm, None), 1), ((LlamaNorm, Quantiser(Quant("fp8_token"))), 1)),
    next_reads=_weighted(("norm", 7), ("h", 1)),
)
streams = st.builds(
    ModelPlan,
    dtype=st.sampled_from(DTYPES),
    stream_dtype=st.just(None),
    blocks=st.lists(_stream_block, min_size=3, max_size=5).map(tuple),
).map(lambda plan: ModelPlan(plan.dtype, plan.dtype, plan.blocks))


class Model(torch.nn.Module):
    """The model that a plan describes, over the groups with the given names."""

    def __init__(self, plan: ModelPlan, groups: tuple[str, ...]) -> None:
        super().__init__()
        self.plan, self.groups = plan, groups
        generator = torch.Generator().manual_seed(3)
        self.norms = torch.nn.ModuleDict()
        for i, block in enumerate(plan.blocks):
            spellings = {"inner": block.inner, "norm": block.norm, "branch": block.branch and block.branch[0]}
            for name, spelling in spellings.items():
                if spelling is not None:
                    weight = (torch.rand(HIDDEN, generator=generator) + 0.5).to(block.weight_dtype)
                    self.norms[f"{name}{i}"] = spelling(weight)
        self.register_buffer("scale", torch.tensor(0.01))
        self.register_buffer("router", torch.randn(HIDDEN, 4, generator=generator))

    def forward(self, x: Tensor, stream: Tensor, raw: Tensor) -> tuple[Tensor, ...]:
        outs: list[Tensor] = []
        before = x
        for i, block in enumerate(self.plan.blocks):
            x, stream, before = self._block(i, block, x, stream, before, raw, outs)
        return (*outs, x, stream)

    def _block(self, i, block, x, stream, before, raw, outs):
        s = x.to(self.plan.dtype) * 0.75  # stands for a GEMM: the summands are computed in the graph
        s = s.view(FLAT) if block.flat_input else s
        for group in block.groups:
            s = funcol.all_reduce(s, "sum", self.groups[group])
        summed = s
        s = s.view(SHAPE) if block.flat_input else s
        inner = s = self.norms[f"inner{i}"](s) if block.inner is not None else s
        other = s.abs() if block.residual == "from sum" else stream
        h = {"none": s, "left": s + other, "right": other + s, "from sum": s + other}[block.residual]
        y = h.view(FLAT) if block.flat_norm else h
        y = normed = self.norms[f"norm{i}"](y) if block.norm is not None else y
        for quantiser in block.quantisers:
            outs += self._quantise(quantiser, y, before, raw)
        if block.router:
            outs.append(y.float() @ self.router)
        if block.branch is not None:
            z = self.norms[f"branch{i}"](h)
            outs += [z] if block.branch[1] is None else self._quantise(block.branch[1], z, before, raw)
        named = {"sum": summed, "inner": inner, "h": h, "norm": normed}
        for name, how in block.reads:
            outs.append(named[name] if how == "returned" else named[name].abs() + 1)
        y = y.view(SHAPE)
        # The norm is always read: a dead one would be removed, and its all_reduce would have no norm.
        outs.append(y.abs() if block.next_reads == "h" or not block.quantisers else y[..., :1])
        return (y if block.next_reads == "norm" else h), h, y

    def _quantise(self, quantiser: Quantiser, y: Tensor, before: Tensor, raw: Tensor) -> list[Tensor]:
        given = quantiser.scale
        scale = self.scale
        if given == "late":
            scale = raw * 0.5
        elif given == "own":
            scale = y.float().abs().amax() / 448
        elif given == "before":
            scale = before.float().abs().amax() / 448
        rows = y.view(FLAT) if quantiser.flat else y
        return quantise(quantiser.how, rows, scale)


def inputs(plan: ModelPlan) -> tuple[Tensor, Tensor, Tensor]:
    """x, the stream, a number for scales that are computed."""
    generator = torch.Generator().manual_seed(11)
    x, stream = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    return x.to(plan.dtype), stream.to(plan.stream_dtype), torch.tensor(0.03)


def all_reduces(plan: ModelPlan) -> int:
    return sum(len(block.groups) for block in plan.blocks)


def _widens(norm: type[LlamaNorm] | None, weight: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm's output: a weight applied after the cast down promotes it."""
    return torch.promote_types(dtype, weight) if norm is LlamaNorm else dtype


def _schemes(quantisers: tuple[Quantiser, ...]) -> list[str]:
    """The schemes that fuse: each recipe with each scale once (a dynamic scheme counts once, however often), and
    none whose scale needs the norm itself."""
    kept: dict[object, str] = {}
    for n, quantiser in enumerate(quantisers):
        scale: object = None
        if quantiser.takes_scale:
            if quantiser.scale == "own":
                continue
            # a computed scale is computed again for each quantiser: no twins
            scale = quantiser.scale if quantiser.scale == "given" else (quantiser.scale, n)
        kept[quantiser.recipe, scale] = quantiser.how.scheme
    return list(kept.values())


def expected(plan: ModelPlan) -> list[Counter[str]]:
    """The parts of every seam that must be fused, in the order of the blocks."""
    seams: list[Counter[str]] = []
    for block, stream_dtype, unfinished in _walk(plan):
        seams += _expected_of(block, plan.dtype, stream_dtype, unfinished)
    return seams


def _walk(plan: ModelPlan) -> Iterator[tuple[BlockPlan, torch.dtype, bool]]:
    """Blocks with the dtype of the stream before them, and whether that stream is an all_reduce's own sum."""
    stream, is_sum = plan.stream_dtype, False
    for block in plan.blocks:
        yield block, stream, is_sum
        summand = _widens(block.inner, block.weight_dtype, plan.dtype)
        is_sum = bool(block.groups) and block.inner is None and block.residual == "none"
        stream = torch.promote_types(summand, stream) if block.residual in ("left", "right") else summand


def _adds(block: BlockPlan, dtype: torch.dtype, stream: torch.dtype) -> bool:
    """Whether the block's residual is added inside a seam: it has the summands' dtype, and does not need their sum."""
    reduces, summand = bool(block.groups), _widens(block.inner, block.weight_dtype, dtype)
    residual = {"left": stream, "right": stream, "from sum": None if reduces else summand, "none": None}[block.residual]
    return residual is summand and (summand is dtype or not reduces)


def sharded_residuals(plan: ModelPlan) -> int:
    """How many residuals nothing reads but the seam of the next block, which adds it and sums over the same group."""
    blocks = [(block, _adds(block, plan.dtype, stream)) for block, stream, _ in _walk(plan)]
    count = 0
    for (block, adds), (after, adds_after) in itertools.pairwise(blocks):
        streams = all(b.groups and b.residual in ("left", "right") for b in (block, after)) and adds and adds_after
        only_normed = block.norm is not None and block.branch is None and block.next_reads == "norm"
        in_seam = after.norm is not None or after.branch is not None
        read = any(name == "h" for name, _ in block.reads)
        count += bool(streams and only_normed and in_seam and not read and block.groups[-1] == after.groups[-1])
    return count


def _expected_of(block: BlockPlan, dtype: torch.dtype, stream: torch.dtype, stream_is_sum: bool) -> list[Counter[str]]:
    schemes = _schemes(block.quantisers) if block.norm is not None else []
    branch = [] if block.branch is None or block.branch[1] is None else _schemes((block.branch[1],))
    reduces = bool(block.groups)
    adds = _adds(block, dtype, stream)
    alone = block.residual == "none"
    lead = ["all_reduce"] if reduces else []
    seams: list[list[str]] = []
    # Which norm gets the sum: the block's own, else the branch, which reads the same h.
    tails = [t for t, there in ((schemes, block.norm is not None), (branch, block.branch is not None)) if there]
    if block.inner is not None and not adds:
        # With no norm of the block's own and no residual, it is the inner norm that the quantisers read.
        read = _schemes(block.quantisers) if alone and block.norm is None else []
        seams += [[*lead, "rms_norm", *read]] if lead or read else []
        lead = []
    inner = ["rms_norm"] if block.inner is not None and adds and reduces else []
    first = True
    for tail in tails:
        takes = first and (adds or (alone and block.inner is None))
        parts = [*(lead if takes else []), *(inner if takes else []), *(["residual"] if takes and adds else [])]
        if "all_reduce" in parts or tail:
            seams.append([*parts, "rms_norm", *tail])
            first = False
    if block.inner is not None and adds and reduces and not tails:
        seams.append(["all_reduce", "rms_norm"])
    return [Counter(s) for s in seams]
