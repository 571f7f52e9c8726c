"""RMSNorm as plain aten: Hugging Face Llama's and Gemma's spellings, nn.RMSNorm / F.rms_norm.

The match starts at the reciprocal square root, the one node that every spelling has, and reads the
rest off its surroundings: epsilon and weight are attributes of the match, never listed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torchseam.compiler.dialects.norm_match import NormMatch, NormMiss
from torchseam.compiler.dialects.views import aten, convert, is_call, last_dim, value
from torchseam.compiler.dialects.vllm_norms import match_vllm_norm
from torchseam.seam import Norm, WeightMode


def match_norm(node: Node) -> NormMatch | NormMiss | None:
    """The RMSNorm whose middle (a square root or its reciprocal) or operator `node` is; None when it is neither."""
    return _match_aten(node) if _is_rsqrt(node) or _is_divisor(node) else match_vllm_norm(node)


def _is_rsqrt(node: Node) -> bool:
    if node.op != "call_function":
        return False
    inverse = bool(node.target is aten.pow.Tensor_Scalar and node.args[1] == -0.5)
    return node.target is aten.rsqrt.default or inverse or _root_below(node) is not None


def _root_below(node: Node) -> Node | None:
    """The square root that `node` is the reciprocal of, None when it is none."""
    root: Any = node.args[0] if is_call(node, aten.reciprocal.default) else None
    return root if _is_root(root) else None


def _is_root(node: Any) -> bool:
    power = is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 0.5
    return power or is_call(node, aten.sqrt.default)


def _is_divisor(node: Node) -> bool:
    """Whether `node` is a square root by which something is divided."""
    return _is_root(node) and any(is_call(u, aten.div.Tensor) and u.args[1] is node for u in node.users)


def _divides(root: Node, wide: Node) -> bool:
    """Whether a root divides the values that were squared, or those that they are a part of."""
    dividends = [user.args[0] for user in root.users if is_call(user, aten.div.Tensor) and user.args[1] is root]
    return _slices(wide) or any(_same(dividend, wide) for dividend in dividends)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(node: Node, known: Node) -> Any:
    """The operand of a binary node that is not `known`."""
    a, b = node.args[:2]
    return b if a is known else a


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes are one value: the same node, or the same cast written twice (`x.float()`)."""
    return a is b or (is_call(a, convert) and is_call(b, convert) and a.args == b.args)


def _match_aten(rsqrt: Node) -> NormMatch | NormMiss | None:
    """The RMSNorm around a reciprocal square root; None when it is no mean of squares at all."""
    root = _root_below(rsqrt)
    below: tuple[Node, ...] = ()
    with_eps = (rsqrt if root is None else root).args[0]
    if root is not None:
        below = (root, rsqrt)
        user = _only_user(rsqrt)
        if is_call(user, aten.mul.Tensor) and user.args[1] == 1:  # `1.0 / sqrt(x)` is `reciprocal * 1.0`
            rsqrt = user
    if not is_call(with_eps, aten.add.Tensor, aten.add.Scalar) or with_eps.kwargs:
        return None
    mean, eps = with_eps.args[:2]
    if is_call(eps, aten.mean.dim):
        mean, eps = eps, mean
    spread: list[Node] = []
    if is_call(mean, aten.unsqueeze.default):
        spread.append(mean)
        mean = mean.args[0]
    if not is_call(mean, aten.mean.dim):
        return None
    squares = mean.args[0]
    power = is_call(squares, aten.pow.Tensor_Scalar) and squares.args[1] == 2
    product = is_call(squares, aten.mul.Tensor) and _same(squares.args[0], squares.args[1])
    if not power and not product:
        return None
    wide = squares.args[0]
    val = value(wide)
    if val is None or (_is_divisor(rsqrt) and not _divides(rsqrt, wide)):
        return None
    if not val.dim() or not isinstance(mean.args[1], (list, tuple)):
        return None
    if mean.kwargs.get("dtype", torch.float32) is not torch.float32:
        return NormMiss(rsqrt, f"the mean is taken in {mean.kwargs['dtype']}, not in float32")
    keeps = bool(spread) or (len(mean.args) > 2 and mean.args[2])
    if [d % val.dim() for d in mean.args[1]] != [val.dim() - 1]:
        return NormMiss(rsqrt, f"the mean is over dims {list(mean.args[1])} of {val.dim()}", partial_row=True)
    if not keeps or (spread and spread[0].args[1] not in (-1, val.dim() - 1)):
        return NormMiss(rsqrt, "the mean does not keep its dimension")
    if is_call(eps, aten.full.default) and value(eps).dtype is torch.float32 and not value(eps).dim():
        eps = eps.args[1]
    if not isinstance(eps, (int, float)):
        return NormMiss(rsqrt, "epsilon is an input of the graph, not a number (torchseam.compile keeps it one)")
    if not 0 <= eps < float("inf"):
        return NormMiss(rsqrt, f"epsilon is {eps}")
    if val.dtype is not torch.float32:
        return NormMiss(rsqrt, f"the mean of squares is taken in {val.dtype}, not in float32")
    if _is_divisor(rsqrt):
        return NormMiss(rsqrt, "x / sqrt(v) rounds otherwise than x * rsqrt(v): write the latter")
    scaled = next((u for u in rsqrt.users if is_call(u, aten.mul.Tensor) and _same(_other(u, rsqrt), wide)), None)
    if scaled is None:
        if any(last_dim(u) != last_dim(wide) or _slices(wide) for u in rsqrt.users):
            return NormMiss(rsqrt, "the values that are scaled are not those that were squared", partial_row=True)
        return NormMiss(rsqrt, "the root does not multiply the values that were squared")
    narrow = wide.args[0] if is_call(wide, convert) else wide
    upper = (squares, mean, *spread, with_eps, *below, rsqrt, scaled)
    if narrow is not wide:
        upper = tuple(dict.fromkeys((wide, _other(scaled, rsqrt), *upper)))
    return _match_weight(rsqrt, narrow, scaled, float(eps), upper)


