"""The pass that Inductor calls with its functional post-grad graph."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from torchseam.backends import flashinfer_api
from torchseam.compiler import casts, products
from torchseam.compiler.dialects.collectives import vllm_groups
from torchseam.compiler.dialects.views import value
from torchseam.compiler.dump import Dump
from torchseam.compiler.find import find
from torchseam.compiler.plan import Plan, plan
from torchseam.compiler.report import (
    FusedSeam,
    FusionReport,
    GraphReport,
    Refusal,
    SeamsNotFusedError,
    source_line,
)
from torchseam.compiler.reuse import reuse
from torchseam.compiler.rewrite import rewrite, without_lists_of_one
from torchseam.compiler.shard import shard
from torchseam.compiler.user_passes import as_passes, identities
from torchseam.config import LOG_VARIABLE, SeamConfig
from torchseam.seam import Seam

log = logging.getLogger("torchseam")


@functools.lru_cache(maxsize=1)
def _source_hash() -> str:
    """A hash over every source file of the package: any change to what shapes the graph changes it."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _environment() -> dict[str, Any]:
    """What besides sources and config shapes the rewritten graph."""
    world = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    torchao = getattr(sys.modules.get("torchao"), "__version__", None)  # its NVFP4 is known by its own code
    return {
        "torch": torch.__version__,
        "torchao": torchao,
        "flashinfer": flashinfer_api.version(),
        "vllm_groups": sorted(vllm_groups().items()),
        "world_size": world,
        "capability": capability,
    }


def current_frame() -> str:
    """Dynamo's number of the stretch of code that is being compiled, the same for every recompilation; '' outside."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return "" if compile_id is None or compile_id.frame_id is None else str(compile_id.frame_id)


def _describe(seam: Seam, call: Node) -> FusedSeam:
    val = value(call.args[0])  # type: ignore[arg-type]
    assert val is not None
    *lead, hidden = val.shape
    tokens: Any = 1
    for size in lead:
        tokens = tokens * size
    return FusedSeam(
        seam,
        f"{tokens} x {hidden}",
        str(val.dtype).removeprefix("torch."),
        val.device.type,
        call.name,
        source_line(call),
    )


def run_pass(graph: Graph, config: SeamConfig) -> GraphReport:
    """Find, plan and rewrite the seams of a functional graph in place. Lints after rewriting."""
    started = time.perf_counter()
    nodes = len(graph.nodes)
    sums = products.take_apart(graph)
    decided: Plan = plan(graph, find(graph), config)
    if not config.exact:
        products.put_together(graph, sums, but={chain.add for chain in decided.chains if chain.add is not None})
    calls: dict[Node, Seam] = {}
    replaced: dict[Node, Node] = {}
    for chain in decided.chains:
        seam, call = rewrite(graph, chain, config.backend, replaced)
        calls[call] = seam
    residuals = shard(calls) if config.shard_residual else ()
    fused = {call: _describe(seam, call) for call, seam in calls.items() if seam.reduce is not None or seam.quants}
    if calls:
        stable_topological_sort(graph)
        for call, node in reuse(graph, calls).items():
            if call in fused:
                fused[call] = dataclasses.replace(fused[call], node=node.name)
    without_lists_of_one(graph)
    graph.lint()
    return GraphReport(
        tuple(fused.values()),
        tuple(decided.refusals),
        decided.plain_norms,
        decided.exact_norms,
        nodes,
        time.perf_counter() - started,
        residuals=residuals,
    )


class FusionPass(CustomGraphPass):
    """Rewrites seams; keeps the tally in `report`.

    `also` is the pass that the user had set in the same place of Inductor's config: it runs first,
    so torchseam's pass never takes its place.
    """

    def __init__(self, config: SeamConfig, also: Any = None) -> None:
        self.config = config
        self.also = as_passes(also)
        self.report = FusionReport()

    def __call__(self, graph: Graph) -> None:
        casts.restore(graph)
        for other in self.also:
            other(graph)
        dump = Dump(graph)
        result = dataclasses.replace(run_pass(graph, self.config), frame=current_frame())
        dump.after(graph, result)
        self.report.graphs.append(result)
        if os.environ.get(LOG_VARIABLE) == "why":
            log.warning("%s", FusionReport([result]))
        if self.config.strict and result.refused:
            raise SeamsNotFusedError(_complaint(result.refused))

    def uuid(self) -> Any | None:
        """Identifies everything that shapes the rewritten graph; None (no caching) if a user's pass has no uuid."""
        others = identities(self.also)
        if others is None:
            return None
        parts = (
            _source_hash(),
            sorted(dataclasses.asdict(self.config).items()),
            sorted(_environment().items()),
            others,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _complaint(refused: tuple[Refusal, ...]) -> str:
    lines = [f"{len(refused)} parts of seams were not fused (SeamConfig.strict is on):"]
    lines += [f"  {r.part} at {r.source or r.node}: {r.reason.value}: {r.detail} ({r.remedy})" for r in refused]
    return "\n".join(lines)
