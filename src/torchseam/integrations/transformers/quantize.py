"""Quantise a model's linear layers in one scheme; static scales are calibrated on a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchseam.formats.fp8 import E4M3_MAX
from torchseam.integrations.transformers.shard import local
from torchseam.nn import QuantLinear, encode_factor
from torchseam.seam import Quant


def linear_layers(model: Any) -> list[str]:
    """Names of the linear layers inside decoder layers: what quantised checkpoints quantise."""
    base = getattr(model, model.base_model_prefix, model)
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return [prefix + name for name, m in base.named_modules() if isinstance(m, torch.nn.Linear)]


def calibrate(
    model: Any, names: list[str], run: Callable[[], object], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Name -> amax (fp32 scalar) of each layer's input while `run()` runs the model.

    Layers that read one tensor (q, k, v; gate, up) share one result object, so that they share one
    quantiser. The maximum is taken over all ranks of `group`. Raises ValueError when `run()` does not
    reach a layer: a scale for it would be made up.
    """
    seen: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    last: list[tuple[Tensor, str]] = []

    def hook(name: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        def record(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
            x = local(args[0])
            if last and last[0][0] is x:
                shared[name] = last[0][1]
                return
            last[:] = [(x, name)]
            amax = x.float().abs().amax()
            seen[name] = torch.maximum(seen[name], amax) if name in seen else amax

        return record

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name), prepend=True) for name in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    missed = [name for name in names if name not in seen and name not in shared]
    if missed:
        raise ValueError(
            f"the calibration run did not reach {len(missed)} linear layers (first: {missed[0]}); "
            "choose a dynamic scheme, which needs no calibration: fp8_token, fp8_group"
        )
    if group is not None and seen:
        stacked = torch.stack(list(seen.values()))
        dist.all_reduce(stacked, op=dist.ReduceOp.MAX, group=group)
        seen = dict(zip(seen, stacked.unbind(), strict=True))
    seen = {name: amax.clone() for name, amax in seen.items()}
    return {name: seen[shared.get(name, name)] for name in names}


def quantize_linears(
    model: Any,
    quant: Quant,
    kinds: dict[str, str],
    run: Callable[[], object],
    group: dist.ProcessGroup | None = None,
) -> int:
    """Replace the linear layers of the decoder layers by `QuantLinear`; returns how many.

    `kinds` is what `shard` returned (empty for one rank); `run` runs the model once on the
    calibration prompt. Raises ValueError when a layer's size does not fit the scheme; the model is
    then as it was.
    """
    names = linear_layers(model)
    for name in names:
        columns = local(model.get_submodule(name).weight).shape[1]
        if columns % quant.multiple_of:
            raise ValueError(
                f"{name} has {columns} input features on each rank; {quant.scheme} needs a multiple of "
                f"{quant.multiple_of}: choose another scheme or fewer ranks"
            )
    scales: dict[int, Tensor] = {}
    amaxes = calibrate(model, names, run, group) if quant.takes_scale else {}
    for name in names:
        linear = model.get_submodule(name)
        input_scale = None
        if quant.takes_scale:
            amax = amaxes[name]
            if id(amax) not in scales:
                scales[id(amax)] = encode_factor(amax) if quant.scheme == "nvfp4" else _static_scale(amax)
            input_scale = scales[id(amax)]
        bias = None if linear.bias is None else local(linear.bias).detach()
        reduce_group = group if kinds.get(name) == "rowwise" else None
        new = QuantLinear(local(linear.weight).detach(), bias, quant, input_scale, reduce_group)
        model.set_submodule(name, new)
    return len(names)


def _static_scale(amax: Tensor) -> Tensor:
    """fp32 scale that maps the largest calibrated value to E4M3's largest; 1 for an all-zero input."""
    return torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
