"""The table of combinations that the kernels are held to, their inputs, and the comparison with the reference.

Not a test module: test_kernel_local.py runs the table in Triton's interpreter, gpu_check.py on a GPU.
Two smaller tables stand for the whole product, since a norm part and a quantiser meet only in the
norm's rounded output: every norm part with the quantisers dealt in turn, and every quantiser with
the norm parts dealt in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchseam import reference
from torchseam.formats import layout
from torchseam.kernels import calls, local
from torchseam.operands import Operands
from torchseam.seam import RULES, SCALE_DTYPES, SCALE_LAYOUTS, SCALE_ROUNDINGS, SCALE_RULES, Norm, Quant, Seam

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Those that models have, and the float32 neighbours of 1e-5 and 1e-6 that graphs carry (FIELD 4.16).
EPSILONS = (1e-6, 1e-5, 1e-12, 9.999999974752427e-07, 9.999999747378752e-06)
#: Multiples of 16, of 64 and of 128, each a power of two and not; 16 has fewer scales than a tile's columns.
SMALL_HIDDENS = (640, 464, 128, 2880, 16)


@dataclass(frozen=True)
class Case:
    """A seam (or, with `seam` None, a quantiser alone) at one hidden size and one set of dtypes."""

    seam: Seam | None
    quant: Quant | None
    hidden: int
    dtype: torch.dtype
    weight_dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        what = self.seam.to_json() if self.seam else self.quant.to_json()
        names = [str(d).removeprefix("torch.") for d in (self.dtype, self.weight_dtype)]
        return f"H={self.hidden} x={names[0]} w={names[1]} {what}"


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    residual: Tensor | None
    inner_weight: Tensor | None
    weight: Tensor | None
    scales: list[Tensor]

    def to(self, device: torch.device | str) -> Inputs:
        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device)

        return Inputs(
            self.x.to(device),
            move(self.residual),
            move(self.inner_weight),
            move(self.weight),
            [s.to(device) for s in self.scales],
        )

    def operands(self) -> Operands:
        return Operands(self.x, self.residual, self.inner_weight, self.weight, tuple(self.scales))

    def rows(self, rows: slice) -> Inputs:
        residual = None if self.residual is None else self.residual[rows]
        return dataclasses.replace(self, x=self.x[rows], residual=residual)


# ---- the table --------------------------------------------------------------------------------


def quantizers() -> list[Quant]:
    """Every scheme x group size x scale dtype x layout x rule; every way to make a scale x rule x scale dtype."""
    found = []
    for scheme, dtypes in SCALE_DTYPES.items():
        sizes = (128, 64) if scheme == "fp8_group" else (None,)
        for size, dtype, order, rule in itertools.product(sizes, dtypes, SCALE_LAYOUTS[scheme], RULES):
            with contextlib.suppress(ValueError):  # a rule that the scheme has not, a dtype that the layout has not
                found.append(Quant(scheme, size, dtype, order, rule))
    for kind, order in itertools.product(("decode", "none"), SCALE_LAYOUTS["nvfp4"]):
        found.append(Quant("nvfp4", scale_layout=order, global_scale=kind))
    sizes, layouts = itertools.cycle((128, 64)), itertools.cycle(layout.GROUP_SCALE_LAYOUTS["float32"])
    for how in itertools.product(("divide", "reciprocal"), SCALE_RULES, SCALE_ROUNDINGS):
        if how[1:] == ("divide", "none"):  # those are above
            continue
        rule, scale_rule, rounding = how
        found.append(Quant("fp8_token", rule=rule, scale_rule=scale_rule, scale_rounding=rounding))
        for dtype in SCALE_DTYPES["fp8_group"]:
            how_laid_out = (next(sizes), dtype, next(layouts))
            found.append(Quant("fp8_group", *how_laid_out, rule, scale_rule=scale_rule, scale_rounding=rounding))
    return found


def norms() -> list[tuple[Norm, torch.dtype]]:
    """Every weight mode, offset and weight dtype, epsilons dealt in turn."""
    modes = [("none", 0, torch.bfloat16)]
    modes += [
        (mode, offset, dtype)
        for mode, offset in (("after_cast", 0), ("before_cast", 0), ("before_cast", 1))
        for dtype in DTYPES
    ]
    eps = itertools.cycle(EPSILONS)
    return [(Norm(next(eps), mode, offset), dtype) for mode, offset, dtype in modes]


#: (adds a residual, has an inner norm)
STRUCTURES = ((False, False), (True, False), (True, True))


def _hidden(hiddens: Iterator[int], quant: Quant | None) -> int:
    multiple = quant.multiple_of if quant else 1
    return next(h for h in hiddens if h % multiple == 0)


def cases(hidden_sizes: Sequence[int] = SMALL_HIDDENS) -> list[Case]:
    """The table; the hidden sizes are dealt in turn (each quantiser takes the next that fits it)."""
    hiddens = itertools.cycle(hidden_sizes)
    quants, parts = quantizers(), norms()
    dealt_quants = itertools.cycle([None, *quants])
    dealt_parts = itertools.cycle(itertools.product(STRUCTURES, range(len(parts))))
    inner = itertools.cycle([norm for norm, _ in parts])
    outputs = itertools.cycle([(), ("norm",), ("residual",), ("residual", "norm")])

    def case(structure, norm, weight_dtype, quant, dtype) -> Case:
        residual, has_inner = structure
        emitted = tuple(o for o in next(outputs) if o == "norm" or residual)
        if quant is None and "norm" not in emitted:
            emitted = (*emitted, "norm")
        seam = Seam(
            norm=norm,
            inner_norm=next(inner) if has_inner else None,
            residual=residual,
            quants=(quant,) if quant else (),
            outputs=emitted,
        )
        return Case(seam, None, _hidden(hiddens, quant), dtype, weight_dtype)

    table = []
    for structure, (norm, weight_dtype), dtype in itertools.product(STRUCTURES, parts, DTYPES):
        table.append(case(structure, norm, weight_dtype, next(dealt_quants), dtype))
    for quant, dtype in itertools.product(quants, DTYPES):
        structure, index = next(dealt_parts)
        norm, weight_dtype = parts[index]
        table.append(case(structure, norm, weight_dtype, quant, dtype))
    dtypes = itertools.cycle(DTYPES)
    for quant in quants:
        table.append(Case(None, quant, _hidden(hiddens, quant), next(dtypes)))
    return table


# ---- inputs -----------------------------------------------------------------------------------


def _special_rows(hidden: int, dtype: torch.dtype) -> Tensor:
    """Rows of zeros, -0.0, NaN, infinities, subnormals, huge values and zero blocks."""
    base = torch.linspace(-3, 3, hidden)
    rows = [torch.zeros(hidden), torch.full((hidden,), -0.0)]
    for value in (float("nan"), float("inf"), float("-inf")):
        row = base.clone()
        row[hidden // 3] = value
        rows.append(row)
    rows.append(torch.full((hidden,), torch.finfo(dtype).smallest_normal / 4) * base.sign())
    rows.append(base * 1e4)
    blocks = base.clone()
    blocks[: hidden // 2] = 0.0
    rows.append(blocks)
    spike = base * 1e-3
    spike[-1] = 1000.0
    rows.append(spike)
    return torch.stack(rows).to(dtype)


def inputs(case: Case, tokens: int, special: bool = True, seed: int = 0) -> Inputs:
    """`tokens` random rows on the CPU, and the special ones after them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def rows() -> Tensor:
        # One magnitude per row, so that static scales see underflow and saturation.
        values = (random(tokens, case.hidden) * torch.exp2(4 * random(tokens, 1))).to(case.dtype)
        return torch.cat([values, _special_rows(case.hidden, case.dtype)]) if special else values

    def weight(norm: Norm | None) -> Tensor | None:
        if norm is None or not norm.has_weight:
            return None
        # Gemma's weights are near zero, of both signs.
        values = random(case.hidden) * 0.05 + (0.0 if norm.offset else 1.0)
        return values.to(case.weight_dtype)

    if case.seam is None:
        return Inputs(rows(), None, None, None, [scale_for(case.quant)] if case.quant.takes_scale else [])
    seam = case.seam
    x = rows()
    return Inputs(
        x,
        rows().flip(0) if seam.residual else None,
        weight(seam.inner_norm),
        weight(seam.norm),
        [scale_for(q) for q in seam.quants if q.takes_scale],
    )


