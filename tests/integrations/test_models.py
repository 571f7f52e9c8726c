"""Whole models, sharded, quantised, compiled and run token by token, against the same shards in eager.

The number of seams is what a person counts in the model's code, not what the pass found: a pass that
fuses nothing agrees with eager too. On the CPU the operator runs eager's own aten ops, and with
`exact` Inductor keeps every rounding of the rest, so the logits are equal to the last bit.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import ARCHITECTURES, LAYERS, prompt, tiny_model

import torchseam
from torchseam import Quant, SeamConfig
from torchseam.cli.launch import launch
from torchseam.integrations.transformers import run

pytest.importorskip("transformers", reason="needs torchseam[transformers]")
pytestmark = pytest.mark.usefixtures("inductor_cache")

#: The prompt, then two tokens: a second decoding step shows that the first left the cache right.
TOKENS = 3
#: The prompt's graph, and one for every later token.
GRAPHS = 2


@dataclass(frozen=True)
class Expected:
    """What a person counts in one graph of a two-layer model.

    `exact_norms`: norms that are no seam; `exact` runs them through the operator too.
    """

    seams: dict[str, int]
    exact_norms: int = 0
    changes: dict[str, Any] = field(default_factory=dict)


# Llama's order, sharded. The first layer's input norm has no all_reduce before it: 1. Each layer sums
# over the ranks twice, after o_proj and after down_proj; residual and norm follow each sum, the next
# layer's input norm or, after the last, the final norm, whose reader (lm_head) is not quantised.
# q, k and v read one quantiser, gate and up another: one seam each, not three and two.
PRE_NORM = {
    "rms_norm + fp8_static": 1,
    "all_reduce + residual + rms_norm + fp8_static": 2 * LAYERS - 1,
    "all_reduce + residual + rms_norm": 1,
}
# Gemma 2 / 3: the same places, with one more norm between the sum and the residual.
SANDWICH = {
    "rms_norm + fp8_static": 1,
    "all_reduce + rms_norm + residual + rms_norm + fp8_static": 2 * LAYERS - 1,
    "all_reduce + rms_norm + residual + rms_norm": 1,
}
SHARDED = {
    "llama": Expected(PRE_NORM),
    # q_norm and k_norm in each layer are over one head, with nothing before or after that could fuse
    "qwen3": Expected(PRE_NORM, exact_norms=2 * LAYERS),
    "gemma2": Expected(SANDWICH),
    # one key-value head for two ranks, as in Gemma 3 270M
    "gemma3_text": Expected(SANDWICH, exact_norms=2 * LAYERS, changes={"num_key_value_heads": 1}),
    # a window shorter than the prompt: masked from the first step on, and still one graph for all tokens
    "mistral": Expected(PRE_NORM, changes={"sliding_window": prompt().shape[1] - 2}),
    # the norms come after attention and MLP, before the residual: each ends a seam, but for the last, whose residual
    # the final norm reads. What is quantised is the residual stream itself, which no norm precedes.
    "olmo2": Expected(
        {"all_reduce + rms_norm": 2 * LAYERS - 1, "all_reduce + rms_norm + residual + rms_norm": 1},
        exact_norms=2 * LAYERS,
    ),
    "phi3": Expected(PRE_NORM),
}
WHOLE = {
    # OLMo 2's norms have neither a sum before nor a quantiser after them here.
    "olmo2": Expected({}, exact_norms=4 * LAYERS + 1),
    # Llama's places without the sums; the final norm has neither sum nor quantiser
    "phi3": Expected({"rms_norm + fp8_static": 1, "residual + rms_norm + fp8_static": 2 * LAYERS - 1}, exact_norms=1),
}


def run_model(architecture: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Eager and fused generation of one model on this rank; plain values, for the trip to the test."""
    torch._dynamo.reset()
    with torch.no_grad():
        model = tiny_model(architecture, **changes)
        run.shard_and_quantize(model, Quant("fp8_static"), prompt())
        eager = run.generate(model, model.config, prompt(), TOKENS)
        compiled = torchseam.compile(model, config=SeamConfig(exact=True), fullgraph=True, dynamic=False)
        fused = run.generate(compiled, model.config, prompt(), TOKENS)
    report = torchseam.report(compiled)
    return {
        "seams": [dict(Counter(f.kind for f in g.fused)) for g in report.graphs],
        "exact_norms": [g.exact_norms for g in report.graphs],
        "left": [f"{r.part}: {r.reason.value}: {r.detail}" for r in report.refusals]
        + [f"{g.plain_norms} norms not run as the operator" for g in report.graphs if g.plain_norms]
        + [f"{report.unreported} graphs unreported"] * bool(report.unreported),
        "comparison": dataclasses.asdict(run.compare(fused, eager)),
        "tokens": {"fused": fused.tokens, "eager": eager.tokens},
        "spread": min(float(logits.std()) for logits in eager.logits),
    }


