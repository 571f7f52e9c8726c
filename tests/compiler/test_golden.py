"""Graphs before and after the pass, as text in golden/, one file for each family of seams.

    TORCHSEAM_UPDATE_GOLDEN=1 python -m pytest tests/compiler/test_golden.py

writes the files anew; read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import graphs
import sharded_rows
from blocks import HIDDEN, AtenStatic, GemmaNorm, LlamaNorm, same_bits
from golden_graphs import as_text
from pretend_group import pretend_group
from torchseam import Quant, SeamConfig, ops
from torchseam.compiler.fusion_pass import run_pass

UPDATE_VARIABLE = "TORCHSEAM_UPDATE_GOLDEN"
FOLDER = Path(__file__).parent / "golden"
FP8, TOKEN, NVFP4 = Quant("fp8_static"), Quant("fp8_token"), Quant("nvfp4")
Family = Callable[..., tuple[Tensor, ...]]


class Parts(torch.nn.Module):
    """What the families are built of; `forward` is one of them."""

    def __init__(self, family: Family, groups: tuple[str, str]) -> None:
        super().__init__()
        self.family, self.groups = family, groups
        ramp = torch.linspace(0.5, 1.5, HIDDEN)
        self.norm, self.inner = LlamaNorm(ramp.bfloat16()), GemmaNorm(ramp.flip(0).bfloat16())
        self.register_buffer("scale", torch.tensor(0.01))
        self.register_buffer("router", torch.ones(HIDDEN, 4, dtype=torch.bfloat16))

    def reduce(self, x: Tensor, group: int = 0) -> Tensor:
        return funcol.all_reduce(x, "sum", self.groups[group])

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return self.family(self, x * 2, residual)


def plain(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return tuple(ops.quantize(m.norm(m.reduce(x)), FP8, m.scale))


def residual(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    h = m.reduce(x) + residual
    return *AtenStatic("divide")(m.norm(h), m.scale), h


def sandwich(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    h = residual + m.inner(m.reduce(x))
    return *ops.quantize(m.norm(h), NVFP4, m.scale), h


def views(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    h = m.reduce(x.view(6, HIDDEN)).view(2, 3, HIDDEN) + residual
    return *ops.quantize(m.norm(h.view(6, HIDDEN)), TOKEN), h


def readers(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """The sum, h and the norm are read; two quantisers are twins; a router reads the norm."""
    s = m.reduce(x)
    h = s + residual
    y = m.norm(h)
    twins = [*ops.quantize(y, FP8, m.scale), *ops.quantize(y, FP8, m.scale)]
    return *twins, *ops.quantize(y, TOKEN), y @ m.router, s.abs(), h


def refused_scale(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """The scale is computed from the norm, so the quantiser stays and the rest fuses."""
    h = m.reduce(x) + residual
    y = m.norm(h)
    return *ops.quantize(y, FP8, y.float().abs().amax() / 448), h


def two_groups(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Only the last all_reduce before a norm is part of a seam; each seam keeps its own group."""
    h = m.reduce(m.reduce(x, 0), 1) + residual
    (codes,) = ops.quantize(m.norm(h), FP8, m.scale)
    h = h + m.reduce(codes.to(h.dtype), 0)
    return *ops.quantize(m.norm(h), FP8, m.scale), h


