"""What was fused, and why the rest was not: plain values, a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from torchseam.backends import select
from torchseam.seam import Seam


class Reason(str, enum.Enum):
    """Every reason for which a seam, or a part of one, is left alone."""

    ALL_REDUCE_NOT_SUM = "the all_reduce is not a sum"
    ALL_REDUCE_READ_EARLY = "something reads the all_reduce before it has finished"
    COLLECTIVE_BETWEEN = "another collective starts before the seam ends"
    NO_NORM = "no RMSNorm follows the all_reduce"
    NORM_SPELLING = "the norm is spelled in a way that is not understood"
    QUANT_SPELLING = "the quantiser is spelled in a way that is not understood"
    PARTIAL_ROW = "the norm's mean is not over the whole last dimension"
    DTYPE = "dtypes do not fit together"
    SHAPE = "shapes do not fit together"
    HIDDEN_SIZE = "the hidden size does not fit the scheme"
    DEPENDENCE = "an input is computed from the seam's own values"
    DISABLED = "the configuration switches it off"
    UNKNOWN_GROUP = "the process group is not known in this process"
    FAILURE = "torchseam failed while reading it"
    DEVICE = "the operator does not run on this device"


#: What would make a refused part fuse.
REMEDIES: dict[Reason, str] = {
    Reason.ALL_REDUCE_NOT_SUM: "use ReduceOp.SUM",
    Reason.ALL_REDUCE_READ_EARLY: "read the result after the wait only",
    Reason.COLLECTIVE_BETWEEN: "start the other collective before this all_reduce, or after the norm",
    Reason.NO_NORM: "nothing to do, unless an RMSNorm was meant to follow",
    Reason.NORM_SPELLING: "use torch.nn.RMSNorm, or open an issue with this spelling",
    Reason.QUANT_SPELLING: "use torchseam.ops.quantize, or one of the recipes in docs/design.md",
    Reason.PARTIAL_ROW: "normalise over the whole last dimension",
    Reason.DTYPE: "give the residual stream one dtype: bf16, fp16 or fp32",
    Reason.SHAPE: "give residual and activations one shape, and the weight the shape [hidden]",
    Reason.HIDDEN_SIZE: "choose a scheme whose group divides the hidden size",
    Reason.DEPENDENCE: "compute the scale, weight or residual before the seam",
    Reason.DISABLED: "change SeamConfig",
    Reason.FAILURE: "open an issue with the traceback that was logged",
    Reason.DEVICE: "run on a CPU or a CUDA GPU",
    Reason.UNKNOWN_GROUP: "compile after torch.distributed.init_process_group",
}


class SeamsNotFusedError(RuntimeError):
    """Raised with `SeamConfig.strict` when a compilation left a seam unfused; lists all of them."""


@dataclass(frozen=True)
class FusedSeam:
    """One seam that became one operator. `device` is the kind of device that it runs on: `cpu`, `cuda`."""

    seam: Seam
    shape: str
    dtype: str
    device: str
    node: str
    source: str

    @property
    def kind(self) -> str:
        return self.seam.describe()

    @property
    def backend(self) -> str:
        """What runs it, as far as is known when this is asked; `auto` where that is chosen in the first call."""
        return select.expected(self.seam.reduce, self.device) if self.seam.reduce else "local"


@dataclass(frozen=True)
class Refusal:
    """A part that was left alone: `part` is `all_reduce`, `norm`, `residual`, `quantiser` or a scheme's name."""

    part: str
    reason: Reason
    detail: str
    node: str
    source: str

    @property
    def remedy(self) -> str:
        return REMEDIES[self.reason]


@dataclass(frozen=True)
class Residual:
    """A residual that a seam with an all_reduce emits, where `SeamConfig.shard_residual` is on.

    full: why all its rows are on every rank; '' where each stays with its owner.
    """

    full: str
    source: str


@dataclass(frozen=True)
class GraphReport:
    """One compilation of a graph. `plain_norms` counts norms that are no seam (no all_reduce, no quantiser).

    `frame` names the stretch of the model's code that Dynamo captured; a recompilation has it again. '' is unknown.
    """

    fused: tuple[FusedSeam, ...] = ()
    refused: tuple[Refusal, ...] = ()
    plain_norms: int = 0
    exact_norms: int = 0
    nodes: int = 0
    seconds: float = 0.0
    from_cache: bool = False
    frame: str = ""
    residuals: tuple[Residual, ...] = ()


