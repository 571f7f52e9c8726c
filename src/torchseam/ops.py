"""The operators: `torchseam::seam` (a whole seam), `torchseam::seam_` (the same, overwriting x, the residual or
both) and `torchseam::quantize` (a quantiser alone).

Attributes travel as one line of text (`Seam.to_text`), tensors as arguments, so every seam is the
same operator and no combination has a schema of its own. Inputs are validated here and nowhere
else; the fake implementations give the shape, dtype and stride of the real results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchseam import reference
from torchseam.backends import local, select
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs, empty_quantized
from torchseam.seam import Norm, Quant, Seam

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_library = torch.library.Library("torchseam", "DEF")
_library.define(
    "seam(Tensor x, Tensor? residual, Tensor? inner_weight, Tensor? weight, Tensor[] scales, str seam) -> Tensor[]"
)
#: The arguments that `seam_` may overwrite, in each of its overloads.
OVERWRITES: tuple[tuple[str, ...], ...] = (("x",), ("residual",), ("x", "residual"))
#: torch functionalises a mutating operator only when each of its returns is a plain tensor, so `seam_` has overloads by
#: their number too. A norm, codes and scales are three; this leaves room for more quantisers.
MAX_RETURNED = 8


def _overload(overwrites: Sequence[str], returned: int) -> str:
    return f"{'_'.join(overwrites)}_{returned}"


def _schema(overwrites: tuple[str, ...], returned: int) -> str:
    x = "Tensor(a!) x" if "x" in overwrites else "Tensor x"
    residual = "Tensor(b!) residual" if "residual" in overwrites else "Tensor? residual"
    rest = "Tensor? inner_weight, Tensor? weight, Tensor[] scales, str seam"
    return f"seam_.{_overload(overwrites, returned)}({x}, {residual}, {rest}) -> ({', '.join(['Tensor'] * returned)})"


_IN_PLACE = tuple(itertools.product(OVERWRITES, range(1, MAX_RETURNED + 1)))
for _overwrites, _count in _IN_PLACE:
    _library.define(_schema(_overwrites, _count))
_library.define("quantize(Tensor y, Tensor? scale, str quant) -> Tensor[]")
#: What these return is one tensor, in no list: Inductor's `cpp_wrapper` (torch 2.13) takes a list of one for a tensor.
_library.define(
    "seam.single(Tensor x, Tensor? residual, Tensor? inner_weight, Tensor? weight, Tensor[] scales, str seam) -> Tensor"
)
_library.define("quantize.single(Tensor y, Tensor? scale, str quant) -> Tensor")
_library.define("keep_cast(Tensor x, ScalarType dtype) -> Tensor")


# ---- validation -------------------------------------------------------------------------------


def _check_activation(name: str, x: Tensor) -> None:
    if x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"{name} has dtype {x.dtype}; allowed: {', '.join(map(str, ACTIVATION_DTYPES))}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; its last dimension, the hidden size, must exist")


def _check_weight(name: str, weight: Tensor | None, norm: Norm | None, hidden: int) -> None:
    wanted = norm is not None and norm.has_weight
    if (weight is not None) != wanted:
        raise ValueError(f"{name} is {'missing' if wanted else 'given'}, but the norm is {norm}")
    if weight is None:
        return
    if weight.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"{name} has dtype {weight.dtype}; allowed: {', '.join(map(str, ACTIVATION_DTYPES))}")
    if tuple(weight.shape) != (hidden,):
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; it must be [{hidden}], the hidden size")


def _check_quant(quant: Quant, scale: Tensor | None, hidden: int) -> None:
    if hidden % quant.multiple_of:
        raise ValueError(
            f"the hidden size is {hidden}; {quant.scheme} with groups of {quant.group_size} needs a multiple of "
            f"{quant.multiple_of}"
        )
    if (scale is not None) != quant.takes_scale:
        raise ValueError(
            f"{quant.scheme} takes {'a scale' if quant.takes_scale else 'no scale'}; the opposite was given"
        )
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        raise ValueError(
            f"the scale of {quant.scheme} has dtype {scale.dtype} and shape {tuple(scale.shape)}; "
            "it must be one float32 number on the device"
        )


def _check_seam(seam: Seam, operands: Operands) -> None:
    x, residual, scales = operands.x, operands.residual, operands.scales
    _check_activation("x", x)
    if (residual is not None) != seam.residual:
        raise ValueError(f"residual is {'missing' if seam.residual else 'given'}, but the seam is {seam.describe()!r}")
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        raise ValueError(
            f"residual is {residual.dtype} {tuple(residual.shape)}; it must be as x: {x.dtype} {tuple(x.shape)}"
        )
    _check_weight("inner_weight", operands.inner_weight, seam.inner_norm, x.shape[-1])
    _check_weight("weight", operands.weight, seam.norm, x.shape[-1])
    takers = [q for q in seam.quants if q.takes_scale]
    if len(scales) != len(takers):
        raise ValueError(f"{len(scales)} scales were given; the seam's quantisers take {len(takers)}")
    given = iter(scales)
    for quant in seam.quants:
        _check_quant(quant, next(given) if quant.takes_scale else None, x.shape[-1])


def _check_overwrites(seam: Seam, names: Sequence[str]) -> None:
    if "x" in names and seam.reduce is None:
        raise ValueError(f"x is to be overwritten with a sum over the ranks, but the seam is {seam.describe()!r}")
    if "residual" in names and "residual" not in seam.outputs:
        raise ValueError(f"the residual is to be overwritten with the sum, but the seam emits {seam.outputs}")


def _check_overwritten(seam: Seam, operands: Operands) -> None:
    places = {"x": operands.reduced_out, "residual": operands.residual_out}
    overwritten = {name: memory for name, memory in places.items() if memory is not None}
    _check_overwrites(seam, tuple(overwritten))
    for name, memory in overwritten.items():
        if not memory.is_contiguous():
            raise ValueError(
                f"{name} has strides {memory.stride()} for its shape {tuple(memory.shape)}; "
                "it must be contiguous to be overwritten"
            )
    x, residual = operands.x, operands.residual
    if residual is not None and torch._C._is_alias_of(x, residual) and _overlap(x, residual):  # type: ignore[attr-defined]
        raise ValueError("x and the residual lie in the same memory; one of them is to be overwritten: give it its own")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage may have an element in common."""
    starts = [t.storage_offset() for t in (a, b)]
    lasts = [
        t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        for t in (a, b)
    ]
    return a.numel() > 0 and max(starts) <= min(lasts)


