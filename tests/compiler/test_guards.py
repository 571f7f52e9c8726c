"""A mutation check of compiler/plan.py: every condition of every guard is switched off in turn, and the scenario that
stands for it must then end in a wrong value, an error or a missing refusal. The table is printed (`pytest -s`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from blocks import EPS, AtenStatic, same_bits
from guard_mutants import Mutant, mutants, returned_reasons
from pretend_group import pretend_group
from torchseam import Quant, SeamConfig, ops
from torchseam.compiler import fusion_pass, plan
from torchseam.compiler.find import Chain

HIDDEN = 128
FP8 = Quant("fp8_static")


def rows(dtype: torch.dtype = torch.bfloat16, seed: int = 0, hidden: int = HIDDEN) -> Tensor:
    return torch.randn(3, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def row(dtype: torch.dtype = torch.bfloat16, hidden: int = HIDDEN) -> Tensor:
    return torch.linspace(0.5, 1.5, hidden).to(dtype)


SCALE = torch.tensor(0.01)


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Gemma's order without its offset: cast down last."""
    wide = x.float()
    n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (n if weight is None else n * weight).to(x.dtype)


def total(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x * 2, op, _group)


_group = ""


DEFAULT = SeamConfig()


@dataclass(frozen=True)
class Scenario:
    """A model that the guard must refuse to fuse in full.

    `graph` changes the traced graph, `chain` what was found in it: for what no spelling of today can lead to.
    """

    model: Callable[..., Tensor]
    args: tuple[Tensor, ...]
    config: SeamConfig = DEFAULT
    graph: Callable[[Graph], None] | None = None
    chain: Callable[[Chain, list[Node]], Chain] | None = None
    symbolic: bool = False
    runs: bool = True


def quantised(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return AtenStatic("divide")(norm(total(x), weight), scale)[0]


def added(x: Tensor, residual: Tensor) -> Tensor:
    return norm(total(x) + residual)


def sum_of(op: str) -> Callable[..., Tensor]:
    return lambda x, weight: norm(total(x, op), weight)


def into_fp64(x: Tensor, weight: Tensor) -> Tensor:
    wide = total(x)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)) * weight


def rename_group(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default):
        node.args = (*node.args[:2], "nowhere")


def read_early(graph: Graph) -> None:
    (start,) = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default)
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        early = graph.call_function(torch.ops.aten.abs.default, (start,))
    early.meta["val"] = start.meta["val"]
    output.args = ([output.args[0], early],)


def other_weight(chain: Chain, inputs: list[Node]) -> Chain:
    return dataclasses.replace(chain, norm=dataclasses.replace(chain.norm, weight=inputs[-1]))


def other_residual(chain: Chain, inputs: list[Node]) -> Chain:
    return dataclasses.replace(chain, residual=inputs[-1])


def _with_quant(chain: Chain, **changes: Any) -> Chain:
    (found,) = chain.quants
    match = dataclasses.replace(found.match, **changes)
    return dataclasses.replace(chain, quants=(dataclasses.replace(found, match=match),))


def grouped(chain: Chain, inputs: list[Node]) -> Chain:
    return _with_quant(chain, quant=Quant("fp8_group", 64), scale=None)


def row_of_scales(chain: Chain, inputs: list[Node]) -> Chain:
    return _with_quant(chain, scale=inputs[1])


def scale_elsewhere(graph: Graph) -> None:
    scale = graph.find_nodes(op="placeholder")[-1]
    with scale.meta["val"].fake_mode:
        scale.meta["val"] = torch.empty((), device="meta")


def residual_of_sum(x: Tensor) -> Tensor:
    s = total(x)
    return norm(s + s.abs())


def scale_of_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = norm(total(x), weight)
    return ops.quantize(y, FP8, y.float().abs().amax() / 448)[0]


def crossed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    first, second = total(x), total(x * 3)
    return norm(first, weight), second


def moved_to(device: str) -> Callable[[Graph], None]:
    """Every tensor of the graph, fake as they are, on another device."""

    def move(graph: Graph) -> None:
        for node in graph.nodes:
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor):
                with val.fake_mode:
                    node.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=device)

    return move


@dataclass(frozen=True)
class Stranger(Quant):
    """A recipe with an attribute that no kernel knows."""

    twist: str = "none"


def twisted(chain: Chain, inputs: list[Node]) -> Chain:
    return _with_quant(chain, quant=Stranger("fp8_token", twist="left"), scale=None)


