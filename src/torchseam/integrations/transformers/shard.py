"""Shard a causal language model over the ranks of a device mesh, by its own tensor-parallel plan.

Uses torch's DTensor styles (`parallelize_module`). Key-value heads are replicated where there are
fewer of them than ranks. Plans that gather a column-parallel result, because the model splits or normalises
it whole (Phi-3, OLMo 2), are followed. For inference: hooks that only training needs are dropped.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchseam.integrations.transformers.files import ModelError

#: Styles of transformers' plans that leave a module whole here: the first concerns gradients only,
#: and an embedding that every rank holds entire needs no collective.
_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")
SUPPORTED_STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", *_WHOLE)


class GatherOutput(torch.nn.Module):
    """A column-parallel layer whose result [..., out / W] of each rank becomes [..., out] on all."""

    def __init__(self, linear: torch.nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.linear = linear
        self.group = mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return funcol.all_gather_tensor(y, y.dim() - 1, self.group)


class SplitInput(torch.nn.Module):
    """A row-parallel layer that is given [..., in] on all ranks: each takes its part [..., in / W]."""

    def __init__(self, linear: torch.nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.linear = linear
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()

    def forward(self, x: Tensor) -> Tensor:
        part = x.shape[-1] // self.ranks
        y: Tensor = self.linear(x.narrow(-1, self.rank * part, part))
        return y


class ReplicatedHeads(ParallelStyle):
    """A key or value projection with fewer heads than ranks: each rank keeps the head that its queries use."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        head = device_mesh.get_local_rank() * self.heads // device_mesh.size()
        for name, parameter in list(module.named_parameters(recurse=False)):
            rows = parameter.shape[0] // self.heads
            mine = parameter.detach()[head * rows : (head + 1) * rows].clone()
            module.register_parameter(name, torch.nn.Parameter(mine, requires_grad=False))
        return module


def plan_of(model: Any) -> dict[str, str]:
    """Module name -> style for every module that the model's plan names.

    Raises ModelError when the architecture has no plan, or one with a style that is not supported.
    """
    base = getattr(model, model.base_model_prefix, model)
    prefix = "" if base is model else f"{model.base_model_prefix}."
    patterns: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    kind = model.config.model_type
    if not patterns:
        raise ModelError(f"the architecture {kind!r} has no tensor-parallel plan in transformers; use --tp 1")
    unsupported = {style for style in patterns.values() if style not in SUPPORTED_STYLES}
    if unsupported:
        raise ModelError(
            f"the tensor-parallel plan of {kind!r} uses {', '.join(sorted(unsupported))}; "
            f"supported: {', '.join(SUPPORTED_STYLES)}; use --tp 1"
        )
    expressions = [(re.compile(re.escape(p).replace(r"\*", r"\d+")), style) for p, style in patterns.items()]
    found = {}
    for name, _ in base.named_modules():
        for expression, style in expressions:
            if expression.fullmatch(name):
                found[prefix + name] = style
    return found


def check_sizes(config: Any, world_size: int) -> None:
    """Raise ModelError unless `world_size` ranks can share the model's heads and sizes.

    Also for a model whose configuration does not name them: no decoder-only transformer of text.
    """

    def refuse(what: str, size: int) -> None:
        heads, *_ = _sizes(config)
        fits = [n for n in range(1, heads + 1) if all(_divides(config, n))]
        raise ModelError(
            f"--tp {world_size} does not divide the {what} ({size}); --tp may be {', '.join(map(str, fits))}"
        )

    names = ("attention heads", "key-value heads", "hidden size", "intermediate size")
    for name, size, fits in zip(names, _sizes(config), _divides(config, world_size), strict=True):
        if not fits:
            refuse(name, size)


def _sizes(config: Any) -> tuple[int, int, int, int]:
    """Attention heads, key-value heads, hidden and intermediate size; ModelError when one is not one number."""

    def size(name: str) -> int:
        given = getattr(config, name, None)
        if isinstance(given, int) and given > 0:
            return given
        raise ModelError(
            f"the architecture {config.model_type!r} is not supported: the {name} of its configuration is "
            f"{reprlib.repr(given)}; it must be a positive number (decoder-only text models, such as Llama, have one)"
        )

    heads = size("num_attention_heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, size("hidden_size"), size("intermediate_size")


def _divides(config: Any, world_size: int) -> tuple[bool, bool, bool, bool]:
    heads, kv_heads, hidden, intermediate = _sizes(config)
    shares = kv_heads % world_size == 0 or world_size % kv_heads == 0
    return heads % world_size == 0, shares, hidden % world_size == 0, intermediate % world_size == 0


def shard(model: Any, mesh: DeviceMesh) -> dict[str, str]:
    """Shard in place; returns module name -> `colwise` | `rowwise` | `replicated` for every linear layer touched.

    A layer whose result is gathered, or whose input is split, goes by `NAME.linear` afterwards.

    Raises ModelError when the model's sizes or plan do not allow it.
    """
    config, world_size = model.config, mesh.size()
    check_sizes(config, world_size)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    plan = plan_of(model)
    for name, style in plan.items():
        _check_divides(name, model.get_submodule(name), style, world_size)
    styles: dict[str, ParallelStyle] = {}
    kinds: dict[str, str] = {}
    for name, style in plan.items():
        if style in _WHOLE:
            continue
        if style == "colwise" and kv_heads % world_size and name.rpartition(".")[2] in ("k_proj", "v_proj"):
            styles[name], kinds[name] = ReplicatedHeads(kv_heads), "replicated"
            continue
        kind = style.partition("_")[0]
        if style != kind:
            wrapper = GatherOutput if kind == "colwise" else SplitInput
            model.set_submodule(name, wrapper(model.get_submodule(name), mesh))
            name = f"{name}.linear"
        styles[name], kinds[name] = ColwiseParallel() if kind == "colwise" else RowwiseParallel(), kind
    parallelize_module(model, mesh, styles)
    local_kv_heads = max(kv_heads // world_size, 1)
    whole = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise_gather_output"}
    for name, module in model.named_modules():
        if hasattr(module, "num_key_value_groups") and name not in whole:
            module.num_key_value_groups = config.num_attention_heads // world_size // local_kv_heads
    drop_backward_hooks(model)
    return kinds


def _check_divides(name: str, module: Any, style: str, world_size: int) -> None:
    """What `check_sizes` does not see: layers of the model's own making (Phi-3's q, k and v in one)."""
    for kind, size in (("colwise_gather_output", "out_features"), ("rowwise_split_input", "in_features")):
        if style == kind and getattr(module, size) % world_size:
            raise ModelError(f"--tp {world_size} does not divide the {size} of {name} ({getattr(module, size)})")


def drop_backward_hooks(model: torch.nn.Module) -> int:
    """Remove module-level backward hooks and return how many there were.

    transformers' plans install them for training (Qwen3's q_norm and k_norm); torch.compile breaks
    the graph at every module that has one. An inference model never runs them.
    """
    count = 0
    for module in model.modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            count += len(hooks)
            hooks.clear()
        module._is_full_backward_hook = None
    return count


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
