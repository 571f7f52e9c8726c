"""torchao's NVFP4 quantiser in plain torch (`NVFP4Tensor.to_nvfp4`, `nvfp4_quantize`), some 60 nodes of a graph.

The pattern is what the torchao of this process makes of the sizes in question, traced when a graph packs 4-bit
codes: none of its nodes is copied here, and a torchao that computes something else is not taken for this one.
Which recipe it is, `formats.nvfp4` says (`decode` with a per-tensor scale, `none` without).
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import Node

from torchseam.compiler.dialects.quant_match import QuantMatch, QuantMiss, Unread
from torchseam.compiler.dialects.traced import Pattern, Walk, trace
from torchseam.compiler.dialects.views import aten, convert, is_call, is_reshape, last_dim, value
from torchseam.formats import nvfp4
from torchseam.seam import NVFP4_BLOCK, SCALE_LAYOUTS, Quant

_MODULE = "torchao.prototype.mx_formats.nvfp4_tensor"
_STEPS = (aten.amax.default, aten.slice.Tensor, aten.view.dtype, aten.unsqueeze.default, aten.clone.default)
_NARROW = (torch.bfloat16, torch.float16)
#: How far up from packed codes the norm is looked for: torchao 0.18 takes 60 nodes.
_MOST_NODES = 128


@dataclass(frozen=True)
class _Subject:
    """What a pattern is traced for: values of `shape` and a per-tensor scale of `scale_shape`, or none."""

    mode: FakeTensorMode
    device: torch.device
    text: str
    swizzled: bool
    scale_shape: tuple[int, ...] | None
    shape: tuple[Any, ...] = field(compare=False)  # may be symbolic: `text` stands for it


@functools.lru_cache(maxsize=32)
def _pattern(subject: _Subject) -> Pattern | None:
    """torchao's quantiser as a pattern; None where torchao refuses the shape."""
    torchao = sys.modules[_MODULE]
    with subject.mode:
        fakes = [torch.empty(subject.shape, device=subject.device)]
        if subject.scale_shape is not None:
            fakes.append(torch.empty(subject.scale_shape, device=subject.device))

    def scaled(y: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        made = torchao.NVFP4Tensor.to_nvfp4(y, per_tensor_scale=scale, is_swizzled_scales=subject.swizzled)
        return made.qdata, made.scale

    def unscaled(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scaled(y, None)

    try:
        return trace(unscaled if subject.scale_shape is None else scaled, subject.mode, *fakes)
    except (AssertionError, RuntimeError):  # such as a batch whose rows fill no whole tiles, swizzled
        return None


@functools.lru_cache(maxsize=1)
def _computes_as_ours() -> bool:
    """Whether the torchao of this process gives the bits of `formats.nvfp4`, for blocks of every magnitude.

    The pattern says only that a graph holds torchao's quantiser; another release may have another recipe.
    """
    torchao = sys.modules[_MODULE]
    with unset_fake_temporarily(), torch.no_grad():
        largest = torch.arange(2**15, dtype=torch.int16, device="cpu").view(torch.bfloat16).float()
        blocks = largest[:, None] * torch.linspace(-1, 1, NVFP4_BLOCK, device="cpu")
        y = blocks.reshape(-1, 4 * NVFP4_BLOCK)
        for number in (None, 1.0, 0.003):
            scale = None if number is None else torch.tensor(number, device="cpu")
            kind = "none" if scale is None else "decode"
            for layout in SCALE_LAYOUTS["nvfp4"]:
                ours = nvfp4.quantize(y, scale, layout, kind)
                made = torchao.NVFP4Tensor.to_nvfp4(y, per_tensor_scale=scale, is_swizzled_scales=layout == "swizzled")
                for a, b in zip(ours, (made.qdata, made.scale), strict=True):
                    if not torch.equal(a.view(torch.uint8).flatten(), b.view(torch.uint8).flatten()):
                        return False
    return True


@functools.lru_cache(maxsize=1)
def _small_mode() -> FakeTensorMode:
    return FakeTensorMode()


def _small(scaled: bool) -> Pattern:
    """The pattern for some small matrix: what a graph is compared with before its own sizes are traced."""
    shape = (2, 2 * NVFP4_BLOCK)
    pattern = _pattern(_Subject(_small_mode(), torch.device("cpu"), str(shape), False, () if scaled else None, shape))
    if pattern is None:
        raise Unread("the installed torchao does not quantise a small matrix, so its quantiser is unknown")
    return pattern


def _packs_nibbles(node: Node) -> bool:
    """Whether a node puts two 4-bit codes into a byte."""
    val = value(node)
    if val is None or val.dtype is not torch.uint8 or not is_call(node, aten.bitwise_or.Tensor):
        return False
    return any(is_call(n, aten.__lshift__.Scalar) and n.args[1] == 4 for n in node.args)


def match_torchao_nvfp4(node: Node) -> QuantMatch | QuantMiss | None:
    """The quantiser whose codes `node` packs; None when it packs none."""
    if not _packs_nibbles(node):
        return None
    try:
        return _read(node)
    except Unread as why:
        above = [node]
        for current in above:
            if len(above) < _MOST_NODES and _is_step(current):
                above += [n for n in current.all_input_nodes if n not in above]
        return QuantMiss(node, str(why), tuple(above[1:]))


def _is_step(node: Node) -> bool:
    """Whether a node may be a part of a quantiser: of no product of matrices, mean or collective."""
    elementwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return elementwise or is_reshape(node) or is_call(node, convert, *_STEPS)


def _read(packed: Node) -> QuantMatch:
    if _MODULE not in sys.modules:
        raise Unread("4-bit codes are packed by something else than torchao, which is not imported")
    if not _computes_as_ours():
        raise Unread("the installed torchao computes NVFP4 by another recipe")
    views = [user for user in packed.users if is_reshape(user)]
    if len(packed.users) != 1 or not views:
        raise Unread("packed codes are not put into rows once")
    scale_shape = _scale_shape(packed)
    codes = views[0]
    if not isinstance(last_dim(codes), int):
        raise Unread("the hidden size is symbolic")
    for swizzled in (True, False):
        pattern = _pattern_for(codes, swizzled, scale_shape)
        walk = Walk()
        if pattern is None or not walk.up(codes, pattern.outputs[0]):
            continue
        scales = walk.down(pattern.outputs[1])
        if scales is not None or not swizzled:
            return _match(pattern, walk, codes, scales, swizzled)
    raise Unread("4-bit codes are packed in another way than the installed torchao packs them")


def _scale_shape(packed: Node) -> tuple[int, ...] | None:
    """The shape of the per-tensor scale, None without one; Unread when it is no quantiser of torchao's."""
    for scaled in (True, False):
        walk, pattern = Walk(sizes=False), _small(scaled)
        if not walk.up(packed, pattern.outputs[0]):
            continue
        if not scaled:
            return None
        val = value(walk.bound[pattern.inputs[1]])
        if val is None or val.dtype is not torch.float32 or not all(size == 1 for size in val.shape):
            raise Unread("the per-tensor scale is no single float32 number")
        return tuple(val.shape)
    raise Unread("4-bit codes are made in another way than the installed torchao makes them")


def _pattern_for(codes: Node, swizzled: bool, scale_shape: tuple[int, ...] | None) -> Pattern | None:
    val = value(codes)
    shape = (*val.shape[:-1], val.shape[-1] * 2)
    if len(shape) not in (2, 3):
        raise Unread(f"codes have {len(shape)} dimensions")
    return _pattern(_Subject(val.fake_mode, val.device, str(shape), swizzled, scale_shape, shape))


def _match(pattern: Pattern, walk: Walk, codes: Node, scales: Node | None, swizzled: bool) -> QuantMatch:
    y, *given = (walk.bound[node] for node in pattern.inputs)
    nodes = list(walk.nodes)
    if is_call(y, convert) and value(y.args[0]).dtype in _NARROW:  # a widening cast keeps every value
        nodes.append(y)
        y = y.args[0]
    layout, kind = "swizzled" if swizzled else "linear", "decode" if given else "none"
    quant = Quant("nvfp4", scale_layout=layout, global_scale=kind)
    nodes = [n for n in dict.fromkeys(nodes) if n is not y and n not in given]
    return QuantMatch(quant, y, given[0] if given else None, (codes, scales), tuple(nodes))
