"""What a model is on disk, and the error that tells why one cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class ModelError(ValueError):
    """A model that cannot be used; the message says what was given, what is allowed, and what to do."""


@dataclass(frozen=True)
class ModelFiles:
    """A model that can be loaded: `directory` has config.json and *.safetensors.

    `tokenizer` is "huggingface" (the directory's own) or "gguf" (sentencepiece, made by the conversion);
    `source` is what the user named: a directory, a GGUF file, or the package of the default model.
    """

    directory: Path
    name: str
    tokenizer: str
    source: Path