FULL = (rows(), row(torch.float32), SCALE)
#: By guard and condition, as plan.py has them.
SCENARIOS: dict[str, Scenario] = {
    "_guard_group: except (RuntimeError, ValueError, KeyError)": Scenario(
        quantised, FULL, graph=rename_group, runs=False
    ),
    "_guard_reduce: not config.fuse_all_reduce": Scenario(quantised, FULL, SeamConfig(fuse_all_reduce=False)),
    "_guard_reduce: reduce.op not in _SUM": Scenario(sum_of("avg"), FULL[:2]),
    "_guard_reduce: reduce.read_early": Scenario(sum_of("sum"), FULL[:2], graph=read_early, runs=False),
    "_guard_reduce: ancestry.collective_between(reduce.start, chain.norm.output)": Scenario(crossed, FULL[:2]),
    "_guard_norm: val is not None and val.device.type not in _DEVICES": Scenario(
        sum_of("sum"), FULL[:2], graph=moved_to("meta"), runs=False
    ),
    "_guard_quant: lacking is not None": Scenario(quantised, FULL, graph=moved_to("cuda"), chain=twisted, runs=False),
    "_guard_norm: val is None or val.dtype not in _FLOATS": Scenario(
        sum_of("sum"), (rows(torch.float64), row(torch.float32))
    ),
    "_guard_norm: not isinstance(val.shape[-1], int)": Scenario(lambda x: norm(total(x)), (rows(),), symbolic=True),
    "_guard_norm: weight is not None and weight.dtype not in _FLOATS": Scenario(
        into_fp64, (rows(torch.float32), row(torch.float64))
    ),
    "_guard_norm: weight is not None and tuple(weight.shape) != (val.shape[-1],)": Scenario(
        lambda x, weight, short: norm(total(x), weight), (rows(), row(), row(hidden=64)), chain=other_weight
    ),
    "_guard_activations: val is None or val.dtype is not want.dtype": Scenario(added, (rows(), rows(torch.float32, 1))),
    "_guard_activations: last_dim(node) != hidden": Scenario(
        lambda x, residual, short: added(x, residual), (rows(), rows(seed=1), rows(hidden=64)), chain=other_residual
    ),
    "_guard_quant: quant.scheme not in config.schemes": Scenario(quantised, FULL, SeamConfig(schemes=("nvfp4",))),
    "_guard_quant: hidden % quant.multiple_of": Scenario(
        quantised, (rows(hidden=96), row(torch.float32, 96), SCALE), chain=grouped
    ),
    "_guard_quant: val is None or val.dtype is not torch.float32": Scenario(quantised, (*FULL[:2], SCALE.double())),
    "_guard_quant: val.numel() != 1": Scenario(quantised, FULL, chain=row_of_scales),
    "_guard_quant: val.device != value(chain.norm.input).device": Scenario(
        quantised, FULL, graph=scale_elsewhere, runs=False
    ),
    "_guard_inputs: node is not None and ancestry.depends(node, inside)": Scenario(residual_of_sum, (rows(),)),
    "_guard_scale: scale is not None and ancestry.depends(scale, inside)": Scenario(scale_of_norm, FULL[:2]),
}


def outcome(scenario: Scenario, reason: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`refused` for `reason` with the right values, or what went wrong."""
    mode = "symbolic" if scenario.symbolic else "fake"
    with torch.no_grad():
        gm = make_fx(scenario.model, decomposition_table=select_decomp_table(), tracing_mode=mode)(*scenario.args)
    if scenario.graph is not None:
        scenario.graph(gm.graph)
        gm.recompile()
    want = torch.utils._pytree.tree_leaves(gm(*scenario.args)) if scenario.runs else []

    def find(graph: Graph) -> Any:
        findings = original(graph)
        if scenario.chain is not None:
            inputs = graph.find_nodes(op="placeholder")
            findings.chains = [scenario.chain(chain, inputs) for chain in findings.chains]
        return findings

    original = fusion_pass.find
    with monkeypatch.context() as patch:
        patch.setattr(fusion_pass, "find", find)
        try:
            report = fusion_pass.run_pass(gm.graph, scenario.config)
            gm.recompile()
            got = torch.utils._pytree.tree_leaves(gm(*scenario.args)) if scenario.runs else []
        except Exception as error:
            return f"error: {type(error).__name__}"
    if not all(same_bits(a, b) for a, b in zip(want, got, strict=True)):
        return "wrong value"
    reasons = [r.reason.name for r in report.refused]
    return "refused" if reason in reasons else "not refused"


@pytest.fixture(autouse=True)
def group(one_rank, monkeypatch):
    monkeypatch.setitem(globals(), "_group", pretend_group(3))


MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_without_a_guard_its_scenario_goes_wrong(mutant: Mutant, monkeypatch):
    scenario = SCENARIOS[mutant.name]
    assert outcome(scenario, mutant.reason, monkeypatch) == "refused"
    monkeypatch.setattr(plan, mutant.function, mutant.code)
    without = outcome(scenario, mutant.reason, monkeypatch)
    print(f"\n{mutant.name:<82} {mutant.reason:<22} without it: {without}")
    assert without != "refused"


def test_every_guard_has_a_scenario_and_every_scenario_a_guard():
    assert {m.name for m in MUTANTS} == set(SCENARIOS)


def test_no_refusal_of_a_guard_escapes_mutation():
    assert len(MUTANTS) == returned_reasons()
    assert {m.function for m in MUTANTS} == {name for name in vars(plan) if name.startswith("_guard_")}
