"""Load, shard, quantise and run a causal language model: what each rank of the demo does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from torchseam.integrations.transformers import attention
from torchseam.integrations.transformers.files import ModelError, ModelFiles
from torchseam.integrations.transformers.quantize import quantize_linears
from torchseam.integrations.transformers.shard import check_sizes, drop_backward_hooks, shard
from torchseam.seam import Quant


def load_model(files: ModelFiles, device: torch.device, layers: int | None = None) -> Any:
    """The model in bf16 on `device`, in eval mode; only its first `layers` decoder layers if given.

    Raises ModelError when transformers does not know the architecture as a causal language model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    name = attention.register()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            files.directory, dtype=torch.bfloat16, attn_implementation=name, local_files_only=True
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(f"{files.source} cannot be loaded as a causal language model: {error}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if layers is not None:
        _keep_layers(model, layers)
    return model.to(device).eval().requires_grad_(False)


def _keep_layers(model: Any, layers: int) -> None:
    base = getattr(model, model.base_model_prefix)
    base.layers = base.layers[:layers]
    config = model.config
    config.num_hidden_layers = len(base.layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: len(base.layers)]


def shard_and_quantize(model: Any, quant: Quant | None, prompt: Tensor) -> None:
    """Shard over all ranks of the default process group (if there is one), then quantise if asked."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    check_sizes(model.config, world_size)
    kinds: dict[str, str] = {}
    group = None
    if world_size > 1:
        mesh = init_device_mesh(prompt.device.type, (world_size,))
        group = mesh.get_group()
        kinds = shard(model, mesh)
    drop_backward_hooks(model)
    if quant is not None:
        quantize_linears(model, quant, kinds, lambda: model(input_ids=prompt, use_cache=False), group)


@dataclass
class Generation:
    """A greedy continuation: token ids, the logits each came from ([vocab] fp32), seconds of each step."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def _static_cache(config: Any, length: int) -> Any:
    """A key-value cache of `length` positions in every layer.

    transformers' layer for sliding windows counts its tokens in a Python number, which Dynamo takes for
    a constant: another graph for each token. The mask has the window anyway, so whole layers do.
    """
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    cache = StaticCache(config=config, max_cache_len=length)
    cache.layers = [
        StaticLayer(max_cache_len=length) if isinstance(layer, StaticSlidingWindowLayer) else layer
        for layer in cache.layers
    ]
    return cache


def generate(
    forward: Callable[..., Any],
    config: Any,
    prompt: Tensor,
    tokens: int,
    on_token: Callable[[int], object] = lambda _: None,
    cache_length: int | None = None,
) -> Generation:
    """Continue `prompt` [1, T] greedily by `tokens` tokens, with a static key-value cache.

    `forward` is the model or its compiled form: it runs as two graphs, the prompt and one token.
    The cache holds `cache_length` positions (default: what this call needs); a compiled model is
    compiled anew for another length.
    """
    length = prompt.shape[1]
    cache = _static_cache(config, cache_length or length + tokens)
    result = Generation()
    ids = prompt
    positions = torch.arange(length, device=prompt.device)[None]
    for step in range(tokens):
        started = time.perf_counter()
        logits = (
            forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
            .logits[0, -1]
            .float()
        )
        token = int(logits.argmax())
        result.seconds.append(time.perf_counter() - started)
        result.tokens.append(token)
        result.logits.append(logits.cpu())
        ids = torch.tensor([[token]], device=prompt.device)
        positions = torch.tensor([[length + step]], device=prompt.device)
        on_token(step)
    return result


@dataclass(frozen=True)
class Comparison:
    """Two generations side by side.

    `max_logit_diff` is over the steps that both reached with the same tokens. Where a token differs,
    `first_difference` holds the step, both tokens with their logits in both runs, and their margin in
    the second run (the reference).
    """

    tokens_equal: bool
    max_logit_diff: float
    first_difference: dict[str, Any] | None = None


def compare(fused: Generation, eager: Generation) -> Comparison:
    """Compare a fused with an eager generation of equal length."""
    steps = range(len(eager.tokens))
    differs = next((i for i in steps if fused.tokens[i] != eager.tokens[i]), None)
    common = len(eager.tokens) if differs is None else differs + 1
    differences = [(fused.logits[i] - eager.logits[i]).abs().max() for i in range(common)]
    # torch's maximum, not Python's: it keeps a NaN
    largest = float(torch.stack(differences).max()) if differences else 0.0
    if differs is None:
        return Comparison(True, largest)
    pair = {"fused": fused.tokens[differs], "eager": eager.tokens[differs]}
    logits = {
        run: {str(token): float(generation.logits[differs][token]) for token in pair.values()}
        for run, generation in (("fused", fused), ("eager", eager))
    }
    margin = logits["eager"][str(pair["eager"])] - logits["eager"][str(pair["fused"])]
    return Comparison(False, largest, {"step": differs, "tokens": pair, "logits": logits, "margin": margin})