def _slices(wide: Node) -> bool:
    return any(is_call(n, aten.slice.Tensor) for n in (wide, *wide.all_input_nodes))


def _is_row(node: Any, hidden: Any) -> bool:
    """Whether a node is a weight: [H], float."""
    val = value(node) if isinstance(node, Node) else None
    return (
        val is not None
        and val.dtype.is_floating_point
        and val.dim() == 1
        and isinstance(hidden, int)
        and val.shape[-1] == hidden
    )


def _match_weight(rsqrt: Node, narrow: Node, scaled: Node, eps: float, upper: tuple[Node, ...]) -> NormMatch | NormMiss:
    """The multiplication by a weight and the cast down, in whichever order the model has them."""
    hidden = last_dim(scaled)
    val = value(narrow)
    assert val is not None
    dtype = val.dtype
    same = dtype is torch.float32
    user = _only_user(scaled)
    if user is not None and is_call(user, aten.mul.Tensor) and _is_row(_other(user, scaled), hidden):
        weight = _other(user, scaled)
        last = user
        if not same:
            cast = _only_user(user)
            if cast is None or not is_call(cast, convert) or cast.args[1] is not dtype:
                return NormMiss(rsqrt, f"the weighted norm is not cast back to {dtype}")
            last = cast
        raw, offset, inner = _unwrap_weight(weight)
        nodes = (*upper, *inner, user) if last is user else (*upper, *inner, user, last)
        return NormMatch(Norm(eps, "before_cast", offset), narrow, raw, last, nodes)
    if same:
        return NormMatch(Norm(eps, "none"), narrow, None, scaled, upper)
    if user is None or not is_call(user, convert) or user.args[1] is not dtype:
        return NormMiss(rsqrt, f"the norm is neither weighted nor cast back to {dtype}")
    cast = user
    weighted = _weighted_after_cast(cast, hidden)
    if weighted is None:
        return NormMatch(Norm(eps, "none"), narrow, None, cast, (*upper, cast))
    weight, inner, last = weighted
    mode: WeightMode = "after_cast"
    return NormMatch(Norm(eps, mode), narrow, weight, last, (*upper, cast, *inner, last))


def _weighted_after_cast(cast: Node, hidden: Any) -> tuple[Node, tuple[Node, ...], Node] | None:
    """(weight, nodes between, product) of `weight * round(n)`; None when the norm has no weight."""
    between: tuple[Node, ...] = ()
    n, user = cast, _only_user(cast)
    if user is not None and is_call(user, convert):  # promoted to the dtype of a wider weight
        between, n, user = (user,), user, _only_user(user)
    if user is None or not is_call(user, aten.mul.Tensor):
        return None
    weight = _other(user, n)
    if not _is_row(weight, hidden):
        return None
    return weight, between, user


def _unwrap_weight(weight: Node) -> tuple[Node, int, tuple[Node, ...]]:
    """(weight as stored, offset, nodes on the way): undoes `w.float()` and `1 + w.float()`."""
    nodes: list[Node] = []
    offset = 0
    node = weight
    if is_call(node, aten.add.Tensor, aten.add.Scalar) and 1 in node.args[:2] and not node.kwargs:
        nodes.append(node)
        node = next(a for a in node.args[:2] if isinstance(a, Node))
        offset = 1
    if is_call(node, convert) and value(node).dtype is torch.float32:
        inner = node.args[0]
        if value(inner).dtype in (torch.bfloat16, torch.float16):
            nodes.append(node)
            node = inner
    if offset and value(node).dtype is not torch.float32 and len(nodes) == 1:
        return weight, 0, ()  # 1 + w was rounded to a narrow dtype: that rounded value is the weight
    return node, offset, tuple(reversed(nodes))
