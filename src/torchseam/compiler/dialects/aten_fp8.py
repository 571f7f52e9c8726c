"""FP8 (e4m3fn) in plain aten: static, per token and per group, as users and torchao write it.

Read upwards from the cast to codes: a clamp to +-448, the quotient of the values and a scale, and, unless
the scale is one number from elsewhere, the steps that make it of amax(|values|). Rule, floor, group size and
rounding are read from those steps; whatever no `Quant` can say bit for bit is a `QuantMiss`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchseam.compiler.dialects.quant_match import QuantMatch, QuantMiss, Unread, rounded
from torchseam.compiler.dialects.views import RESHAPES, aten, convert, is_call, last_dim, same_shape, value
from torchseam.formats.fp8 import E4M3_MAX
from torchseam.seam import FP8_GROUP_SIZES, Quant, Rule, ScaleRounding, ScaleRule

_NARROW = (torch.bfloat16, torch.float16)
_FLOATS = (*_NARROW, torch.float32)
#: What the arithmetic of a quantiser consists of: how far up an unreadable one is followed.
_ARITHMETIC = (
    *RESHAPES,
    convert,
    operator.getitem,
    *(getattr(aten, name).default for name in ("abs", "amax", "clamp", "clamp_min", "clamp_max", "maximum")),
    *(aten.reciprocal.default, aten.div.Tensor, aten.mul.Tensor, aten.max.dim),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.clone.default),
)
_MOST_NODES = 64


_RECIPROCAL_OF_MAX = rounded(1.0 / E4M3_MAX, torch.float32)


@dataclass
class _Reading:
    """What has been read so far: all nodes on the way, in no order."""

    nodes: list[Node] = field(default_factory=list)

    def take(self, node: Node) -> Any:
        """Note a node; its first argument."""
        self.nodes.append(node)
        return node.args[0]


def match_aten_fp8(node: Node) -> QuantMatch | QuantMiss | None:
    """The quantiser whose codes are `node`, a cast to float8_e4m3fn; None when `node` is no such cast."""
    if not is_call(node, convert) or node.args[1] is not torch.float8_e4m3fn:
        return None
    try:
        return _read(node)
    except Unread as why:
        return QuantMiss(node, str(why), _above(node))


def _above(node: Node) -> tuple[Node, ...]:
    """What a node is computed from by arithmetic alone, nearest first."""
    seen = [node]
    for current in seen:
        if is_call(current, *_ARITHMETIC) and len(seen) < _MOST_NODES:
            seen += [n for n in current.all_input_nodes if n not in seen]
    return tuple(seen[1:])


def _read(cast: Node) -> QuantMatch:
    reading = _Reading()
    quotient = _unclamp(reading.take(cast), reading)
    val = _value(quotient)
    if val.dtype is not torch.float32:
        raise Unread(f"the quotient is taken in {val.dtype}, not in float32")
    if not is_call(quotient, aten.div.Tensor, aten.mul.Tensor) or quotient.kwargs or len(quotient.args) != 2:
        raise Unread(f"the clamped values are no quotient ({quotient.target})")
    reading.nodes.append(quotient)
    wide, scale = quotient.args
    if is_call(quotient, aten.mul.Tensor) and not _spans(wide, val):
        wide, scale = scale, wide
    if not isinstance(wide, Node) or not isinstance(scale, Node) or not _spans(wide, val) or _spans(scale, val):
        raise Unread("values and scale cannot be told apart")
    rule: Rule = "divide"
    if is_call(quotient, aten.mul.Tensor):
        rule, scale = _unreciprocal(scale, reading)
    y, group = _climb(wide, reading)
    if _is_one_number(scale) and not _comes_from(scale, y):
        if group:
            raise Unread("one scale is given for all groups")
        return QuantMatch(Quant("fp8_static", rule=rule), y, scale, (cast,), tuple(reading.nodes))
    try:
        floor, scale_rule, rounding, result = _read_scale(scale, y, group, reading)
    except Unread:
        if not _is_one_number(scale) or group:
            raise
        # One number, and not a scale of this row: a static scale that is computed from the values.
        return QuantMatch(Quant("fp8_static", rule=rule), y, scale, (cast,), tuple(reading.nodes))
    if rule == "multiply":
        raise Unread("the values are multiplied by the scale of their amax")
    how: dict[str, Any] = {"scale_floor": floor, "scale_rule": scale_rule, "scale_rounding": rounding}
    if not group:
        return QuantMatch(Quant("fp8_token", rule=rule, **how), y, None, (cast, result), tuple(reading.nodes))
    codes = _only_view(cast, last_dim(y))
    reading.nodes.append(codes)
    return QuantMatch(Quant("fp8_group", group, rule=rule, **how), y, None, (codes, result), tuple(reading.nodes))


def _value(node: Any) -> torch.Tensor:
    val = value(node) if isinstance(node, Node) else None
    if val is None:
        raise Unread(f"{node} is no tensor of this graph")
    return val


def _spans(node: Any, like: torch.Tensor) -> bool:
    """Whether a node has the shape of the whole quotient."""
    val = value(node) if isinstance(node, Node) else None
    return val is not None and same_shape(val, like)


def _is_one_number(node: Node) -> bool:
    return all(statically_known_true(size == 1) for size in _value(node).shape)


def _comes_from(scale: Node, y: Node) -> bool:
    return y in _above(scale)


# ---- codes and quotient -------------------------------------------------------------------------


def _unclamp(node: Node, reading: _Reading) -> Node:
    """What is clamped to +-448 above `node`, in one node or two."""
    bounds: dict[str, float] = {}
    while is_call(node, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default):
        if node.kwargs:
            raise Unread(f"the clamp has keywords {list(node.kwargs)}")
        names = ("high",) if node.target is aten.clamp_max.default else ("low", "high")
        for name, bound in zip(names, node.args[1:], strict=False):
            if bound is not None and bounds.setdefault(name, bound) is not bound:
                raise Unread("the values are clamped twice")
        node = reading.take(node)
    low, high = bounds.get("low"), bounds.get("high")
    if (low, high) != (-E4M3_MAX, E4M3_MAX):
        raise Unread(f"the values are clamped to [{low}, {high}], not to [-448, 448]")
    return node


def _unreciprocal(scale: Node, reading: _Reading) -> tuple[Rule, Node]:
    """(rule, scale) of `values * scale`, where the scale may be `reciprocal(s)` or `1.0 / s`."""
    outer: list[Node] = []
    node: Any = scale
    while True:
        if is_call(node, aten.reciprocal.default):
            reading.nodes += [*outer, node]
            return "reciprocal", node.args[0]
        if (is_call(node, aten.mul.Tensor) and node.args[1] == 1) or _keeps_numbers(node):
            outer.append(node)
            node = node.args[0]
        else:
            return "multiply", scale


def _climb(node: Node, reading: _Reading, until: Node | None = None) -> tuple[Node, int]:
    """(y, group size or 0) of values in float32: up through a widening cast and a cut into groups.

    With `until` the way goes up to that node, and may lead through one `abs`.
    """
    group, seen_abs = 0, until is None
    while node is not until:
        if is_call(node, convert) and node.args[1] is torch.float32 and _value(node.args[0]).dtype in _NARROW:
            node = reading.take(node)
        elif not group and (size := _group_of(node)):
            group = size
            node = reading.take(node)
        elif is_call(node, aten.clone.default):  # `.contiguous()`, and functionalisation: the same numbers
            node = reading.take(node)
        elif is_call(node, aten.abs.default) and not seen_abs:
            seen_abs = True
            node = reading.take(node)
        elif until is not None and is_call(node, *RESHAPES) and same_shape(_value(node), _value(node.args[0])):
            node = reading.take(node)
        elif until is None:
            break
        else:
            raise Unread("the scale is not made of the values that it scales")
    if not seen_abs:
        raise Unread("the scale is made of a maximum without abs")
    if _value(node).dtype not in _FLOATS:
        raise Unread(f"the values are {_value(node).dtype}")
    return node, group


def _group_of(node: Node) -> int:
    """The group size when `node` cuts rows [.., H] into [.., H / group, group] or [all groups, group], else 0."""
    if not is_call(node, *RESHAPES):
        return 0
    here, below = _value(node), _value(node.args[0])
    size, hidden = here.shape[-1] if here.dim() else None, last_dim(node.args[0])
    if size not in FP8_GROUP_SIZES or not isinstance(hidden, int) or hidden % size:
        return 0
    if here.dim() == 2 and below.dim() > 1 and hidden > size:  # one view that flattens, too; the sizes say the rest
        return size
    if here.dim() != below.dim() + 1:
        return 0
    cut = (*below.shape[:-1], hidden // size, size)
    return size if all(statically_known_true(a == b) for a, b in zip(here.shape, cut, strict=True)) else 0


def _only_view(node: Node, hidden: Any) -> Node:
    """The one reader of codes in groups: the view that puts the rows together again."""
    readers = list(node.users)
    if len(readers) == 1 and is_call(readers[0], *RESHAPES) and last_dim(readers[0]) == hidden:
        return readers[0]
    raise Unread(f"the groups of codes are not put back to rows of {hidden}")


# ---- the scale ----------------------------------------------------------------------------------


def _read_scale(scale: Node, y: Node, group: int, reading: _Reading) -> tuple[float, ScaleRule, ScaleRounding, Node]:
    """(floor, scale rule, scale rounding, the node whose value is the scale) of a scale made of amax(|y|)."""
    steps: list[Node] = []
    node: Any = scale
    while not _is_row_maximum(node):
        if not is_call(node, *_SCALE_STEPS) and not _keeps_numbers(node):
            raise Unread(f"the scale is not made of amax alone ({getattr(node, 'target', node)})")
        steps.append(node)
        node = _operand(node)
    maximum = reading.take(node)
    if is_call(node, operator.getitem):
        maximum = reading.take(maximum)
    reading.nodes += steps
    above = _Reading()
    if _climb(maximum, above, until=y)[1] != group:
        raise Unread("the scale is made over other groups than it scales")
    reading.nodes += above.nodes
    return _run(steps[::-1], node, y)


def _run(steps: list[Node], maximum: Node, y: Node) -> tuple[float, ScaleRule, ScaleRounding, Node]:
    """Follow amax through the steps: each is monotone, so a floor becomes what the steps below make of it."""
    floor: float | None = None
    scale_rule: ScaleRule | None = None
    rounding: ScaleRounding = "none"
    result, dtype = maximum, _value(maximum).dtype
    for step in steps:
        if _keeps_numbers(step):
            continue
        if floor is not None:
            floor = rounded(floor, dtype)
        result = step
        if is_call(step, convert):
            if step.args[1] is not torch.float32 and (scale_rule is not None or step.args[1] is not _value(y).dtype):
                raise Unread(f"the scale is rounded to {step.args[1]}")
            dtype = step.args[1]
        elif is_call(step, aten.div.Tensor, aten.mul.Tensor):
            if scale_rule is not None:
                raise Unread("amax is divided twice")
            scale_rule = _division(step)
            rounding = "none" if dtype is torch.float32 else "activation"
            if floor is not None:
                # In fp64, then fp32: 53 bits are so many that the second rounding is the only one that shows.
                floor = floor / E4M3_MAX if scale_rule == "divide" else floor * _RECIPROCAL_OF_MAX
                floor = rounded(floor, torch.float32)
                floor = rounded(floor, dtype)
        elif floor is not None:
            raise Unread("the scale has two floors")
        else:
            floor = _floor_of(step)
        if _value(step).dtype is not dtype:
            raise Unread(f"a step of the scale changes its dtype to {_value(step).dtype}")
    if scale_rule is None:
        raise Unread("amax is not divided by 448")
    if dtype is not torch.float32:
        raise Unread(f"the scale is {dtype}, not float32")
    if floor == float("inf"):
        raise Unread("the floor of the scale is infinite")
    return floor or 0.0, scale_rule, rounding, result


_SCALE_STEPS = (
    convert,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.maximum.default,
)


def _operand(step: Node) -> Any:
    """The operand of a step of the scale that is not a constant."""
    if is_call(step, aten.mul.Tensor, aten.maximum.default) and _number(step.args[0]) is not None:
        return step.args[1]
    return step.args[0]


def _number(arg: Any) -> float | None:
    """A constant of the graph: a number, or a tensor that is filled with one."""
    if isinstance(arg, (int, float)) and not isinstance(arg, bool):
        return float(arg)
    if is_call(arg, aten.full.default) and isinstance(arg.args[1], (int, float)) and _is_one_number(arg):
        # In its own dtype: 1e-12 filled into bf16 is another number.
        dtype, number = _value(arg).dtype, float(arg.args[1])
        return rounded(number, dtype) if dtype in _FLOATS and number >= 0 else None
    return None


def _division(step: Node) -> ScaleRule:
    """How a step forms amax / 448, on the device it runs on."""
    if is_call(step, aten.mul.Tensor):
        number = _number(_constant(step))
        if number is None or not number >= 0 or rounded(number, torch.float32) != _RECIPROCAL_OF_MAX:
            raise Unread(f"amax is multiplied by {number}, not by 1/448")
        return "reciprocal"
    divisor = step.args[1]
    if _number(divisor) != E4M3_MAX or step.kwargs:
        raise Unread(f"amax is divided by {divisor}, not by 448")
    device = _value(step).device.type
    on_host = not isinstance(divisor, Node) or _value(divisor).device.type == "cpu"
    # aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu: a number, or a tensor on the host, is inverted first.
    return "reciprocal" if on_host and device != "cpu" else "divide"


def _constant(step: Node) -> Any:
    return step.args[1] if _operand(step) is step.args[0] else step.args[0]


def _floor_of(step: Node) -> float:
    low: Any = None
    if is_call(step, aten.maximum.default):
        low = _number(_constant(step))
    elif len(step.args) == 2:  # a clamp with an upper bound has three
        low = _number(step.args[1])
    if low is None or not 0 <= low < float("inf") or step.kwargs:
        raise Unread("the scale is bounded by something else than a constant floor >= 0")
    return low


def _keeps_numbers(node: Any) -> bool:
    """Whether a node only adds or removes a last dimension of 1, reshapes to the shape it has, or copies."""
    if not is_call(node, *RESHAPES, aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims):
        return False
    here, below = _value(node), _value(node.args[0])
    shorter, longer = sorted((here.shape, below.shape), key=len)
    if len(longer) - len(shorter) > 1 or (len(longer) > len(shorter) and not statically_known_true(longer[-1] == 1)):
        return False
    return all(statically_known_true(a == b) for a, b in zip(shorter, longer[: len(shorter)], strict=True))


def _is_row_maximum(node: Any) -> bool:
    """Whether a node is the maximum over the last dimension alone."""
    if is_call(node, operator.getitem) and node.args[1] == 0 and is_call(node.args[0], aten.max.dim):
        source, dims = node.args[0].args[0], [node.args[0].args[1]]
    elif is_call(node, aten.amax.default):
        source, dims = node.args[0], node.args[1] if len(node.args) > 1 else []
    else:
        return False
    return [d % _value(source).dim() for d in dims] == [_value(source).dim() - 1]