def tiny_case() -> tuple[Case, Inputs]:
    """Rows whose mean of squares, with nothing added to it, is a subnormal fp32 number or 0."""
    case = Case(Seam(Norm(0.0, "none"), outputs=("norm",)), None, 640, torch.float32)
    given = inputs(case, 6, special=False)
    sizes = torch.exp2(torch.tensor([-63.0, -66.0, -69.0, -72.0, -80.0, -149.0]))[:, None]
    return case, dataclasses.replace(given, x=given.x * sizes)


def scale_for(quant: Quant) -> Tensor:
    """One that saturates some of a norm's values (up to about 4) and keeps most."""
    if quant.scheme == "nvfp4":
        encode = torch.tensor([448.0 * 6.0 / 3.7])
        return encode if quant.global_scale == "encode" else 1.0 / encode
    return torch.tensor([130.7 if quant.rule == "multiply" else 0.00765])


# ---- outputs that are not fresh zeros by luck --------------------------------------------------


def storage(t: Tensor) -> Tensor:
    """All bytes behind t, padding too."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What the kernels' host code allocates has 0x7F in every byte, padding too, before a kernel runs."""

    def poison(allocate: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def allocate_poisoned(*args: object) -> list[Tensor]:
            outputs = allocate(*args)
            for t in outputs:
                storage(t).fill_(0x7F)
            return outputs

        return allocate_poisoned

    names = ((calls, "empty_outputs"), (local, "empty_quantized"))
    allocators = [(module, name, getattr(module, name)) for module, name in names]
    for module, name, allocate in allocators:
        setattr(module, name, poison(allocate))
    try:
        yield
    finally:
        for module, name, allocate in allocators:
            setattr(module, name, allocate)


#: Quantisers whose scales have padding to zero.
PADDED_QUANTIZERS = (
    Quant("nvfp4"),
    Quant("fp8_group", scale_dtype="float32", scale_layout="tma_aligned"),
    Quant("fp8_group", scale_dtype="ue8m0", scale_layout="tma_aligned"),
    Quant("fp8_group", scale_dtype="ue8m0", scale_layout="tma_aligned_packed"),
)


# ---- the comparison ---------------------------------------------------------------------------


def canonical_inverse_rms(h: Tensor, eps: float) -> Tensor:
    """The kernels' canonical reduction: segments of 8 by a tree in fp32, the segments in fp64, rounded to fp32,
    then divided; the root rounded once."""
    squares = torch.nn.functional.pad(h.pow(2), (0, -h.shape[-1] % 8))
    for _ in range(3):
        squares = squares[..., 0::2] + squares[..., 1::2]
    mean = squares.double().sum(-1, keepdim=True).float() / h.new_full((), h.shape[-1])
    return (1.0 / torch.sqrt((mean + eps).double())).float()


@contextlib.contextmanager
def canonical_reduction() -> Iterator[None]:
    """The reference with the kernels' row reduction: then every bit must agree."""
    eager = reference._inverse_rms
    reference._inverse_rms = canonical_inverse_rms
    try:
        yield
    finally:
        reference._inverse_rms = eager


def bits(t: Tensor) -> Tensor:
    """Integers that are equal where the values are, every NaN alike (its sign is the processor's choice)."""
    if t.dtype == torch.float8_e4m3fn:
        code = t.view(torch.uint8)
        return torch.where(code & 0x7F == 0x7F, 0x7F, code)
    if t.dtype.itemsize == 1:
        return t.view(torch.uint8)
    integer = t.view({2: torch.int16, 4: torch.int32}[t.dtype.itemsize])
    return torch.where(t.isnan(), -1, integer)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(bits(a), bits(b))


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance of a and b, in steps of their dtype; NaN and NaN are 0 apart."""

    def ordered(t: Tensor) -> Tensor:
        integer = bits(t).long()
        least = 1 << (8 * t.dtype.itemsize - 1)
        return torch.where(integer < 0, -least - integer, integer)

    return int((ordered(a) - ordered(b)).abs().max()) if a.numel() else 0


def everything(seam: Seam) -> Seam:
    """The seam with each value that it can emit."""
    return dataclasses.replace(seam, outputs=("residual", "norm") if seam.residual else ("norm",))


Run = Callable[..., list[Tensor]]


def check(case: Case, given: Inputs, run: Run, quantize: Run, device: str = "cpu", also_own: bool = True) -> list[str]:
    """What of DESIGN section 4 the kernel's result breaks; [] when nothing.

    `run` and `quantize` are those of `torchseam.kernels.local`; inputs and reference are on the CPU.
    """
    on_device = given.to(device)
    if case.seam is None:
        got = _on_cpu(quantize(on_device.x, case.quant, *(on_device.scales or [None])))
        expected = reference.quantize(given.x, case.quant, *(given.scales or [None]))
        both = (_meaning(case.quant, results) for results in (got, expected))
        return _differences(*both, ["codes", "scales"])

    seam = everything(case.seam)
    operands = given.operands()
    got = _on_cpu(run(seam, on_device.operands()))
    names = [
        *seam.outputs,
        *(f"{n} of {q.scheme}" for q in seam.quants for n in ("codes", "scales")[: 1 + q.emits_scale]),
    ]

    with canonical_reduction():
        by_reference = reference.run(seam, operands)
    at = len(seam.outputs)
    for quant in seam.quants:
        for results in (got, by_reference):
            results[at : at + 1 + quant.emits_scale] = _meaning(quant, results[at : at + 1 + quant.emits_scale])
        at += 1 + quant.emits_scale
    broken = _differences(got, by_reference, names)

    # The codes are those of the kernel's own norm, whatever its last bit is.
    norm_at = seam.outputs.index("norm")
    expected = []
    scales = iter(given.scales)
    for quant in seam.quants:
        again = reference.quantize(got[norm_at], quant, next(scales) if quant.takes_scale else None)
        expected += _meaning(quant, again)
    broken += [
        f"{b} (quantising the kernel's norm)" for b in _differences(got[norm_at + 1 :], expected, names[norm_at + 1 :])
    ]
    broken += _eager_differences(seam, operands, got, reference.run(seam, operands), case.dtype)

    if also_own and case.seam != seam:
        own = _on_cpu(run(case.seam, on_device.operands()))
        for quant in case.seam.quants:  # one, the last of the results
            many = 1 + quant.emits_scale
            own[-many:] = _meaning(quant, own[-many:])
        kept = [t for n, t in zip(names, got, strict=True) if n not in seam.outputs or n in case.seam.outputs]
        broken += [f"{b} (emitting only {case.seam.outputs})" for b in _differences(own, kept, ["value"] * len(kept))]
    return broken


def _meaning(quant: Quant, results: list[Tensor]) -> list[Tensor]:
    """[codes, scales] of a quantiser with 0 for the codes under a NaN scale of torchao's NVFP4: what its integers make
    of a NaN depends on the bits that the processor gives one."""
    if quant.scheme != "nvfp4" or quant.global_scale == "encode" or not results[0].numel():
        return results
    codes, scales = results
    columns = codes.shape[-1] // 8
    rows = codes.reshape(-1, columns, 8)
    if quant.scale_layout == "swizzled":
        scale_rows = layout.unswizzle(scales, rows.shape[0], columns)
    else:
        scale_rows = scales.reshape(-1, columns)
    meaningless = scale_rows.view(torch.uint8) & 0x7F == 0x7F
    return [rows.masked_fill(meaningless[..., None], 0).reshape(codes.shape), scales]


FP32_NORM_ULPS = 4


def _eager_differences(
    seam: Seam, operands: Operands, got: list[Tensor], eager: list[Tensor], dtype: torch.dtype
) -> list[str]:
    """Against eager's own row reduction: residual_out bitwise, the norm to the last place."""
    if seam.inner_norm is not None:
        # The inner norm's last bit moves all that follows; the bitwise comparison above covers it.
        return []
    broken = [] if not seam.residual or same(got[0], eager[0]) else ["residual differs from eager's"]
    at = seam.outputs.index("norm")
    if dtype == torch.float32:
        # Eager itself is some places off there (seven fp32 roundings). On one row it may be lucky: the
        # kernel's own roundings (mean and root 1/2 ulp each, their product with h and with the weight 1/2
        # each, relative 2^-23 in all) are at most 4 places where the result lies just above a power of two.
        oracle = _fp64_norm(seam, operands)
        error, eager_error = ulps(got[at], oracle), ulps(eager[at], oracle)
        if error > max(eager_error + 1, FP32_NORM_ULPS):
            broken.append(f"norm is {error} ulp from the float64 oracle, eager {eager_error}")
        return broken
    distance = ulps(got[at].to(dtype), eager[at].to(dtype))
    if distance > allowed_ulps(seam.norm):
        broken.append(f"norm is {distance} ulp from eager's")
    return broken


def _fp64_norm(seam: Seam, operands: Operands) -> Tensor:
    """The norm of the rounded h in float64, rounded once."""
    x, residual, weight = operands.x, operands.residual, operands.weight
    h = (x if residual is None else (x.float() + residual.float()).to(x.dtype)).double()
    n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + seam.norm.eps)
    return (n if weight is None else n * (weight.double() + seam.norm.offset)).float()


