"""Graphs as readable text, before and after the pass, for people who debug it.

`TORCHSEAM_DUMP=DIR` writes a pair of files for each graph that is compiled; while Inductor keeps a debug folder for
the graph (`TORCH_COMPILE_DEBUG=1`), a pair goes there too. A graph that comes from a compile cache runs no pass and
leaves no files.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

import torch
from torch._inductor.virtualized import V
from torch.fx import Graph

from torchseam.compiler.report import GraphReport
from torchseam.config import DUMP_VARIABLE

log = logging.getLogger("torchseam")

#: Numbers the graphs of this process, whatever model they belong to.
_numbers = itertools.count()


class Dump:
    """What one run of the pass writes; made before the graph changes. Costs nothing where nobody asked for it."""

    def __init__(self, graph: Graph) -> None:
        self.stems = _stems()
        self._write("1_before", graph, ())

    def after(self, graph: Graph, report: GraphReport) -> None:
        """Write the graph as it is now, with what was fused and what was not on top."""
        lines = [f"fused: {f.kind}, {f.shape} {f.dtype}, {f.node}, {f.source}" for f in report.fused]
        lines += [f"left: {r.part}: {r.reason.value}: {r.detail}, {r.node}, {r.source}" for r in report.refused]
        self._write("2_after", graph, lines)

    def _write(self, when: str, graph: Graph, lines: tuple[str, ...] | list[str]) -> None:
        if not self.stems:
            return
        text = "".join(f"# {line}\n" for line in lines) + readable(graph)
        for stem in self.stems:
            path = Path(f"{stem}_{when}.txt")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            except OSError as error:
                log.warning("the graph could not be written to %s: %s", path, error)


def _stems() -> list[str]:
    """How the names of this graph's files begin: rank and number in TORCHSEAM_DUMP, nothing but us in Inductor's."""
    stems = []
    if folder := os.environ.get(DUMP_VARIABLE):
        rank = torch.distributed.get_rank() if _has_ranks() else 0
        stems.append(str(Path(folder) / f"rank{rank:03}_graph{next(_numbers):04}"))
    if debug := getattr(V.debug, "_path", None):
        stems.append(str(Path(debug) / "torchseam"))
    return stems


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def readable(graph: Graph) -> str:
    """The graph as Inductor's own dumps have it: Python, with types, strides and the user's lines."""
    module = graph.owning_module
    if module is None:
        return f"{graph}\n"
    text: str = module.print_readable(print_output=False, include_stride=True, include_device=True)
    return f"{text}\n"