def run_rank() -> dict[str, list[dict[str, Any]]]:
    """architecture -> what each rank saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, list[dict[str, Any]]] = {}
    for architecture, expected in SHARDED.items():
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, run_model(architecture, expected.changes))
        results[architecture] = each
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def sharded(inductor_cache: Path) -> dict[str, list[dict[str, Any]]]:
    return launch(run_rank, 2)


@pytest.fixture
def one_thread(fresh_dynamo: None) -> Iterator[None]:
    """One thread, as each rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(result: dict[str, Any], expected: Expected) -> None:
    assert result["seams"] == [expected.seams] * GRAPHS
    assert result["exact_norms"] == [expected.exact_norms] * GRAPHS
    assert result["left"] == []
    assert result["spread"] > 0.1, "the logits are all alike: nothing could differ"
    assert result["comparison"] == {"tokens_equal": True, "max_logit_diff": 0.0, "first_difference": None}, result


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", SHARDED)
def test_sharded_model_fuses_what_a_person_counts_and_equals_eager(architecture, sharded):
    first, *others = sharded[architecture]
    check(first, SHARDED[architecture])
    for other in others:
        check(other, SHARDED[architecture])
        assert other["tokens"] == first["tokens"], "the ranks do not agree"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", WHOLE)
def test_model_on_one_rank_fuses_what_a_person_counts_and_equals_eager(architecture, one_thread):
    check(run_model(architecture, WHOLE[architecture].changes), WHOLE[architecture])


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "mistral"])
def test_a_cache_longer_than_the_sliding_window_gives_the_logits_of_no_cache(architecture):
    model = tiny_model(architecture, torch.float32, sliding_window=5)
    with torch.no_grad():
        cached = run.generate(model, model.config, prompt(), 6)
        ids = torch.cat([prompt(), torch.tensor([cached.tokens[:-1]])], dim=1)
        whole = model(input_ids=ids, use_cache=False).logits[0, prompt().shape[1] - 1 :]
        unlimited = tiny_model(architecture, torch.float32, sliding_window=64)
        other = unlimited(input_ids=ids, use_cache=False).logits[0, prompt().shape[1] - 1 :]
    # both are fp32; a GEMM over one row and one over all sum in another order
    difference = (torch.stack(cached.logits) - whole).abs().max()
    assert difference < 1e-4 < 1e-2 < (other - whole).abs().max(), "or the window makes no difference here"


def generation(*logits: list[float]) -> run.Generation:
    tensors = [torch.tensor(step) for step in logits]
    return run.Generation([int(step.argmax()) for step in tensors], tensors)


