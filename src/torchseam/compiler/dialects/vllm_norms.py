"""vLLM's norms: `vllm_ir::rms_norm` and `fused_add_rms_norm`, and the `_C` operators that releases before had,
which functionalisation wraps. Known by name, as the quantisers are: vLLM need not be installed.

An operator of `vllm_ir` has several implementations. Meant here is what vLLM's CUDA kernels compute (csrc/layernorm*):
the norm reads the sum with the residual after its rounding. (The plain-torch implementation reads it before.)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from torchseam.compiler.dialects.norm_match import NormMatch, NormMiss
from torchseam.compiler.dialects.quant_match import Unread
from torchseam.compiler.dialects.views import is_call, last_dim, value
from torchseam.compiler.dialects.vllm import called, own_buffers, unwrap
from torchseam.seam import Norm, WeightMode

_IR = ("vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm")
_LEGACY = ("_C::rms_norm", "_C::fused_add_rms_norm")


def match_vllm_norm(node: Node) -> NormMatch | NormMiss | None:
    """The RMSNorm that `node`, a call of one of vLLM's operators, is; None where nobody reads it."""
    if node.op != "call_function":
        return None
    target, wrapped = called(node)
    name = target.name() if target is not None else ""
    try:
        if name in _IR and not wrapped:
            return _ir(node, target)
        if name in _LEGACY and wrapped:
            return _legacy(node, target)
    except Unread as why:
        return NormMiss(node, str(why))
    return None


def _ir(node: Node, target: torch._ops.OpOverload) -> NormMatch | NormMiss | None:
    given = {**dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)), **node.kwargs}
    size = given.get("variance_size")
    if size is not None and size != last_dim(given["x"]):
        return NormMiss(node, f"the mean is over the first {size} of {last_dim(given['x'])} values", partial_row=True)
    if "x_residual" not in given:
        return _match(given, given["x"], node, (node,))
    results: dict[int, Node] = {}
    for user in node.users:
        if not is_call(user, operator.getitem) or user.args[1] in results:
            raise Unread("an output is read in another way than by its number")
        results[user.args[1]] = user
    if 0 not in results:
        return None
    return _match(given, given["x"], results[0], (node, *results.values()), given["x_residual"], results.get(1))


def _legacy(node: Node, target: torch._ops.OpOverload) -> NormMatch | None:
    call = unwrap(node, target)
    if call.transposed:
        raise Unread("it writes into a transposed buffer")
    if len(call.buffers) == 1:  # rms_norm(result!, input, weight, epsilon)
        ((_, output),) = call.written.items()
        nodes = (*own_buffers(call), node, output)
        return None if output is None else _match(call.given, call.given["input"], output, nodes)
    output, total = call.written["input"], call.written["residual"]
    if output is None:
        return None
    nodes = (node, output, *(() if total is None else (total,)))
    return _match(call.given, call.buffers["input"], output, nodes, call.buffers["residual"], total)


def _match(
    given: dict[str, Any],
    x: Node,
    output: Node,
    nodes: tuple[Node, ...],
    residual: Node | None = None,
    total: Node | None = None,
) -> NormMatch:
    weight, eps = given["weight"], given["epsilon"]
    if not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise Unread(f"epsilon is {eps}, not a number >= 0")
    norm = Norm(float(eps), _mode(x, weight, output))
    return NormMatch(norm, x, weight, output, nodes, residual, total)


def _mode(x: Node, weight: Node | None, output: Node) -> WeightMode:
    """The weight is multiplied in its own dtype, and releases differ in whether the result is cast back."""
    if weight is None:
        return "none"
    narrow, wide, result = value(x).dtype, value(weight).dtype, value(output).dtype
    if wide is narrow and result is narrow:
        return "after_cast"
    if wide is torch.float32:
        return "before_cast" if result is narrow else "after_cast"
    raise Unread(f"a {wide} weight makes {result} of {narrow}")