def allowed_ulps(norm: Norm) -> int:
    """1 of the activation dtype; a weight multiplied after the rounding can make 2 of 1."""
    return 1 if norm.weight != "after_cast" else 2


def _on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Copies with the strides that the tensors have (`.cpu()` keeps only dense ones)."""
    copies = []
    for t in tensors:
        if t.is_cpu:
            copies.append(t)
            continue
        copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        as_bytes = torch.uint8 if t.dtype.itemsize == 1 else t.dtype
        copy.view(as_bytes).copy_(t.view(as_bytes))
        copies.append(copy)
    return copies


def _differences(got: list[Tensor], expected: list[Tensor], names: list[str]) -> list[str]:
    broken = []
    for name, a, b in zip(names, got, expected, strict=False):
        if same(a, b):
            continue
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            broken.append(
                f"{name}: {a.dtype} {tuple(a.shape)} {a.stride()} instead of {b.dtype} {tuple(b.shape)} {b.stride()}"
            )
            continue
        wrong = bits(a) != bits(b)
        rows = sorted({int(i) for i in wrong.nonzero()[:, 0]})[:8]
        broken.append(f"{name}: {int(wrong.sum())} of {a.numel()} differ, first rows {rows}")
    if len(got) != len(expected):
        broken.append(f"{len(got)} values instead of {len(expected)}")
    return broken