@dataclass(frozen=True)
class GroupBackend:
    """What sums the seams of one process group, as far as this process knows when it is asked.

    configured: the name in `SeamConfig.backend`. chosen: what the ranks came to, None before the first seam has run.
    elsewhere: which calls went to `collective` instead, or only in part into `chosen`, and why: their sizes, say.
    """

    group: str
    configured: str
    chosen: str | None
    elsewhere: tuple[str, ...]


@dataclass
class FusionReport:
    """All compilations of the graphs of one compiled model, in their order.

    `fused`, `not_fused`, `refusals` and `kinds` are those of `distinct`, as a person counts in the model;
    `unreported` counts graphs that came from a compile cache without a record of what was fused in
    them. `gemms` says what multiplies the model's quantised matrices.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    gemms: dict[str, int] = field(default_factory=dict)
    unreported: int = 0

    @property
    def distinct(self) -> list[GraphReport]:
        """Each graph once: of several compilations (for other shapes, say) the one with most refusals, or the last."""
        chosen: dict[object, GraphReport] = {}
        for number, graph in enumerate(self.graphs):
            places = tuple(sorted({f.source for f in graph.fused} | {r.source for r in graph.refused}))
            key = (graph.frame, places) if graph.frame else number
            if key not in chosen or len(graph.refused) >= len(chosen[key].refused):
                chosen[key] = graph
        return list(chosen.values())

    @property
    def fused(self) -> int:
        return sum(len(g.fused) for g in self.distinct)

    @property
    def not_fused(self) -> int:
        return sum(len(g.refused) for g in self.distinct)

    @property
    def refusals(self) -> list[Refusal]:
        return [r for g in self.distinct for r in g.refused]

    def kinds(self) -> Counter[str]:
        """How often each kind of seam was fused."""
        return Counter(f.kind for g in self.distinct for f in g.fused)

    def backends(self) -> list[GroupBackend]:
        """What sums the seams of each process group. The choice is made at run time, call by call (docs/design.md)."""
        reduces = (f.seam.reduce for g in self.graphs for f in g.fused)
        pairs = dict.fromkeys((r.group, r.backend) for r in reduces if r is not None)
        return [
            GroupBackend(group, configured, select.chosen(group, configured), tuple(select.remarks(group, configured)))
            for group, configured in pairs
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "fused": self.fused,
            "not_fused": self.not_fused,
            "unreported": self.unreported,
            "kinds": dict(self.kinds()),
            "gemms": dict(self.gemms),
            "backends": [dataclasses.asdict(b) for b in self.backends()],
            "graphs": [graph_to_dict(g) for g in self.graphs],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def __rich__(self) -> Any:
        return render(self)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        console = Console(file=StringIO(), width=120)
        console.print(render(self))
        return console.file.getvalue()  # type: ignore[attr-defined]


def graph_to_dict(graph: GraphReport) -> dict[str, Any]:
    """A graph's report as plain JSON values."""
    return {
        **{k: getattr(graph, k) for k in ("plain_norms", "exact_norms", "nodes", "seconds", "from_cache", "frame")},
        "fused": [
            {**_fields(f), "seam": json.loads(f.seam.to_json()), "kind": f.kind, "backend": f.backend}
            for f in graph.fused
        ],
        "refused": [{**_fields(r), "reason": r.reason.name, "remedy": r.remedy} for r in graph.refused],
        "residuals": [_fields(r) for r in graph.residuals],
    }