def test_compare_stops_at_the_first_token_that_differs():
    eager = generation([0.0, 1.0], [2.0, 1.5], [0.0, 9.0])
    assert run.compare(eager, eager) == run.Comparison(True, 0.0)
    other = run.compare(generation([0.0, 1.25], [1.5, 2.0], [9.0, 0.0]), eager)
    assert (other.tokens_equal, other.max_logit_diff) == (False, 0.5)
    assert other.first_difference == {
        "step": 1,
        "tokens": {"fused": 1, "eager": 0},
        "logits": {"fused": {"1": 2.0, "0": 1.5}, "eager": {"1": 1.5, "0": 2.0}},
        "margin": 0.5,
    }


def test_compare_shows_a_nan_wherever_it_is():
    sound, broken = [0.0, 1.0], [0.0, math.nan]
    for steps in ([sound, broken], [broken, sound]):
        assert math.isnan(run.compare(generation(*steps), generation(sound, sound)).max_logit_diff)


# ---- docs/models.md -----------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
UPDATE_VARIABLE = "TORCHSEAM_UPDATE_GOLDEN"

INTRODUCTION = f"""# Models from Hugging Face configurations

What a person counts in the code of a model, and what the pass finds in it, for configurations of transformers at a
tiny size: {LAYERS} layers, random weights, static FP8, compiled whole. The prompt's graph and that of every later token
hold the same seams. The logits equal those of the same shards in eager to the last bit.

`tests/integrations/test_models.py` runs them all: it fails when the pass finds another number, or kind, than is counted
here, or leaves anything unfused. This page is written from its tables
(`{UPDATE_VARIABLE}=1 python -m pytest tests/integrations/test_models.py -k page`), and a test fails when it is stale.

| model | ranks | layers | seams a person counts | seams found | not fused | norms that are no seam |
|---|---|---|---|---|---|---|
"""


def model_page() -> str:
    """docs/models.md. What is found equals what is counted, and nothing is left: `check` asserts both."""
    tables = [(name, 2, expected) for name, expected in SHARDED.items()]
    tables += [(name, 1, expected) for name, expected in WHOLE.items()]
    rows = []
    for name, ranks, expected in tables:
        count = sum(expected.seams.values())
        rows.append(f"| `{name}` | {ranks} | {LAYERS} | {count} | {count} | 0 | {expected.exact_norms} |\n")
    kinds = ["\nBy kind, in one graph:\n\n| model | seam | times |\n|---|---|---|\n"]
    kinds += [f"| `{name}` | {kind} | {n} |\n" for name, _, expected in tables for kind, n in expected.seams.items()]
    return INTRODUCTION + "".join(rows) + COUNTING + "".join(kinds)


COUNTING = """
How they are counted. In Llama's order (`llama`, `qwen3`, `mistral`, `phi3`) each layer sums over the ranks after o_proj
and after down_proj; residual and norm follow each sum, and what reads the norm is quantised, but for the last norm,
which lm_head reads. The first layer's input norm has no sum before it. Gemma 2 and 3 have one more norm between the sum
and the residual, and are counted alike. q, k and v share one quantiser, gate and up another. On one rank there is no
sum, so the last norm is no seam. OLMo 2 normalises the outputs of attention and MLP before it adds them, and quantises
the residual stream itself: on two ranks a seam is a sum and a norm, and the last takes in the residual and the final
norm; on one rank none of its norms has a sum before or a quantiser after it. Norms of queries and keys (`qwen3`,
`gemma3_text`, `olmo2`) are no seams: nothing before or after them could fuse. The plans of `olmo2` and `phi3` gather
the heads over the ranks before attention, which touches no seam.
"""


def test_the_page_of_models_is_what_these_tests_hold():
    if os.environ.get(UPDATE_VARIABLE) == "1":
        PAGE.write_text(model_page())
    assert PAGE.exists(), f"no page; write it with {UPDATE_VARIABLE}=1"
    assert PAGE.read_text() == model_page(), f"{PAGE.name} is stale; write it with {UPDATE_VARIABLE}=1"


def test_every_architecture_is_in_the_table():
    assert tuple(SHARDED) == ARCHITECTURES
    assert set(WHOLE) <= set(ARCHITECTURES)
