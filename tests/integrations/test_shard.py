"""Sharded models against the whole ones; head counts that do not divide; hooks; what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import ARCHITECTURES, GATHERED, HIDDEN, prompt, tiny_config, tiny_model

from torchseam.cli.launch import launch
from torchseam.integrations.transformers.attention import grouped_attention
from torchseam.integrations.transformers.files import ModelError
from torchseam.integrations.transformers.shard import check_sizes, drop_backward_hooks, local, plan_of, shard

transformers = pytest.importorskip("transformers", reason="needs torchseam[transformers]")

#: (architecture, what else its configuration says), for each number of ranks.
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        *((architecture, {}) for architecture in ARCHITECTURES),
        ("gemma3_text", {"num_key_value_heads": 1}),
        ("qwen3", {"num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
        ("phi3", {"num_key_value_heads": 1}),
    ],
    4: [
        ("phi3", {}),
        ("llama", {"num_key_value_heads": 2, "num_attention_heads": 8}),
        ("gemma2", {"num_key_value_heads": 1}),
        ("qwen3", {"num_key_value_heads": 4}),
    ],
}


def logits(architecture: str, dtype: torch.dtype, changes: dict[str, Any], mesh: Any = None) -> tuple[Any, Any]:
    model = tiny_model(architecture, dtype, **changes)
    kinds = None
    if mesh is not None:
        kinds = shard(model, mesh)
    found = model(input_ids=prompt(), use_cache=False).logits[0].double()
    return found, (model, kinds)


def run_rank(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    with torch.no_grad():
        for architecture, changes in cases:
            want, _ = logits(architecture, torch.float64, changes)
            errors = {}
            for dtype in (torch.float32, torch.bfloat16):
                whole, _ = logits(architecture, dtype, changes)
                mine, (model, kinds) = logits(architecture, dtype, changes, mesh)
                errors[str(dtype)] = [float((x - want).abs().max()) for x in (whole, mine)]
            everyone = [torch.empty_like(mine) for _ in range(mesh.size())]
            dist.all_gather(everyone, mine)
            layer = model.model.layers[1]
            results.append(
                {
                    "errors": errors,
                    "agree": all(torch.equal(x, mine) for x in everyone),
                    "groups": {m.num_key_value_groups for m in model.modules() if hasattr(m, "num_key_value_groups")},
                    "rows": {
                        name: local(module.weight).shape[0]
                        for name, module in layer.named_modules()
                        if isinstance(module, torch.nn.Linear)
                    },
                    "kinds": {name.partition(".1.")[2]: kind for name, kind in kinds.items() if ".1." in name},
                    "layers": len(kinds),
                }
            )
    dist.destroy_process_group()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("world_size", CASES)
def test_sharded_logits_are_as_good_as_whole_ones(world_size):
    for (architecture, changes), found in zip(CASES[world_size], launch(run_rank, world_size, CASES[world_size])):  # noqa: B905
        what = f"{architecture} {changes} on {world_size} ranks: {found}"
        # The measure is the model in float64. Sharding adds to each sum over the ranks one rounding of
        # every partial sum: each of W parts of about 1/sqrt(W) of the whole, so together as much as the
        # whole's own rounding. Twice the whole model's error, then; twice again, because an error is
        # the largest of some hundred and two draws of that differ. A head or a slice of weights in the
        # wrong place is off by the size of the logits, about 1.
        for dtype, (whole, mine) in found["errors"].items():
            assert mine <= 4 * whole, f"{dtype}: {what}"
            assert whole < 0.25, f"{dtype}: a wrong model would pass as well: {what}"
        assert found["agree"], f"the ranks do not agree: {what}"
        config = tiny_config(architecture, **changes)
        kv_heads, heads = config.num_key_value_heads, config.num_attention_heads
        kept = max(kv_heads // world_size, 1)
        whole = architecture in GATHERED  # each rank has all heads
        assert found["groups"] == {heads // kv_heads if whole else heads // world_size // kept}, what
        kinds, rows = layers_of(architecture, config, world_size)
        assert found["kinds"] == kinds, what
        assert found["rows"] == rows, what
        assert found["layers"] == len(kinds) * config.num_hidden_layers, what


def layers_of(architecture: str, config: Any, world_size: int) -> tuple[dict[str, str], dict[str, int]]:
    """Linear layer of a decoder layer -> how it is sharded, and the rows of its weight on each rank."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    down = {"mlp.down_proj": ("rowwise", HIDDEN)}
    up = {f"mlp.{n}_proj": ("colwise", HIDDEN // world_size) for n in ("gate", "up")}
    attention = {"q": heads, "k": kv_heads, "v": kv_heads}
    if architecture == "phi3":
        down = {"mlp.down_proj.linear": ("rowwise", HIDDEN)}
        up = {"mlp.gate_up_proj.linear": ("colwise", 2 * HIDDEN // world_size)}
        attention = {"qkv": heads + 2 * kv_heads}
    own = ".linear" if architecture in GATHERED else ""
    replicated = own == "" and kv_heads < world_size
    kind = {name: "replicated" if replicated and name in "kv" else "colwise" for name in attention}
    kept = {name: 1 if kind[name] == "replicated" else n / world_size for name, n in attention.items()}
    layers = {
        **{f"self_attn.{n}_proj{own}": (kind[n], int(kept[n] * 64)) for n in attention},
        f"self_attn.o_proj{own}": ("rowwise", HIDDEN),
        **up,
        **down,
    }
    return {n: kind for n, (kind, _) in layers.items()}, {n: rows for n, (_, rows) in layers.items()}


def test_layers_that_do_not_divide_are_refused_before_anything_changes():
    model = tiny_model("phi3", num_attention_heads=3, num_key_value_heads=3, hidden_size=192, intermediate_size=192)
    mesh = SimpleNamespace(size=lambda: 3)
    model.model.layers[0].self_attn.qkv_proj = torch.nn.Linear(192, 100)
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(ModelError, match=r"--tp 3 does not divide the out_features of .*qkv_proj \(100\)"):
        shard(model, mesh)
    assert [name for name, _ in model.named_modules()] == before


# ---- hooks that only training needs -------------------------------------------------------------


def hooked_model() -> Any:
    """Qwen3 with what transformers' own plan installs on q_norm and k_norm: a module-level backward hook."""
    model = tiny_model("qwen3")
    for name, module in model.named_modules():
        if plan_of(model).get(name) == "replicated_with_grad_allreduce":
            module.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    return model


def graphs_of(model: Any) -> int:
    count = 0

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal count
        count += 1
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(input_ids=prompt(), use_cache=False)
    return count


def test_backward_hooks_break_the_graph_and_without_them_it_is_one(fresh_dynamo):
    model = hooked_model()
    assert graphs_of(model) > 1
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="hooks"):
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=prompt(), use_cache=False)
    torch._dynamo.reset()
    assert drop_backward_hooks(model) == 2 * model.config.num_hidden_layers
    assert graphs_of(model) == 1
    assert drop_backward_hooks(model) == 0


def test_forward_hooks_stay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    model[0].register_full_backward_pre_hook(lambda module, grad: None)
    before = model(torch.ones(1, 2))
    assert drop_backward_hooks(model) == 1
    assert torch.equal(model(torch.ones(1, 2)), before)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "hidden", "intermediate", "world_size", "message"),
    [
        (4, 2, 256, 256, 3, r"--tp 3 does not divide the attention heads \(4\); --tp may be 1, 2, 4$"),
        (4, 2, 256, 256, 8, r"--tp 8 does not divide the attention heads \(4\); --tp may be 1, 2, 4$"),
        # more ranks than key-value heads can fit, as long as each head goes to as many of them
        (12, 2, 384, 384, 3, r"key-value heads \(2\); --tp may be 1, 2, 4, 6, 12$"),
        (4, 2, 250, 256, 4, r"hidden size \(250\); --tp may be 1, 2$"),
        (4, 2, 256, 30, 4, r"intermediate size \(30\); --tp may be 1, 2$"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_what_would(
    heads, kv_heads, hidden, intermediate, world_size, message
):
    config = SimpleNamespace(
        model_type="llama",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=hidden,
        intermediate_size=intermediate,
    )
    with pytest.raises(ModelError, match=message):
        check_sizes(config, world_size)


def test_sizes_that_divide_pass():
    for world_size in (1, 2, 4):
        check_sizes(tiny_config("llama", num_key_value_heads=1), world_size)
    check_sizes(transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=None), 4)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("GPT2Config", "intermediate_size"),
        ("MambaConfig", "num_attention_heads"),
        ("Gemma3Config", "num_attention_heads"),  # of text and images: the sizes are one floor down
        ("Gemma3nTextConfig", "intermediate_size"),  # a list, one for each layer
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_architecture_without_these_sizes_is_refused(config, name, world_size):
    with pytest.raises(ModelError, match=rf"is not supported: the {name} of its configuration is (None|\[)") as error:
        check_sizes(getattr(transformers, config)(), world_size)
    assert len(str(error.value)) < 300


def test_a_plan_with_unknown_styles_is_refused_by_their_names():
    model = tiny_model("llama")
    model.config.base_model_tp_plan = {"layers.*.mlp": "moe_tp_experts", "layers.*.self_attn.o_proj": "sliced"}
    with pytest.raises(ModelError, match=r"'llama' uses moe_tp_experts, sliced; supported: colwise, .*--tp 1"):
        plan_of(model)


def test_an_architecture_without_a_plan_is_refused():
    model = tiny_model("llama")
    model.config.base_model_tp_plan = None
    with pytest.raises(ModelError, match=r"'llama' has no tensor-parallel plan.*--tp 1"):
        plan_of(model)


def test_a_plan_names_modules_below_the_head():
    model = tiny_model("qwen3")
    plan = plan_of(model)
    assert len(plan) == 9 * model.config.num_hidden_layers
    assert plan["model.layers.0.self_attn.o_proj"] == "rowwise"
    assert all(model.get_submodule(name) is not None for name in plan)


# ---- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_grouped_attention_is_attention_with_repeated_keys(heads, softcap):
    query_heads, key_heads = heads
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, n, t, 16, generator=generator).double()
        for n, t in ((query_heads, 3), (key_heads, 5), (key_heads, 5))
    )
    mask = torch.full((3, 5), -torch.inf).double().triu(3).expand(2, 1, 3, 5)
    got, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, 0.3, softcap=softcap)
    repeat = query_heads // key_heads
    scores = query @ key.repeat_interleave(repeat, 1).mT * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    want = torch.softmax(scores + mask, -1) @ value.repeat_interleave(repeat, 1)
    # with a soft cap the weights are fp32, as the library's are
    tolerance = 1e-12 if softcap is None else 1e-6
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=0, atol=tolerance)


def test_attention_sinks_are_refused():
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelError, match="sinks"):
        grouped_attention(torch.nn.Module(), x, x, x, None, s_aux=torch.zeros(HIDDEN))
