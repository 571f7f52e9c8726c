"""Results against the reference, as far as the numerics contract (docs/design.md) lets them differ.

Each part is held to what the part before it really gave, so that a step in one is not counted again in the next.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchseam import reference
from torchseam.formats import layout, nvfp4
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs
from torchseam.seam import Quant, Seam

#: Of the codes and scales of a quantiser that reads a norm which is no output, and may be an ulp away, such a share may
#: be a step away: of our kernels, and of others, whose rounding nobody has measured here. Moving the reference's row
#: reduction by an ulp of fp32 moves 1 norm in 70,000, 1 code in 700,000 and no scale (2026-12-04, 1000 x 4096, bf16).
_MOVED, _MOVED_BY_OTHERS = 0.001, 0.02
#: So many always: a short row has few codes.
_MOVED_AT_LEAST = 2


def differences(
    seam: Seam,
    given: Operands,
    got: list[Tensor],
    all_reduce: Callable[[Tensor], Tensor],
    *,
    exact_sum: bool,
    own: bool,
) -> list[str]:
    """What is further from the reference than allowed; [] when nothing is.

    `all_reduce` gives the sum over the ranks, called once on every rank; without `exact_sum` a sum may be rounded the
    other way, since others add in other orders. own: the kernels are ours, which quantise the rounded norm bit for bit;
    others are only held to a step.
    """
    reduced = given.x if seam.reduce is None else all_reduce(given.x)
    values = dict(zip(seam.outputs, got, strict=False))
    found: list[str] = []
    for name, value, made in zip(seam.outputs, got, empty_outputs(seam, given), strict=False):
        if (value.dtype, value.shape) != (made.dtype, made.shape):
            found.append(f"{name} is {value.dtype} {tuple(value.shape)}, not {made.dtype} {tuple(made.shape)}")
    if found:
        return found
    allowed = [reduced] if exact_sum or seam.reduce is None else _neighbours(reduced)
    if "reduced" in values:
        found += _among("reduced", values["reduced"], allowed)
        allowed = [values["reduced"]]
    if seam.residual:
        assert given.residual is not None
        residual = given.residual.float()
        allowed = [(_inner(seam, given, total).float() + residual).to(total.dtype) for total in allowed]
    h = allowed[0]
    if "residual" in values:
        found += _among("residual", values["residual"], allowed)
        h = values["residual"]
    norm = reference.rms_norm(h, given.weight, seam.norm)
    exact = own and "norm" in values
    if "norm" in values:
        off = steps(values["norm"], norm)
        if int(off.max()) > 1:
            found.append(f"norm: {int((off > 1).sum())} values are more than 1 ulp off")
        norm = values["norm"]
    rest, scales = iter(got[len(seam.outputs) :]), iter(given.scales)
    for quant in seam.quants:
        codes = [next(rest) for _ in range(1 + quant.emits_scale)]
        scale = next(scales) if quant.takes_scale else None
        expected = reference.quantize(norm, quant, scale)
        found += [f"{quant.scheme} {f}" for f in _quantized(codes, expected, quant, exact, own)]
    return found


def _inner(seam: Seam, given: Operands, total: Tensor) -> Tensor:
    if seam.inner_norm is None:
        return total
    return reference.rms_norm(total, given.inner_weight, seam.inner_norm).to(total.dtype)


def _neighbours(x: Tensor) -> list[Tensor]:
    """x, and the numbers of its dtype on either side of each."""
    bits = x.view({2: torch.int16, 4: torch.int32}[x.itemsize])
    return [x, (bits + 1).view(x.dtype), (bits - 1).view(x.dtype)]


def _among(name: str, value: Tensor, allowed: list[Tensor]) -> list[str]:
    right = torch.zeros_like(value, dtype=torch.bool)
    for other in allowed:
        right |= value == other
    wrong = int((~right).sum())
    return [f"{name}: {wrong} of {value.numel()} values are wrong"] if wrong else []


def steps(a: Tensor, b: Tensor) -> Tensor:
    """How many numbers of their format lie between a and b, of 8, 16 or 32 bits; -0 and 0 are one number."""

    def place(t: Tensor) -> Tensor:
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[t.itemsize]
        bits = t.contiguous().view(integers).long()
        least = -(2 ** (8 * t.itemsize - 1))
        return torch.where(bits < 0, least - bits, bits)

    return (place(a) - place(b)).abs()


def storage(t: Tensor) -> Tensor:
    """All bytes behind t, those of padding too."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _quantized(got: list[Tensor], expected: list[Tensor], quant: Quant, exact: bool, own: bool) -> list[str]:
    for what, ours, theirs in zip(("codes", "scales"), got, expected, strict=False):
        told = [f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}" for t in (ours, theirs)]
        if told[0] != told[1]:
            return [f"{what} are {told[0]}, not {told[1]}"]
    if exact:
        pairs = zip(("codes", "scales"), got, expected, strict=False)
        return [f"{what} differ" for what, a, b in pairs if not torch.equal(storage(a), storage(b))]
    off = _code_steps(got[0], expected[0], quant)
    moved = _MOVED if own else _MOVED_BY_OTHERS
    found = []
    if quant.emits_scale:
        rows = [_rows_of_scales(pair[1], quant, off) for pair in (got, expected)]
        if not torch.equal(storage(got[1]), storage(_laid_out(rows[0], quant))):
            found.append("scales: padding is not 0")
        if "ue8m0" in quant.scale_dtype:
            apart = (_exponents(rows[0]) - _exponents(rows[1])).abs()
            if int(apart.max()) > 1 or _too_many(apart, moved):
                found.append(f"scales: {_count(apart)} differ, by up to a factor of 2^{int(apart.max())}")
            # A scale that doubles halves its codes.
            off = torch.where((apart > 0).repeat_interleave(quant.group_size, dim=1), 0, off)
        else:
            # An e4m3 scale may move by a step, an fp32 one by the ulp of the activation that its amax is.
            apart = steps(*rows)
            if int(apart.max()) > (1 if rows[0].itemsize == 1 else 2**16):
                found.append(f"scales: {_count(apart)} differ, by up to {int(apart.max())} steps")
    if int(off.max()) > 1 or _too_many(off, moved):
        found.append(f"codes: {_count(off)} differ, by up to {int(off.max())} steps")
    return found


