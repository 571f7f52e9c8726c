"""vLLM's quantisers (`_C::...`), as they stand in its graphs: functional, or an out-variant that
functionalisation wrapped (`auto_functionalized`, version 1 or 2).

Operators are known by name, so vLLM need not be installed. What each computes is read from stored versions of its
CUDA source (csrc/quantization), not run: where it differs from our recipes is said at each reader.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchseam.compiler.dialects.quant_match import QuantMatch, QuantMiss, Unread, rounded
from torchseam.compiler.dialects.views import is_call, last_dim, same_shape, strip, value
from torchseam.formats import layout
from torchseam.formats.fp8 import E4M3_MAX
from torchseam.seam import (
    FP8_GROUP_SIZES,
    NVFP4_BLOCK,
    PACKED_GROUP_SIZE,
    PACKED_SCALE_DTYPE,
    SCALE_FLOORS,
    Quant,
)

_wrappers = torch.ops.higher_order
#: The least scale that `per_token_group_fp8_quant` and `..._packed` round up to a power of two.
_LEAST_ROUNDED_UP = 1e-10


@dataclass(frozen=True)
class Call:
    """One operator: what it was given, by name, and the nodes that hold what it wrote, None where nobody reads.

    `transposed`: arguments that were a transposed view of the buffer whose new value the node is.
    """

    node: Node
    given: dict[str, Any]
    written: dict[str, Node | None]
    buffers: dict[str, Node]
    transposed: frozenset[str] = frozenset()


def called(node: Node) -> tuple[torch._ops.OpOverload | None, bool]:
    """The operator that a node calls, and whether functionalisation wrapped it."""
    wrapped = is_call(node, _wrappers.auto_functionalized, _wrappers.auto_functionalized_v2)
    target = node.args[0] if wrapped else node.target
    return (target if isinstance(target, torch._ops.OpOverload) else None), wrapped


def match_vllm(node: Node) -> QuantMatch | QuantMiss | None:
    """The quantiser that `node`, a call of one of vLLM's operators, is."""
    if node.op != "call_function":
        return None
    target, wrapped = called(node)
    reader = _READERS.get(target.name()) if target is not None else None
    if reader is None:
        return None
    try:
        return reader(unwrap(node, target) if wrapped else _functional(node, target))
    except Unread as why:
        reads: list[Node] = []
        for source in node.all_input_nodes:
            producer, views = strip(source)
            reads += [*reversed(views), producer]
        return QuantMiss(node, str(why), tuple(reads))


def _results(node: Node, names: list[str], first: int) -> dict[str, Node | None]:
    """The nodes that take outputs number `first`, `first + 1`, ... of a call."""
    found: dict[str, Node | None] = dict.fromkeys(names)
    for user in node.users:
        index = user.args[1] - first if is_call(user, operator.getitem) else -1
        if not 0 <= index < len(names) or found[names[index]] is not None:
            raise Unread("an output is read in another way than by its number")
        found[names[index]] = user
    return found


