"""The model parts that compiler tests are built of: every spelling of a norm, every order of a block,
every quantiser. One table; tests multiply it out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from torchseam import Quant, ops
from torchseam.seam import GLOBAL_SCALES, RULES, SCALE_DTYPES, SCALE_LAYOUTS

HIDDEN = 128
EPS = 9.999999974752427e-07


class LlamaNorm(torch.nn.Module):
    """Hugging Face Llama: cast down first, weight after."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class GemmaNorm(LlamaNorm):
    """Hugging Face Gemma: (1 + weight) in float32, cast down last."""

    def forward(self, x: Tensor) -> Tensor:
        output = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (output * (1.0 + self.weight.float())).type_as(x)


class TorchNorm(LlamaNorm):
    """torch.nn.functional.rms_norm."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype != x.dtype:  # F.rms_norm warns about mixed dtypes but takes them
            n = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
            return (n * self.weight.float()).to(x.dtype)
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PlainNorm(LlamaNorm):
    """No weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class PowNorm(LlamaNorm):
    """`pow(-0.5)`, a square by multiplication, the weight on the left."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight.float() * (wide * ((wide * wide).mean(-1, keepdim=True) + self.eps).pow(-0.5))).to(x.dtype)


NORMS: tuple[type[LlamaNorm], ...] = (LlamaNorm, GemmaNorm, TorchNorm, PlainNorm, PowNorm)
ORDERS = ("plain", "residual", "residual_first", "sandwich", "no_reduce", "no_reduce_residual")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class AtenStatic:
    """Static FP8 in plain torch, as users write it."""

    rule: str
    scheme: ClassVar[str] = "fp8_static"

    def __call__(self, y: Tensor, scale: Tensor) -> list[Tensor]:
        y = y.float()
        if self.rule == "divide":
            y = y / scale
        elif self.rule == "reciprocal":
            y = y * scale.reciprocal()
        else:
            y = y * scale
        return [y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)]


@dataclass(frozen=True)
class AtenDynamic:
    """Per-token (`group` 0) or per-group FP8 in plain torch. Each field is a choice that users' code makes:

    how amax is divided (`number`, `tensor`, `multiply`), in which dtype (`narrow`: that of the activations),
    the floor and whether it bounds amax or the scale, by clamp or maximum, whether dimensions are kept, and
    how the scale is applied.
    """

    group: int = 0
    division: str = "number"
    narrow: bool = False
    floor: float | None = 1e-12
    floor_on: str = "scale"
    floor_by: str = "clamp"
    keepdim: bool = True
    amax: str = "amax"
    rule: str = "divide"

    @property
    def scheme(self) -> str:
        return "fp8_group" if self.group else "fp8_token"

    def __call__(self, y: Tensor, scale: Tensor) -> list[Tensor]:
        rows = y.unflatten(-1, (-1, self.group)) if self.group else y
        magnitudes = rows.abs()
        if self.amax == "max":
            s = magnitudes.max(-1, keepdim=self.keepdim).values
        elif self.amax == "norm":
            s = torch.linalg.vector_norm(rows.float(), float("inf"), -1, keepdim=self.keepdim)
        else:
            s = magnitudes.amax(-1, keepdim=self.keepdim)
        if not self.narrow:
            s = s.float()
        if self.floor_on == "amax":
            s = self._bounded(s)
        if self.division == "number":
            s = s / 448.0
        elif self.division == "tensor":
            s = s / torch.full((), 448.0, dtype=s.dtype, device=s.device)
        else:
            s = (1 / 448.0) * s
        s = s.float()
        if self.floor_on == "scale":
            s = self._bounded(s)
        wide = s if self.keepdim else s.unsqueeze(-1)
        q = rows.float() / wide if self.rule == "divide" else rows.float() * (1.0 / wide)
        codes = q.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return [codes.flatten(-2) if self.group else codes, s.squeeze(-1) if self.group and self.keepdim else s]

    def _bounded(self, s: Tensor) -> Tensor:
        if self.floor is None:
            return s
        if self.floor_by == "maximum":
            return torch.maximum(s, torch.full((), self.floor, dtype=s.dtype, device=s.device))
        return s.clamp(min=self.floor)


#: The spellings that the matrix multiplies out (each adds 3 % to its time) ...
MATRIX_DYNAMIC = (
    AtenDynamic(),
    AtenDynamic(division="multiply", floor_by="maximum", rule="reciprocal"),
    AtenDynamic(division="tensor", floor=None, keepdim=False, amax="max"),
    AtenDynamic(narrow=True, floor=None),
    AtenDynamic(narrow=True, division="multiply", floor=1e-5, floor_on="amax"),
    AtenDynamic(64),
    AtenDynamic(128, floor=1e-10, floor_on="amax", keepdim=False),
    AtenDynamic(128, narrow=True, floor_by="maximum", keepdim=False),
)
#: ... and all that tests of quantisers go through.
ATEN_DYNAMIC = (
    *MATRIX_DYNAMIC,
    AtenDynamic(floor=1e-10, floor_on="amax", amax="norm"),
    AtenDynamic(64, division="multiply", rule="reciprocal", amax="max"),
)


def recipes() -> Iterator[Quant]:
    """Every recipe of the vocabulary."""
    for scheme, dtypes in SCALE_DTYPES.items():
        sizes = (128, 64) if scheme == "fp8_group" else (None,)
        rules = RULES if scheme == "fp8_static" else ("divide", "reciprocal")
        for size, dtype, layout, rule in itertools.product(
            sizes, dtypes, SCALE_LAYOUTS[scheme], rules if scheme != "nvfp4" else ("divide",)
        ):
            if layout != "tma_aligned_packed" or (dtype, size) == ("ue8m0", 128):
                yield Quant(scheme, size, dtype, layout, rule)
    for layout, kind in itertools.product(SCALE_LAYOUTS["nvfp4"], GLOBAL_SCALES[1:]):
        yield Quant("nvfp4", scale_layout=layout, global_scale=kind)


def quantisers() -> list[Quant | AtenStatic | AtenDynamic | None]:
    """Nothing, the aten spellings, torchseam's own operator with every recipe."""
    return [None, *(AtenStatic(rule) for rule in RULES), *MATRIX_DYNAMIC, *recipes()]


