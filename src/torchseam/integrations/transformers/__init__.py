"""Hugging Face transformers: load, shard, quantise and run a causal language model."""