# ---- implementations --------------------------------------------------------------------------


def _seam_real(
    x: Tensor,
    residual: Tensor | None,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    scales: list[Tensor],
    seam: str,
) -> list[Tensor]:
    parsed = Seam.from_json(seam)
    operands = Operands(x, residual, inner_weight, weight, tuple(scales))
    _check_seam(parsed, operands)
    return select.run(parsed, operands)


def _seam_fake(
    x: Tensor,
    residual: Tensor | None,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    scales: list[Tensor],
    seam: str,
) -> list[Tensor]:
    parsed = Seam.from_json(seam)
    operands = Operands(x, residual, inner_weight, weight, tuple(scales))
    _check_seam(parsed, operands)
    return empty_outputs(parsed, operands)


def _run(seam: Seam, operands: Operands) -> list[Tensor]:
    return select.run(seam, operands)


def _seam_in_place(
    run: Callable[[Seam, Operands], list[Tensor]],
    overwrites: tuple[str, ...],
    returned: int,
    x: Tensor,
    residual: Tensor | None,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    scales: list[Tensor],
    seam: str,
) -> Tensor | tuple[Tensor, ...]:
    """What `run` gives but for the outputs that have memory: those are found there afterwards."""
    parsed = Seam.from_json(seam)
    reduced_out = x if "x" in overwrites else None
    residual_out = residual if "residual" in overwrites else None
    operands = Operands(x, residual, inner_weight, weight, tuple(scales), reduced_out, residual_out)
    _check_seam(parsed, operands)
    _check_overwritten(parsed, operands)
    places = {"reduced": reduced_out, "residual": residual_out, "norm": None}
    outputs = run(parsed, operands)
    rest: list[Tensor] = []
    for i, output in enumerate(outputs):
        place = places[parsed.outputs[i]] if i < len(parsed.outputs) else None
        if place is None:
            rest.append(output)
        elif output is not place:
            place.copy_(output)
    if len(rest) != returned:
        raise ValueError(f"the seam returns {len(rest)} tensors beside what it overwrites; this overload {returned}")
    return rest[0] if returned == 1 else tuple(rest)


def _quantize_real(y: Tensor, scale: Tensor | None, quant: str) -> list[Tensor]:
    parsed = Quant.from_json(quant)
    _check_activation("y", y)
    _check_quant(parsed, scale, y.shape[-1])
    return local.quantize(y, parsed, scale)


def _quantize_fake(y: Tensor, scale: Tensor | None, quant: str) -> list[Tensor]:
    parsed = Quant.from_json(quant)
    _check_activation("y", y)
    _check_quant(parsed, scale, y.shape[-1])
    return empty_quantized(y, parsed)


def _single(run: Callable[..., list[Tensor]], *args: Tensor | list[Tensor] | str | None) -> Tensor:
    """The only result of `run`."""
    results = run(*args)
    if len(results) != 1:
        raise ValueError(f"{len(results)} tensors are returned; the overload 'single' is for one")
    return results[0]


