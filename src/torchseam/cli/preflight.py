"""What is checked before ranks are started, so that bad input is answered in seconds and by one process."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchseam.cli.errors import BadInput
from torchseam.cli.progress import Steps
from torchseam.seam import SCHEMES as _SCHEMES

#: What --scheme takes: no quantisation, or a scheme of torchseam.
SCHEMES = ("none", *_SCHEMES)
DEVICES = ("auto", "cpu", "cuda")


def check_numbers(tp: int, scheme: str, tokens: int) -> None:
    """BadInput for a scheme, a number of ranks or of tokens that cannot be."""
    if scheme not in SCHEMES:
        raise BadInput(f"--scheme is {scheme!r}; allowed: {', '.join(SCHEMES)}")
    if tp < 1:
        raise BadInput(f"--tp is {tp}; it must be at least 1")
    if tokens < 1:
        raise BadInput(f"--tokens is {tokens}; it must be at least 1")


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """CUDA GPUs that torch can use here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(device: str, ranks: int) -> str:
    """`cpu` or `cuda` for `--device`; BadInput when the machine has too few of them for the ranks."""
    if device not in DEVICES:
        raise BadInput(f"--device is {device!r}; allowed: {', '.join(DEVICES)}")
    if device == "cpu":
        found = 0
    else:
        found = gpus()
        if found >= ranks:
            return "cuda"
    if device == "cuda":
        remedy = f"--tp {found} or --device cpu" if found else "--device cpu"
        raise BadInput(f"--tp {ranks} needs {ranks} GPUs, torch finds {found} on this machine; use {remedy}")
    if processors() < ranks:
        raise BadInput(
            f"--tp {ranks} needs {ranks} processors, this process may use {processors()}; use --tp {processors()}"
        )
    return "cpu"


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would call, None when there is none that runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return None


def c_compiler() -> str | None:
    """The C compiler that Triton would call for its launchers (triton/runtime/build.py), None without one."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")


def check_compiler(device: str) -> None:
    """BadInput when torch.compile would find no compiler: C++ for the CPU, Triton and C for a GPU."""
    if device == "cpu" and cpp_compiler() is None:
        own = os.environ.get("CXX")
        tried = f"CXX={own} does not run" if own else "no C++ compiler was found"
        raise BadInput(
            f"{tried}; torch.compile needs a C++ compiler on the CPU: install g++ or clang++ "
            "(Debian, Ubuntu: apt-get install g++), or name yours in the environment variable CXX"
        )
    if device == "cuda" and c_compiler() is None:
        raise BadInput(
            "no C compiler was found; Triton needs one to start its kernels: install gcc or clang "
            "(Debian, Ubuntu: apt-get install gcc), or name yours in the environment variable CC"
        )
    if device == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise BadInput(
                f"Triton cannot be imported ({error}); torch.compile needs it on a GPU: pip install triton"
            ) from error


#: transformers imports torchao where it is installed, which warns of each extension that was built for another
#: machine; torch warns of how torchao registers its enums.
_TALKATIVE = ("torchao", "torch.utils._pytree")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of libraries, which are not about anything that the user did."""
    with warnings.catch_warnings(), contextlib.ExitStack() as restored:
        warnings.simplefilter("ignore")
        for name in _TALKATIVE:
            logger = logging.getLogger(name)
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        with contextlib.suppress(ImportError):
            from transformers.utils import logging as its_logging

            restored.callback(its_logging.set_verbosity, its_logging.get_verbosity())
            its_logging.set_verbosity_error()
        yield


def prepare(model: Path | None, prompt: str, tokens: int, ranks: int, steps: Steps) -> tuple[Any, Any, tuple[int, ...]]:
    """(files, tokeniser, prompt's token ids); checks that the ranks can share the model and run it this far."""
    from torchseam.integrations.transformers import store
    from torchseam.integrations.transformers.gguf import import_extra
    from torchseam.integrations.transformers.tokenizer import load_tokenizer

    import_extra("transformers")
    files = store.default_model(steps) if model is None else store.open_model(model, steps)
    config = _read_config(files)
    check_architecture(config, ranks, files.source)
    with steps("Loading the tokenizer"):
        tokenizer = load_tokenizer(files)
        ids = tuple(tokenizer.encode(prompt))
    if not ids or not prompt:
        raise BadInput("--prompt gives no tokens; write some text")
    if max(ids) >= config.vocab_size:
        raise BadInput(
            f"{files.source}: the tokenizer gives the token {max(ids)}, the model knows {config.vocab_size}; "
            "copy the model's own tokenizer files there"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and len(ids) + tokens > longest:
        raise BadInput(
            f"{len(ids)} tokens of --prompt and --tokens {tokens} are more than the model's {longest} positions; "
            f"use a shorter prompt or --tokens {max(longest - len(ids), 1)}"
        )
    return files, tokenizer, ids


def _read_config(files: Any) -> Any:
    from transformers import AutoConfig

    from torchseam.integrations.transformers.files import ModelError

    try:
        return AutoConfig.from_pretrained(files.directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{files.source}: transformers cannot read its config.json: {error}") from error


def check_architecture(config: Any, ranks: int, source: Path) -> None:
    """ModelError unless transformers knows the model as a decoder-only language model that `ranks` can share.

    Builds it without memory (on the meta device), so that every check sees the modules themselves.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from torchseam.integrations.transformers.files import ModelError
    from torchseam.integrations.transformers.shard import check_sizes, plan_of

    kind = config.model_type
    wanted = "decoder-only language models such as Llama, Gemma, Qwen or Mistral"
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{source}: transformers cannot make a causal language model of the architecture {kind!r} "
            f"({str(error).splitlines()[0] if str(error) else error!r}); supported: {wanted}"
        ) from error
    if not isinstance(getattr(getattr(model, model.base_model_prefix, None), "layers", None), torch.nn.ModuleList):
        raise ModelError(f"{source}: the architecture {kind!r} is not supported; supported: {wanted}")
    check_sizes(config, ranks)
    if ranks > 1:
        plan_of(model)
