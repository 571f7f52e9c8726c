"""Tiny random models of the architectures that the integration is tested with: two layers, hidden 256."""

from __future__ import annotations

from typing import Any

import torch

HIDDEN = 256
LAYERS = 2
VOCABULARY = 64

#: What an architecture needs beside the common sizes.
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 64},
    "mistral": {"sliding_window": None},
}
ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3_text", "mistral", "olmo2", "phi3")
#: Their tensor-parallel plans gather the heads (Phi-3's also gate and up) before they are used.
GATHERED = ("olmo2", "phi3")


def tiny_config(architecture: str, **changes: Any) -> Any:
    """A configuration: 4 query heads and 2 key-value heads of 64, unless `changes` says otherwise."""
    from transformers import AutoConfig

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        # Gemma ties them: with random weights every token would then follow itself
        "tie_word_embeddings": False,
    }
    if architecture not in GATHERED:
        common["head_dim"] = 64
    return AutoConfig.for_model(architecture, **{**common, **_OWN.get(architecture, {}), **changes})


def tiny_model(architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """The model with the same random weights in every process (rounded to bf16, whatever `dtype`)."""
    from transformers import AutoModelForCausalLM

    from torchseam.integrations.transformers import attention

    config = tiny_config(architecture, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.register())
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            # Gemma's norms multiply by 1 + weight
            zero = architecture.startswith("gemma") or name.endswith("bias")
            values = values / 4 + (0.0 if zero else 1.0)
        else:
            values = values * parameter.shape[-1] ** -0.5  # keeps a row's variance through a layer
        parameter.data.copy_(values.bfloat16())
    return model.eval().requires_grad_(False)


def prompt(length: int = 7) -> torch.Tensor:
    """Token ids [1, length]."""
    return torch.arange(1, length + 1)[None]
