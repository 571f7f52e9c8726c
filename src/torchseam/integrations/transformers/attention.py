"""Attention for parity runs: grouped queries folded into rows, keys and values never repeated.

The library's eager attention repeats each key head for its group, and a compiler may lay that copy
out differently from eager: another GEMM kernel runs and the last bit of bf16 differs. Here both
runs multiply the very same cache tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchseam.integrations.transformers.files import ModelError

NAME = "torchseam"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, T, D], key and value [B, Hk, S, D], additive mask [B, 1, T, S] -> [B, T, Hq, D].

    Raises ModelError for attention sinks (`s_aux`), which it does not have.
    """
    if s_aux is not None:
        raise ModelError("attention sinks (gpt-oss) are not supported; use a model without them")
    batch, query_heads, tokens, dim = query.shape
    key_heads, length = key.shape[1], key.shape[2]
    group = query_heads // key_heads
    rows = query.reshape(batch, key_heads, group * tokens, dim)
    mask = None
    if attention_mask is not None:
        mask = attention_mask.expand(batch, 1, tokens, length).repeat(1, 1, group, 1)
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = torch.matmul(rows, key.transpose(2, 3)) * (scaling if scaling is not None else dim**-0.5)
        scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + mask
        weights = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        out = torch.matmul(weights, value)
    return out.reshape(batch, query_heads, tokens, dim).transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the attention known to transformers; returns the name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME
