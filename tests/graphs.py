"""Capture a function as the functional graph that Inductor's post-grad passes see, run torchseam's pass
over it and run the result, without Inductor's code generation: milliseconds a graph instead of seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
from torch.fx.experimental.proxy_tensor import make_fx

from torchseam.compiler.fusion_pass import run_pass
from torchseam.compiler.report import GraphReport
from torchseam.config import SeamConfig

FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2


@dataclass
class Captured:
    """What `run_fused` saw: the report of each graph, the graphs' text before and after, the results.

    wrapped: operators of others that the pass left in a functionalisation wrapper, over all graphs.
    """

    reports: list[GraphReport]
    before: list[str]
    after: list[str]
    results: Any
    wrapped: list[str] = field(default_factory=list)

    @property
    def report(self) -> GraphReport:
        (only,) = self.reports
        return only

    def kinds(self) -> list[str]:
        return [f.kind for r in self.reports for f in r.fused]


def seam_calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that run a seam, after the pass: `seam`, or `seam_` made functional."""
    targets = (torch.ops.torchseam.seam.default, torch.ops.torchseam.seam.single)
    calls = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    return [*calls, *_in_place(graph)]


def _in_place(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    wrapped = graph.find_nodes(op="call_function", target=FUNCTIONALIZED)
    return [node for node in wrapped if str(node.args[0]).startswith("torchseam.seam_.")]


def wrapped_by_others(graph: torch.fx.Graph) -> list[str]:
    """The operators in functionalisation wrappers (of either version) that are not our own `seam_`."""
    wrappers = (torch.ops.higher_order.auto_functionalized, FUNCTIONALIZED)
    nodes = [node for target in wrappers for node in graph.find_nodes(op="call_function", target=target)]
    return [str(node.args[0]) for node in nodes if node not in _in_place(graph)]


def take_apart(graph: torch.fx.Graph) -> None:
    """What Inductor does next with the operators that mutate: run in place where it finds that safe, else on a copy."""
    reinplace_inplaceable_ops_core(graph)
    for call in _in_place(graph):
        assert call.meta["only_clone_these_tensors"] == [], f"Inductor would copy for {call}"
    decompose_auto_functionalized(graph)
    assert "auto_functionalized" not in str(graph), "a wrapper is left"


def run_fused(function: Callable[..., Any], *args: Any, config: SeamConfig | None = None, **how: Any) -> Captured:
    """Capture `function(*args)`, rewrite its graph(s), run; further keywords go to torch.compile."""
    captured = Captured([], [], [], None)

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        gm.graph.eliminate_dead_code()
        captured.before.append(str(gm.graph))
        captured.reports.append(run_pass(gm.graph, config or SeamConfig()))
        gm.recompile()
        captured.after.append(str(gm.graph))
        captured.wrapped += wrapped_by_others(gm.graph)
        again = run_pass(gm.graph, config or SeamConfig())
        assert not again.fused, f"a second run of the pass fused more: {again.fused}"
        take_apart(gm.graph)
        gm.recompile()
        return gm.forward

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):  # as torchseam.compile does
        captured.results = torch.compile(function, backend=backend, fullgraph=True, **how)(*args)
    return captured


def trace_fused(module: torch.nn.Module, *args: torch.Tensor, config: SeamConfig | None = None) -> Captured:
    """As `run_fused`, but traced by make_fx alone: no Dynamo, for the tests that go through thousands of graphs."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def call(state: dict[str, torch.Tensor], *args: torch.Tensor) -> Any:
        return torch.func.functional_call(module, state, args)

    with torch.no_grad():
        how = {"decomposition_table": select_decomp_table(), "tracing_mode": "fake"}
        gm = make_fx(call, **how)(state, *args)
        if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in gm.graph.nodes):
            # a decomposition used an in-place op (F.rms_norm's does): make the graph functional, as AOT does, which
            # leaves views alone
            gm = make_fx(torch.func.functionalize(gm, remove="mutations"), **how)(state, *args)
        gm.graph.eliminate_dead_code()
        before = str(gm.graph)
        report = run_pass(gm.graph, config or SeamConfig())
        after, wrapped = str(gm.graph), wrapped_by_others(gm.graph)
        take_apart(gm.graph)
        gm.recompile()
        return Captured([report], [before], [after], gm(state, *args), wrapped)
