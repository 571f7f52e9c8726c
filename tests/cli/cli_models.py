"""Tiny models for the tests of the command line: Hugging Face directories and a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = ("<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat")


def save_tokenizer(directory: Path) -> None:
    """One token a word, no BOS, so that an empty prompt gives no tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(directory)


def save_llama(directory: Path, **changes: Any) -> Path:
    """Two layers, hidden size 256, 4 query and 2 key-value heads, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_config_only(directory: Path, config: Any) -> Path:
    """`config` with weights that pass for whole, and a tokenizer: all that is looked at before ranks start."""
    from safetensors.torch import save_file

    config.save_pretrained(directory)
    save_file({"nothing": torch.zeros(1)}, directory / "model.safetensors")
    save_tokenizer(directory)
    return directory


def save_gguf(path: Path) -> Path:
    """A whole GGUF file with one tensor; not a model."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