def graph_from_dict(data: dict[str, Any]) -> GraphReport:
    """The inverse of `graph_to_dict`."""
    fused = tuple(
        FusedSeam(
            **{k: v for k, v in f.items() if k not in ("kind", "seam", "backend")},
            seam=Seam.from_json(json.dumps(f["seam"])),
        )
        for f in data["fused"]
    )
    refused = tuple(
        Refusal(**{k: v for k, v in r.items() if k not in ("remedy", "reason")}, reason=Reason[r["reason"]])
        for r in data["refused"]
    )
    residuals = tuple(Residual(**r) for r in data["residuals"])
    return GraphReport(**{**data, "fused": fused, "refused": refused, "residuals": residuals})


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _place(source: str) -> str:
    """`file.py:12` out of a source line; the code itself is in the JSON."""
    return source.split(" in ")[0].split("/")[-1]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _row(seam: FusedSeam) -> tuple[str, ...]:
    """What seams of one row of the table share: kind, hidden size, dtype and backend."""
    backend = "auto, not run yet" if seam.backend == "auto" else seam.backend
    return seam.kind, seam.shape.rsplit(" x ", 1)[-1], seam.dtype, backend


def render(report: FusionReport) -> Any:
    """The report as rich tables: one of what was fused, one of what was not, and the notes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    graphs = report.distinct
    title = f"{_count(report.fused, 'seam')} fused in {_count(len(graphs), 'graph')}"
    if len(report.graphs) > len(graphs):
        title += f", {_count(len(report.graphs), 'compilation')}"
    fused = Table(title=title, title_justify="left")
    for name in ("seam", "times", "rows x hidden", "dtype", "backend", "first at"):
        fused.add_column(name, justify="right" if name == "times" else "left", overflow="fold")
    groups: dict[tuple[str, ...], list[FusedSeam]] = {}
    for seam in (f for g in graphs for f in g.fused):
        groups.setdefault(_row(seam), []).append(seam)
    tokens: dict[tuple[str, ...], dict[str, None]] = {}  # of all compilations, in their order
    for seam in (f for g in report.graphs for f in g.fused):
        tokens.setdefault(_row(seam), {})[seam.shape.rsplit(" x ", 1)[0]] = None
    for row, seams in groups.items():
        kind, hidden, dtype, backend = row
        shape = f"{', '.join(tokens[row])} x {hidden}"
        fused.add_row(kind, str(len(seams)), shape, dtype, backend, _place(seams[0].source))
    parts: list[Any] = [fused]
    if report.not_fused:
        refused = Table(title=f"{report.not_fused} not fused", title_justify="left")
        for name in ("part", "times", "why", "what would help", "first at"):
            refused.add_column(name, justify="right" if name == "times" else "left", overflow="fold")
        reasons: dict[tuple[str, Reason, str], list[Refusal]] = {}
        for r in report.refusals:
            reasons.setdefault((r.part, r.reason, r.detail), []).append(r)
        for (part, reason, detail), rs in reasons.items():
            refused.add_row(part, str(len(rs)), f"{reason.value}: {detail}", rs[0].remedy, _place(rs[0].source))
        parts.append(refused)
    plain = sum(g.plain_norms for g in graphs)
    exact = sum(g.exact_norms for g in graphs)
    if plain:
        parts.append(Text(f"{_count(plain, 'norm')} without all_reduce or quantiser: left to Inductor"))
    if exact:
        parts.append(
            Text(f"{_count(exact, 'norm')} without all_reduce or quantiser: torchseam's operator (exact=True)")
        )
    for full, count in Counter(r.full for g in graphs for r in g.residuals).items():
        where = f"all its rows on every rank: {full}" if full else "each row with its owner"
        parts.append(Text(f"{_count(count, 'residual')} between seams, {where}"))
    for name, count in report.gemms.items():
        parts.append(Text(f"{_count(count, 'quantised linear layer')}: {name}"))
    for known in report.backends():
        parts += [Text(f"{known.chosen}: {remark}") for remark in known.elsewhere]
    if report.unreported:
        parts.append(Text(f"{_count(report.unreported, 'graph')} from a compile cache that has no record of the seams"))
    return Group(*parts)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)')


_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


def source_line(node: Node) -> str:
    """The user's line that made a node: `file.py:12 in forward: code`, or '' where torch did not keep it.

    The innermost frame outside torch itself.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for path, line, function, code in reversed(frames):
        if not path.startswith(_TORCH_FOLDER):
            return f"{'/'.join(path.replace(chr(92), '/').split('/')[-2:])}:{line} in {function}: {code.strip()}"
    return ""