def _functional(node: Node, target: torch._ops.OpOverload) -> Call:
    if target._schema.is_mutable:
        raise Unread(f"{target.name()} writes into its arguments: the graph is not functional")
    names = [a.name for a in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return Call(node, given, _results(node, ["output", "output_scale"], 0), {})


def unwrap(node: Node, target: torch._ops.OpOverload) -> Call:
    """A call of an out-variant or in-place operator that functionalisation wrapped."""
    mutable = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = dict(node.kwargs)
    written = _results(node, mutable, max(1, len(target._schema.returns)))
    if node.target is _wrappers.auto_functionalized:
        return Call(node, given, written, {name: given[name] for name in mutable})
    bases, transposed = given["_all_bases"], []
    buffers = {name: bases[given[f"_{name}_base_index"]] for name in mutable}
    if [given[f"_{name}_base_index"] for name in mutable] != list(range(len(bases))):
        raise Unread("its outputs share a buffer")
    for name, base in buffers.items():
        if f"_{name}_size" in given:
            transposed += [name] if _is_transpose(name, given, base) else []
        if f"_{name}_slice_dim" in given or (f"_{name}_size" in given and name not in transposed):
            raise Unread(f"{name} is a part of a larger buffer")
    return Call(node, given, written, buffers, frozenset(transposed))


def _is_transpose(name: str, given: dict[str, Any], base: Node) -> bool:
    """Whether an argument is the transpose of the whole of a contiguous matrix."""

    def numbers(what: Any) -> list[Any]:
        return [n.meta["val"] if isinstance(n, Node) else n for n in what]

    whole = value(base)
    if whole is None or whole.dim() != 2 or given[f"_{name}_storage_offset"] != 0:
        return False
    rows, columns = whole.shape
    here = (*numbers(given[f"_{name}_size"]), *numbers(given[f"_{name}_stride"]), *whole.stride())
    there = (columns, rows, 1, columns, columns, 1)
    return len(here) == len(there) and all(statically_known_true(a == b) for a, b in zip(here, there, strict=True))


def own_buffers(call: Call) -> tuple[Node, ...]:
    """The buffers of a call, and what they are views of, unless someone else has a use for them."""
    buffers: list[Node] = []
    for reader, buffer in ((call.node, b) for b in call.buffers.values()):
        while buffer.op == "call_function" and set(buffer.users) == {reader}:
            buffers.append(buffer)
            sources = [n for n in buffer.all_input_nodes if value(n) is not None]
            if len(sources) != 1:
                break
            reader, buffer = buffer, sources[0]
    return tuple(buffers)


def _match(call: Call, quant: Quant, scale: Node | None, names: tuple[str, ...]) -> QuantMatch:
    y = call.given["input"]
    results = tuple(call.written[name] for name in names)
    nodes = (*own_buffers(call), call.node, *(r for r in results if r is not None))
    return QuantMatch(quant, y, scale, results, nodes, bool(set(names[1:]) & call.transposed))


def _buffer(call: Call, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The fake tensor of a buffer, which must be of a dtype."""
    val = value(call.buffers[name])
    if val is None or val.dtype is not dtype:
        raise Unread(f"{name} is {None if val is None else val.dtype}, not {dtype}")
    return val


def _codes(call: Call, name: str) -> None:
    """Codes must be e4m3fn in the shape of the input, not a part of something else."""
    if not same_shape(_buffer(call, name, torch.float8_e4m3fn), value(call.given["input"])) or name in call.transposed:
        raise Unread(f"{name} has another shape than the input")


def _static(call: Call) -> QuantMatch:
    """`y * (1 / scale)`."""
    _codes(call, "result")
    group = call.given.get("group_shape")
    if group is not None and list(group) != [-1, -1]:
        raise Unread(f"the scale is one for each group of {list(group)}")
    return _match(call, Quant("fp8_static", rule="reciprocal"), call.given["scale"], ("result",))


def _per_token(call: Call) -> QuantMatch:
    """`max(amax / 448, 1 / (448 * 512))`. Where a row holds NaN, theirs ignores it in amax, and ours does not."""
    _codes(call, "result")
    if call.given.get("scale_ub") is not None:
        raise Unread("the scale is bounded above")
    _buffer(call, "scale", torch.float32)
    floor = SCALE_FLOORS["fp8_token"]
    if last_dim(call.buffers["scale"]) != 1 or "scale" in call.transposed:
        raise Unread("the scales are no column")
    return _match(call, Quant("fp8_token", scale_floor=floor), None, ("result", "scale"))


def _per_group(call: Call) -> QuantMatch:
    """`max(amax, eps) / 448`, perhaps rounded up to a power of two and stored as fp32. NaN as in `_per_token`."""
    ue8m0 = call.given["scale_ue8m0"]
    size, floor = _groups(call, FP8_GROUP_SIZES, ue8m0)
    if value(call.given["input"]).dim() != 2:
        raise Unread("the input is no matrix")
    dtype = "ue8m0_float32" if ue8m0 else "float32"
    scales = _buffer(call, "output_s", torch.float32)
    transposed = "output_s" in call.transposed
    found = "column_major" if transposed else _group_layout(call, scales, dtype, layout.GROUP_SCALE_LAYOUTS[dtype])
    return _match(call, Quant("fp8_group", size, dtype, found, scale_floor=floor), None, ("output_q", "output_s"))


def _per_group_packed(call: Call) -> QuantMatch:
    """`_per_group` rounded up to powers of two, whose exponents go into int32 words. Of an infinite amax theirs is 255.

    The input may have leading dimensions; the scales are one row for each token all the same.
    """
    size, floor = _groups(call, (PACKED_GROUP_SIZE,), True)
    scales = _buffer(call, "output_s_packed", torch.int32)
    transposed = "output_s_packed" in call.transposed
    found = _group_layout(call, scales, PACKED_SCALE_DTYPE, () if transposed else (layout.PACKED,))
    quant = Quant("fp8_group", size, PACKED_SCALE_DTYPE, found, scale_floor=floor)
    return _match(call, quant, None, ("output_q", "output_s_packed"))


def _groups(call: Call, sizes: tuple[int, ...], ue8m0: bool) -> tuple[int, float]:
    """The size of the groups, and the least scale."""
    _codes(call, "output_q")
    given = call.given
    size, hidden = given["group_size"], last_dim(given["input"])
    if (given["fp8_min"], given["fp8_max"]) != (-E4M3_MAX, E4M3_MAX):
        raise Unread(f"the values are clamped to [{given['fp8_min']}, {given['fp8_max']}], not to [-448, 448]")
    if size not in sizes or hidden % size:
        raise Unread(f"rows of {hidden} in groups of {size}")
    floor = rounded(rounded(given["eps"], torch.float32) / E4M3_MAX, torch.float32)
    return size, max(floor, _LEAST_ROUNDED_UP) if ue8m0 else floor


def _group_layout(call: Call, scales: torch.Tensor, dtype: str, names: tuple[str, ...]) -> str:
    """The one of these layouts whose shape and strides the buffer of the scales has."""
    *lead, hidden = value(call.given["input"]).shape
    groups = hidden // call.given["group_size"]
    for name in names:
        shape, strides = layout.group_scale_geometry(math.prod(lead), groups, dtype, name)
        pairs = zip((*shape, *strides), (*scales.shape, *scales.stride()), strict=True) if scales.dim() == 2 else ()
        if scales.dim() == 2 and all(statically_known_true(a == b) for a, b in pairs):
            return name
    raise Unread(f"scales of shape {tuple(scales.shape)} and strides {scales.stride()} are in no layout we know")


def _bytes(call: Call, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, Any]) -> None:
    """An output must be contiguous and have as many bytes a row, in one of the dtypes."""
    node = call.buffers.get(name, call.written[name])
    val = None if node is None else value(node)
    if node is None:  # functional, and nobody reads it
        return
    if val is None or val.dtype not in dtypes or val.dim() != 2 or not val.is_contiguous():
        raise Unread(f"{name} is {None if val is None else val.dtype}, or no contiguous matrix")
    here = (val.shape[0], val.shape[1] * val.dtype.itemsize)
    if not all(statically_known_true(a == b) for a, b in zip(here, shape, strict=True)):
        raise Unread(f"{name} is {tuple(val.shape)}, not {shape} bytes")


def _nvfp4(call: Call) -> QuantMatch:
    """NVFP4; theirs takes approximate reciprocals (cvt_warp_fp16_to_fp4), ours exact ones."""
    val = value(call.given["input"])
    if call.transposed or val.dim() != 2 or last_dim(call.given["input"]) % NVFP4_BLOCK:
        raise Unread("the input is no matrix of whole blocks, or its outputs are views")
    tokens, hidden = val.shape
    scale_layout = "swizzled" if call.given["is_sf_swizzled_layout"] else "linear"
    columns = hidden // NVFP4_BLOCK
    shape = layout.swizzled_shape(tokens, columns) if scale_layout == "swizzled" else (tokens, columns)
    _bytes(call, "output", (torch.uint8,), (tokens, hidden // 2))
    _bytes(call, "output_scale", (torch.uint8, torch.int32, torch.float8_e4m3fn), shape)
    quant = Quant("nvfp4", scale_layout=scale_layout)
    return _match(call, quant, call.given["input_scale"], ("output", "output_scale"))


_READERS: dict[str, Callable[[Call], QuantMatch]] = {
    "_C::static_scaled_fp8_quant": _static,
    "_C::dynamic_per_token_scaled_fp8_quant": _per_token,
    "_C::per_token_group_fp8_quant": _per_group,
    "_C::per_token_group_fp8_quant_packed": _per_group_packed,
    "_C::scaled_fp4_quant": _nvfp4,
    "_C::scaled_fp4_quant.out": _nvfp4,
}
