"""Random models against eager, bit for bit, and against a person's count of the seams (`random_models.expected`)."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import graphs
import random_models
import sharded_rows
import torchseam
from blocks import same_bits
from pretend_group import pretend_group
from random_models import Model, ModelPlan
from torchseam import SeamConfig
from torchseam.compiler.fusion_pass import run_pass
from torchseam.compiler.report import Reason
from torchseam.seam import Seam

GRAPHS, STREAMS = 4000, 40
IN_ONE_FUNCTION, FUNCTIONS = 6, 5
#: One group of three ranks, one of two: a sum that is forgotten, done twice or taken from the other group shows.
RANKS = (3, 2)

FIXED = {
    "derandomize": False,
    "deadline": None,
    "database": None,
    "report_multiple_bugs": False,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
}


@pytest.fixture
def groups(one_rank):
    return tuple(pretend_group(ranks) for ranks in RANKS)


def _count(graph: torch.fx.Graph, target) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def run_and_look(graph: torch.fx.Graph, config: SeamConfig, seen: list[torch.fx.Graph]):
    """The pass, with what must hold of every graph after it."""
    report = run_pass(graph, config)
    graph.lint()
    text = str(graph)
    again = run_pass(graph, config)
    assert not again.fused and str(graph) == text, "a second run changed the graph"
    seen.append(copy.deepcopy(graph))
    return report


def _words(seam: Seam) -> tuple[str, ...]:
    """A seam's parts, sorted; several dynamic quantisers of one scheme are one word, as in `expected`."""
    words = Counter(seam.describe().split(" + "))
    return tuple(sorted(w for w, n in words.items() for _ in range(1 if w in ("fp8_token", "fp8_group") else n)))


def check_counts(plan: ModelPlan, graph: torch.fx.Graph, report) -> None:
    left = _count(graph, torch.ops._c10d_functional.all_reduce.default)
    fused = sum(f.seam.reduce is not None for f in report.fused)
    assert left + fused == random_models.all_reduces(plan)
    assert len(graphs.seam_calls(graph)) == len(report.fused)
    want = Counter(tuple(sorted(parts.elements())) for parts in random_models.expected(plan))
    got = Counter(_words(f.seam) for f in report.fused)
    assert got == want, f"missing {want - got}, unexpected {got - want}"


def test_random_graphs_equal_eager_bit_for_bit(groups, monkeypatch):
    seen: list[torch.fx.Graph] = []
    monkeypatch.setattr(graphs, "run_pass", lambda graph, config: run_and_look(graph, config, seen))
    tally: Counter[str] = Counter()

    @settings(max_examples=GRAPHS, phases=(Phase.explicit, Phase.generate, Phase.shrink), **FIXED)
    @given(random_models.models)
    def check(plan: ModelPlan) -> None:
        seen.clear()
        model, args = Model(plan, groups), random_models.inputs(plan)
        want = model(*args)
        got = graphs.trace_fused(model, *args)
        assert len(want) == len(got.results)
        for i, (a, b) in enumerate(zip(want, got.results, strict=True)):
            assert same_bits(a, b), f"output {i} of {len(want)} differs"
        check_counts(plan, seen[0], got.report)
        tally.update(graphs=1, seams=len(got.report.fused), refused=len(got.report.refused))
        tally.update(r.reason.name for r in got.report.refused)

    check()
    print(dict(tally))
    assert tally["graphs"] >= GRAPHS
    assert tally["seams"] > GRAPHS and tally["refused"] > GRAPHS // 10, "the models have too little to fuse or refuse"


def test_random_graphs_with_sharded_residuals_equal_eager_bit_for_bit(groups, monkeypatch):
    """Rows of others hold NaN until they are gathered, so that a residual that had to be full shows."""
    seen: list[torch.fx.Graph] = []
    monkeypatch.setattr(graphs, "run_pass", lambda graph, config: run_and_look(graph, config, seen))
    config, tally = SeamConfig(shard_residual=True), Counter()

    @settings(max_examples=STREAMS, phases=(Phase.explicit, Phase.generate, Phase.shrink), **FIXED)
    @given(random_models.streams)
    def check(plan: ModelPlan) -> None:
        seen.clear()
        model, args = Model(plan, groups), random_models.inputs(plan)
        with sharded_rows.poisoned(pretended=True):
            got = graphs.trace_fused(model, *args, config=config)
        for i, (a, b) in enumerate(zip(model(*args), got.results, strict=True)):
            assert same_bits(a, b), f"output {i} differs"
        sharded = sum(not residual.full for residual in got.report.residuals)
        assert sharded == random_models.sharded_residuals(plan)
        tally.update(sharded=sharded, full=len(got.report.residuals) - sharded)

    check()
    print(dict(tally))
    assert tally["sharded"] > STREAMS // 2 and tally["full"] > STREAMS // 2, "the models have too little to shard"


@pytest.mark.slow
def test_random_models_through_inductor_equal_eager_bit_for_bit(groups, inductor_cache, fresh_dynamo):
    done = []

    @settings(max_examples=FUNCTIONS, phases=(Phase.explicit, Phase.generate), **FIXED)
    @given(st.lists(random_models.models, min_size=IN_ONE_FUNCTION, max_size=IN_ONE_FUNCTION))
    def check(plans: list[ModelPlan]) -> None:
        models = torch.nn.ModuleList(Model(plan, groups) for plan in plans)
        args = [random_models.inputs(plan) for plan in plans]

        def together(args):
            return [model(*a) for model, a in zip(models, args, strict=True)]

        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torchseam.compile(together, config=SeamConfig(exact=True), fullgraph=True)
            want, got = together(args), compiled(args)
        for plan, one, other in zip(plans, want, got, strict=True):
            assert len(one) == len(other)
            for i, (a, b) in enumerate(zip(one, other, strict=True)):
                assert same_bits(a, b), f"output {i} of {plan} differs"
        report = torchseam.report(compiled)
        sums = [f for g in report.graphs for f in g.fused if f.seam.reduce is not None]
        # Models side by side in one function: Inductor moves the all_reduce of one between another's and its norm,
        # and such a seam leaves its sum where it is.
        kept = [r for r in report.refusals if r.reason is Reason.COLLECTIVE_BETWEEN]
        expected = sum(parts["all_reduce"] for plan in plans for parts in random_models.expected(plan))
        assert len(sums) == expected or (kept and sums and len(sums) < expected)
        done.append(len(plans))

    check()
    assert sum(done) >= IN_ONE_FUNCTION * FUNCTIONS
