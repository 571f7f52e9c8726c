"""Calibration on a prompt, and linear layers replaced by quantised ones, in whole models."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import HIDDEN, LAYERS, prompt, tiny_model

from torchseam import Quant
from torchseam.cli.launch import launch
from torchseam.integrations.transformers import run
from torchseam.integrations.transformers.quantize import calibrate, linear_layers, quantize_linears
from torchseam.nn import QuantLinear
from torchseam.seam import SCHEMES

pytest.importorskip("transformers", reason="needs torchseam[transformers]")

PROJECTIONS = 7  # q, k, v, o; gate, up, down
#: What reads one tensor, and so one quantiser: the scheme of every architecture here.
SIBLINGS = {"q_proj": "q_proj", "k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def forward(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=prompt(), use_cache=False).logits


def largest_inputs(model: Any) -> dict[str, float]:
    """Layer -> the largest absolute input, by a hook of our own."""
    found: dict[str, float] = defaultdict(float)

    def watch(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            found[name] = max(found[name], max(abs(v) for v in args[0].float().flatten().tolist()))

        return hook

    handles = [
        m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n.endswith("_proj") and ".layers." in n
    ]
    forward(model)
    for handle in handles:
        handle.remove()
    return dict(found)


def first_sibling(name: str) -> str:
    path, last = name.rsplit(".", 1)
    return f"{path}.{SIBLINGS.get(last, last)}"


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_calibration_sees_what_a_hook_sees_and_siblings_share_one_object(architecture):
    model = tiny_model(architecture)
    names = linear_layers(model)
    assert len(names) == PROJECTIONS * LAYERS
    amaxes = calibrate(model, names, lambda: forward(model), None)
    assert {name: float(amax) for name, amax in amaxes.items()} == largest_inputs(model)
    assert all(a.dtype is torch.float32 and a.shape == () for a in amaxes.values())
    groups = defaultdict(set)
    for name, amax in amaxes.items():
        groups[id(amax)].add(name)
    assert sorted(map(sorted, groups.values())) == sorted(
        sorted(n for n in names if first_sibling(n) == first) for first in {first_sibling(n) for n in names}
    )
    assert not any(m._forward_pre_hooks for m in model.modules()), "a hook was left behind"


def test_calibration_keeps_the_largest_of_several_runs():
    model = tiny_model("llama")
    names = linear_layers(model)
    one = calibrate(model, names, lambda: forward(model), None)
    scale = model.model.layers[0].input_layernorm.weight

    def twice() -> None:
        forward(model)
        scale.mul_(2)
        forward(model)
        scale.div_(4)
        forward(model)
        scale.mul_(2)

    both = calibrate(model, names, twice, None)
    first = "model.layers.0.self_attn.q_proj"
    assert float(both[first]) == 2 * float(one[first])
    assert both[first] is both["model.layers.0.self_attn.v_proj"]


def test_hooks_go_when_the_calibration_run_fails():
    model = tiny_model("llama")

    def fail() -> None:
        raise RuntimeError("no prompt")

    with pytest.raises(RuntimeError, match="no prompt"):
        calibrate(model, linear_layers(model), fail, None)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_layer_that_the_prompt_does_not_reach_is_named():
    model = tiny_model("llama")
    model.model.idle_proj = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"did not reach 1 linear layers \(first: model.idle_proj\).*fp8_token"):
        quantize_linears(model, Quant("fp8_static"), {}, lambda: forward(model))


# ---- whole models -------------------------------------------------------------------------------


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


#: The rms error of one rounding, relative to the rms of what is rounded: half a step to each side is an
#: rms of step/sqrt(12), and over a binade the step is 1/8 to 1/16 of the value for e4m3, 1/2 to 1/4 for e2m1.
ROUNDING_ERROR = {"fp8_static": 0.026, "fp8_token": 0.026, "fp8_group": 0.026, "nvfp4": 0.095}
#: Errors that add up in squares on the way to the logits: of an input and a weight in each of q / k / v, o,
#: gate, up and down of each layer.
ROUNDINGS = 2 * 5 * LAYERS


def check_error(scheme: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """The error of the logits is what rounding makes: not less (then nothing was quantised), not more."""
    expected = ROUNDING_ERROR[scheme] * ROUNDINGS**0.5
    # Half of it, where the residual stream carries most of the signal past the layers; half more, where
    # a layer makes its input's error larger (softmax, the product of gate and up).
    error = relative_error(got, want)
    assert expected / 2 < error < expected * 3 / 2, (scheme, error, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3_text", "mistral", "olmo2", "phi3"])
def test_every_layer_is_replaced_and_the_logits_stay_near(architecture, scheme):
    model = tiny_model(architecture)
    want = forward(model)
    layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    with torch.no_grad():
        assert quantize_linears(model, Quant(scheme), {}, lambda: forward(model)) == len(layers) > 0
    left = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert left == ["lm_head"], "the head stays as it is, as in quantised checkpoints"
    quantised = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert list(quantised) == layers
    assert {m.quant for m in quantised.values()} == {Quant(scheme)}
    assert {m.reduce_group for m in quantised.values()} == {None}
    check_error(scheme, forward(model), want)


@pytest.mark.parametrize("scheme", ["fp8_static", "nvfp4"])
def test_siblings_share_one_scale_tensor(scheme):
    model = tiny_model("llama")
    amaxes = largest_inputs(model)
    with torch.no_grad():
        quantize_linears(model, Quant(scheme), {}, lambda: forward(model))
    layers = dict(model.named_modules())
    for name, amax in amaxes.items():
        scale = layers[name].input_scale
        assert scale is layers[first_sibling(name)].input_scale
        one = torch.tensor(amax)
        assert torch.equal(scale, one / 448 if scheme == "fp8_static" else torch.tensor(448.0 * 6) / one)
    scales = {id(layers[name].input_scale) for name in amaxes}
    assert len(scales) == 4 * LAYERS  # attention in, o_proj, MLP in, down_proj


@pytest.mark.parametrize("scheme", ["fp8_token", "fp8_group"])
def test_dynamic_schemes_run_no_calibration(scheme):
    model = tiny_model("llama")

    def never() -> None:
        raise AssertionError("calibration ran")

    quantize_linears(model, Quant(scheme), {}, never)
    assert {m.input_scale for m in model.modules() if isinstance(m, QuantLinear)} == {None}


@pytest.mark.parametrize("scheme", ["fp8_static", "nvfp4"])
def test_the_scale_of_an_input_that_is_all_zero_is_one(scheme):
    model = tiny_model("llama")
    model.model.layers[0].input_layernorm.weight.zero_()
    with torch.no_grad():
        quantize_linears(model, Quant(scheme), {}, lambda: forward(model))
    scale = model.model.layers[0].self_attn.q_proj.input_scale
    assert (float(scale), scale.dtype, scale.shape) == (1.0, torch.float32, ())
    assert torch.isfinite(forward(model)).all()


@pytest.mark.parametrize(
    ("quant", "width", "needs"),
    [(Quant("nvfp4"), 24, 16), (Quant("fp8_group"), 192, 128), (Quant("fp8_group", 64), 96, 64)],
)
def test_a_size_that_does_not_fit_the_scheme_is_refused_by_name_and_nothing_is_replaced(quant, width, needs):
    model = tiny_model("llama", intermediate_size=width)
    message = (
        rf"model\.layers\.0\.mlp\.down_proj has {width} input features on each rank; {quant.scheme} needs a "
        rf"multiple of {needs}"
    )
    with pytest.raises(ValueError, match=message):
        quantize_linears(model, quant, {}, lambda: forward(model))
    assert not any(isinstance(m, QuantLinear) for m in model.modules())


def test_biases_are_kept():
    model = tiny_model("llama", mlp_bias=True, attention_bias=True)
    biases = {n: m.bias.clone() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    want = forward(model)
    quantize_linears(model, Quant("fp8_token"), {}, lambda: None)
    for name, bias in biases.items():
        assert torch.equal(model.get_submodule(name).bias, bias)
    check_error("fp8_token", forward(model), want)


# ---- over ranks ---------------------------------------------------------------------------------


def run_rank() -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    from torchseam.integrations.transformers.shard import shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    changes = {"mlp_bias": True, "attention_bias": True}
    with torch.no_grad():
        model = tiny_model("llama", **changes)
        kinds = shard(model, init_device_mesh("cpu", (2,)))
        names = linear_layers(model)
        mine = {n: float(a) for n, a in calibrate(model, names, lambda: forward(model), None).items()}
        both = {n: float(a) for n, a in calibrate(model, names, lambda: forward(model), dist.group.WORLD).items()}
        unquantised = forward(model)
        quantize_linears(model, Quant("fp8_static"), kinds, lambda: forward(model), dist.group.WORLD)
        scales = {n: float(m.input_scale) for n, m in model.named_modules() if isinstance(m, QuantLinear)}
        summed = [n for n, m in model.named_modules() if isinstance(m, QuantLinear) and m.reduce_group is not None]
        check_error("fp8_static", forward(model), unquantised)
        for scheme in ("fp8_token", "fp8_group", "nvfp4"):
            other = tiny_model("llama", **changes)
            run.shard_and_quantize(other, Quant(scheme), prompt())
            check_error(scheme, forward(other), unquantised)
        everywhere = [torch.empty_like(unquantised) for _ in range(2)]
        dist.all_gather(everywhere, forward(model))
    found = {
        "mine": mine,
        "both": both,
        "scales": scales,
        "summed": summed,
        "agree": torch.equal(*everywhere),
    }
    each: list[Any] = [None, None]
    dist.all_gather_object(each, found)
    dist.destroy_process_group()
    return each


@pytest.mark.slow
def test_over_ranks_the_largest_input_of_any_rank_sets_the_scale():
    first, second = launch(run_rank, 2)
    names = list(first["mine"])
    assert len(names) == PROJECTIONS * LAYERS
    rowwise = [name for name in names if name.endswith(("o_proj", "down_proj"))]
    differs = [name for name in names if first["mine"][name] != second["mine"][name]]
    assert set(differs) <= set(rowwise) and len(differs) > LAYERS, "only what is sharded can differ"
    want = {name: max(first["mine"][name], second["mine"][name]) for name in names}
    assert first["both"] == second["both"] == want
    assert first["scales"] == second["scales"]
    assert first["scales"] == {n: float(torch.tensor(a) / 448) for n, a in want.items()}
    assert first["summed"] == second["summed"] == rowwise
    assert first["agree"] and second["agree"]


def test_the_tiny_models_fit_every_scheme():
    assert HIDDEN % Quant("fp8_group").multiple_of == 0