def _keep_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, always a new tensor. Stands for a cast that a compiler must not fold (see compiler/casts.py)."""
    return x.to(dtype, copy=True)


for _overwrites, _count in _IN_PLACE:
    _name = f"seam_.{_overload(_overwrites, _count)}"
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, functools.partial(_seam_in_place, _run, _overwrites, _count), _key)
    _fake = functools.partial(_seam_in_place, empty_outputs, _overwrites, _count)
    torch.library.register_fake(f"torchseam::{_name}", _fake, lib=_library)
for _key in ("CPU", "CUDA"):
    _library.impl("keep_cast", _keep_cast, _key)
    _library.impl("seam", _seam_real, _key)
    _library.impl("quantize", _quantize_real, _key)
    _library.impl("seam.single", functools.partial(_single, _seam_real), _key)
    _library.impl("quantize.single", functools.partial(_single, _quantize_real), _key)
torch.library.register_fake("torchseam::seam", _seam_fake, lib=_library)
torch.library.register_fake("torchseam::quantize", _quantize_fake, lib=_library)
torch.library.register_fake("torchseam::seam.single", functools.partial(_single, _seam_fake), lib=_library)
torch.library.register_fake("torchseam::quantize.single", functools.partial(_single, _quantize_fake), lib=_library)
torch.library.register_fake("torchseam::keep_cast", _keep_cast, lib=_library)


# ---- for people who call the operators themselves ---------------------------------------------


def seam(
    seam: Seam,
    x: Tensor,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    inner_weight: Tensor | None = None,
    scales: Sequence[Tensor] = (),
    overwrite: Sequence[str] = (),
) -> list[Tensor]:
    """Run one seam.

    Args:
        seam: which parts, with their attributes, and which values to return.
        x: [..., H] bf16, fp16 or fp32; this rank's partial sums when the seam reduces.
        residual: as x, when the seam adds one. Where `seam.reduce.residual_in` is `sharded`, only this rank's rows
            (`torchseam.seam.owned_rows` of all rows of x) are read.
        weight, inner_weight: [H] bf16, fp16 or fp32 (any mixture with x's dtype), norm weights.
        scales: one fp32 number for each quantiser that takes one, in the order of `seam.quants`.
        overwrite: which of `x` and `residual` (both contiguous) need not be kept. The sum over the ranks is made in
            x, without a copy; it is found there when `seam.outputs` has `reduced`, else what is there afterwards is
            undefined. The output `residual` is found in the residual.

    Returns:
        The values named in `seam.outputs` but those found in overwritten arguments, then codes (and scales, where
        the scheme emits them) of each quantiser. No other input is changed, and none is aliased. Where
        `seam.reduce.residual_out` is `sharded`, only this rank's rows of the output `residual` are defined.

    Raises:
        ValueError: an argument does not fit the seam; the message says which and what would.
    """
    arguments = (x, residual, inner_weight, weight, list(scales), seam.to_text())
    if not overwrite:
        return torch.ops.torchseam.seam(*arguments)
    returned = in_place(seam, overwrite)(*arguments)
    return [returned] if isinstance(returned, Tensor) else list(returned)


def returned_beside(seam: Seam, overwrite: Sequence[str]) -> int:
    """How many tensors a seam returns that overwrites these arguments."""
    found = {"x": "reduced", "residual": "residual"}
    kept = set(seam.outputs) - {found[name] for name in overwrite}
    return len(kept) + sum(1 + quant.emits_scale for quant in seam.quants)


def in_place(seam: Seam, overwrite: Sequence[str]) -> torch._ops.OpOverload:
    """The overload of `torchseam::seam_` that runs a seam and overwrites these arguments; ValueError without one."""
    names = tuple(name for name in ("x", "residual") if name in overwrite)
    if isinstance(overwrite, str) or len(names) != len(overwrite) or not names:
        given = overwrite if isinstance(overwrite, str) else tuple(overwrite)
        raise ValueError(f"overwrite is {given!r}; allowed: a list or tuple of 'x', 'residual' or both")
    _check_overwrites(seam, names)
    returned = returned_beside(seam, names)
    if not 1 <= returned <= MAX_RETURNED:
        raise ValueError(f"the seam returns {returned} tensors beside what it overwrites; allowed: 1 to {MAX_RETURNED}")
    overload: torch._ops.OpOverload = getattr(torch.ops.torchseam.seam_, _overload(names, returned))
    return overload


def quantize(y: Tensor, quant: Quant, scale: Tensor | None = None) -> list[Tensor]:
    """Quantise y [..., H] (bf16, fp16, fp32): [codes], or [codes, scales] where the scheme emits scales.

    `scale`: fp32, one element: the scale of static FP8, the global scale of NVFP4 (see `Quant.global_scale`).
    Raises ValueError when y or the scale do not fit the recipe.
    """
    return torch.ops.torchseam.quantize(y, scale, quant.to_text())


dequantize = reference.dequantize