def _too_many(apart: Tensor, share: float) -> bool:
    return int((apart > 0).sum()) > max(_MOVED_AT_LEAST, share * apart.numel())


def _count(apart: Tensor) -> str:
    return f"{int((apart > 0).sum())} of {apart.numel()}"


def _code_steps(got: Tensor, expected: Tensor, quant: Quant) -> Tensor:
    """[T, H]."""
    if quant.scheme != "nvfp4":
        return steps(got, expected).flatten(0, -2)
    magnitudes = [nvfp4.unpack(c).flatten(0, -2).int() for c in (got, expected)]
    signed = [torch.where(c > 7, 8 - c, c) for c in magnitudes]
    return (signed[0] - signed[1]).abs()


def _rows_of_scales(scales: Tensor, quant: Quant, codes: Tensor) -> Tensor:
    """The scales of codes [T, H] without their layout, [T, G]."""
    tokens, hidden = codes.shape
    groups = hidden // quant.multiple_of if quant.group_size else 1
    if quant.scale_layout == "swizzled":
        return layout.unswizzle(scales, tokens, groups)
    if quant.scale_layout == layout.PACKED:
        return layout.unpack_group_scales(scales, groups)
    return scales.reshape(tokens, groups).contiguous()


def _laid_out(rows: Tensor, quant: Quant) -> Tensor:
    """The inverse of `_rows_of_scales`, with padding of 0."""
    if quant.scale_layout == "swizzled":
        return layout.swizzle(rows)
    if quant.scheme == "fp8_group":
        return layout.lay_out_group_scales(rows, quant.scale_dtype, quant.scale_layout)
    return rows


def _exponents(scales: Tensor) -> Tensor:
    """Of powers of two, fp32 or e8m0."""
    if scales.itemsize == 1:
        return scales.view(torch.uint8).int()
    return scales.view(torch.int32) >> 23