def _layer(m: Parts, x: Tensor, h: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """(what the next layer sums, the new residual)."""
    h = m.reduce(x, group) + h
    (codes,) = ops.quantize(m.norm(h), FP8, m.scale)
    return codes.to(x.dtype), h


def sharded(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """The first seam reads a full residual, the last emits none."""
    y, h = _layer(m, x, residual)
    y, h = _layer(m, y, h)
    y, h = _layer(m, y, h)
    return (y,)


def sharded_reader(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Something else reads the second residual: the chain ends there, and another begins."""
    y, h = _layer(m, x, residual)
    y, h = _layer(m, y, h)
    read = h.abs()
    y, h = _layer(m, y, h)
    y, h = _layer(m, y, h)
    return y, read


def sharded_returned(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    y, h = _layer(m, x, residual)
    y, h = _layer(m, y, h)
    return y, h


def sharded_groups(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """The second residual goes to a seam of another group, whose ranks own other rows."""
    y, h = _layer(m, x, residual, 0)
    y, h = _layer(m, y, h, 0)
    y, h = _layer(m, y, h, 1)
    y, h = _layer(m, y, h, 1)
    return (y,)


def sharded_tokens(m: Parts, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """The last layer has fewer tokens, so that its rows have other owners."""
    y, h = _layer(m, x, residual)
    y, h = _layer(m, y, h)
    y, h = _layer(m, y[:, -1:], h[:, -1:])
    return (y,)


#: With `shard_residual`.
SHARDED: tuple[Family, ...] = (sharded, sharded_reader, sharded_returned, sharded_groups, sharded_tokens)
FAMILIES: tuple[Family, ...] = (plain, residual, sandwich, views, readers, refused_scale, two_groups, *SHARDED)


def capture(family: Family, groups: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The family's golden text; its fused graph is compared with eager on the way."""
    names = {name: f"group {i}" for i, name in enumerate(groups)}
    texts: list[str] = []

    def looking(graph, config):
        before = as_text(graph, names)
        report = run_pass(graph, config)
        lines = [f"fused: {f.kind}" for f in report.fused]
        lines += [f"left: {r.part}: {r.reason.value}" for r in report.refused]
        lines += [f"residual: full: {r.full}" if r.full else "residual: sharded" for r in report.residuals]
        texts[:] = [f"# before\n{before}\n\n# after\n{as_text(graph, names)}\n\n# report\n" + "\n".join(lines) + "\n"]
        return report

    monkeypatch.setattr(graphs, "run_pass", looking)
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(2, 3, HIDDEN, generator=generator).bfloat16() for _ in range(2)]
    model = Parts(family, groups)
    with sharded_rows.poisoned(pretended=True):
        got = graphs.trace_fused(model, *args, config=SeamConfig(shard_residual=family in SHARDED))
    assert all(same_bits(a, b) for a, b in zip(model(*args), got.results, strict=True))
    return texts[0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_graph_before_and_after(family, one_rank, monkeypatch):
    groups = pretend_group(3), pretend_group(2)
    text = capture(family, groups, monkeypatch)
    path = FOLDER / f"{family.__name__}.txt"
    if os.environ.get(UPDATE_VARIABLE) == "1":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"no golden file; write it with {UPDATE_VARIABLE}=1"
    assert text == path.read_text(), f"{path.name} differs; if that is meant, write it with {UPDATE_VARIABLE}=1"


def test_every_golden_file_has_its_family():
    assert {p.stem for p in FOLDER.glob("*")} == {f.__name__ for f in FAMILIES}


def test_the_text_shows_what_a_changed_graph_changes():
    """Operator, constant, operand, dtype, shape, group: each alone makes another text."""

    def text(target=torch.ops.aten.mul.Tensor, constant=2, swapped=False, dtype=torch.float32, rows=3) -> str:
        graph = torch.fx.Graph()
        a, b = graph.placeholder("a"), graph.placeholder("b")
        a.meta["val"] = b.meta["val"] = torch.empty(rows, 4, dtype=dtype)
        x = graph.call_function(target, (a, constant))
        y = graph.call_function(torch.ops.aten.sub.Tensor, (b, x) if swapped else (x, b))
        graph.output((y,))
        return as_text(graph, {})

    texts = [
        text(),
        text(torch.ops.aten.add.Tensor),
        text(constant=3),
        text(swapped=True),
        text(dtype=torch.bfloat16),
        text(rows=5),
    ]
    assert len(set(texts)) == len(texts) and text() == text()