def quantise(how: Quant | AtenStatic | AtenDynamic | None, y: Tensor, scale: Tensor) -> list[Tensor]:
    if how is None:
        return [y]
    if isinstance(how, (AtenStatic, AtenDynamic)):
        return how(y, scale)
    return ops.quantize(y, how, scale if how.takes_scale else None)


class Block(torch.nn.Module):
    """A seam in one of its orders, over the default process group. Returns what is quantised, then h."""

    def __init__(
        self,
        norm: type[LlamaNorm],
        order: str,
        quantiser: Quant | AtenStatic | AtenDynamic | None,
        weight_dtype: torch.dtype,
        reduce: Callable[[Tensor], Tensor] | None = None,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight() -> Tensor:
            return (torch.rand(hidden, generator=generator) + 0.5).to(weight_dtype)

        self.inner, self.norm = norm(weight()), norm(weight())
        self.order, self.quantiser = order, quantiser
        self.reduce = reduce or (lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD))
        self.register_buffer("scale", torch.tensor(0.01))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        x = x * 2  # the input of an all_reduce is computed in the graph, as a GEMM's output is
        if not self.order.startswith("no_reduce"):
            x = self.reduce(x)
        if self.order == "sandwich":
            h = residual + self.inner(x)
        elif self.order == "residual_first":
            h = residual + x
        elif self.order.endswith("residual"):
            h = x + residual
        else:
            h = x
        return (*quantise(self.quantiser, self.norm(h), self.scale), h)


def bits(x: Tensor) -> Tensor:
    """A tensor as integers, so that equality is bitwise and NaN equals itself."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(views[x.itemsize])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, shape, dtype and stride."""
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(bits(a), bits(b))
