"""Decide what of a found chain may be fused; every refusal has a reason from a closed list.

`decide` is the only place that guards. When a part is refused the rest of the chain still fuses:
a quantiser is left as its own op, a collective as its own sum.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from torchseam.backends import local, select
from torchseam.compiler.dialects.collectives import AllReduce, starts_collective
from torchseam.compiler.dialects.norm_match import NormMatch
from torchseam.compiler.dialects.views import last_dim, strip, value
from torchseam.compiler.find import Chain, Findings, FoundQuant
from torchseam.compiler.report import Reason, Refusal, source_line
from torchseam.config import SeamConfig

_SUM = ("sum",)
#: Where `torchseam::seam` has an implementation.
_DEVICES = ("cpu", "cuda")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Plan:
    """Chains to rewrite, in graph order, and what was refused.

    `plain_norms`: norms that are no seam. `exact_norms`: those of them that are rewritten all the
    same because the configuration asks for exactness (they are among `chains`).
    """

    chains: list[Chain]
    refusals: list[Refusal]
    plain_norms: int = 0
    exact_norms: int = 0


def _refuse(part: str, reason: Reason, detail: str, node: Node) -> Refusal:
    return Refusal(part, reason, detail, node.name, source_line(node))


def internal_nodes(chain: Chain) -> list[Node]:
    """Every node that the fused operator stands for, inputs excluded."""
    nodes: list[Node] = []
    if chain.reduce is not None:
        nodes += chain.reduce.nodes
    nodes += chain.x_views
    if chain.inner is not None:
        nodes += chain.inner.nodes
    if chain.add is not None:
        nodes.append(chain.add)
    nodes += [*chain.norm_views, *chain.norm.nodes]
    for quant in chain.quants:
        nodes += [*quant.views, *quant.match.nodes]
    return list(dict.fromkeys(nodes))


def own_values(chain: Chain) -> set[Node]:
    """The internal nodes that are computed from the chain's x: not what only prepares a weight or a scale.

    `scale.reciprocal()` or `1 + weight` may stand at the top of the graph and be shared by every layer.
    """
    own: set[Node] = set()
    for node in sorted(internal_nodes(chain)):  # fx nodes compare by their place in the graph
        if any(source is chain.x or source in own for source in node.all_input_nodes):
            own.add(node)
    return own


def _inputs(chain: Chain) -> list[Node]:
    """What the fused operator of a chain reads."""
    weights = (chain.norm.weight, chain.inner.weight if chain.inner else None)
    scales = (found.match.scale for found in chain.quants)
    return [node for node in (chain.x, chain.residual, *weights, *scales) if node is not None]


class _Ancestry:
    """Answers whether a node is computed from any of a set of nodes, in the graph as it will be.

    A planned chain is one operator there: each of its values needs all of its inputs, so a sum that
    needed only the all_reduce now waits for the scale too, and two seams can come to need each other.
    """

    def __init__(self, graph: Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.planned: dict[Node, list[Node]] = {}
        self.late: list[tuple[int, int]] = []
        self.collectives = [i for node, i in self.order.items() if starts_collective(node)]

    def add(self, chain: Chain) -> None:
        """Count a chain as rewritten."""
        own, inputs = own_values(chain), _inputs(chain)
        for node in own:
            self.planned.setdefault(node, inputs)
        first, last = min(self.order[n] for n in own), max(self.order[n] for n in inputs)
        if first < last:  # through this chain a node depends on others that come later in the graph, up to `last`
            apart = [(a, b) for a, b in self.late if b < first or last < a]
            joined = [span for span in self.late if span not in apart]
            self.late = [*apart, (min([first, *(a for a, _ in joined)]), max([last, *(b for _, b in joined)]))]

    def collective_between(self, first: Node, last: Node) -> bool:
        """Whether a collective starts after `first` and before `last`."""
        at = bisect.bisect_right(self.collectives, self.order[first])
        return at < len(self.collectives) and self.collectives[at] < self.order[last]

    def depends(self, node: Node, on: set[Node]) -> bool:
        """Looks no further up than the first of `on`, or the chains through which something above depends on it."""
        first = min(self.order[n] for n in on)
        first = next((a for a, b in self.late if a < first <= b), first)
        seen: set[Node] = set()
        stack = [node]
        while stack:
            current = stack.pop()
            if current in on:
                return True
            if current in seen or self.order[current] < first:
                continue
            seen.add(current)
            stack += self.planned.get(current) or current.all_input_nodes
        return False


# ---- guards: each returns None, or why the part must be left alone ------------------------------


def _guard_group(reduce: AllReduce) -> tuple[Reason, str] | None:
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        _resolve_process_group(reduce.group)
    except (RuntimeError, ValueError, KeyError) as error:
        return Reason.UNKNOWN_GROUP, f"group {reduce.group!r}: {error}"
    return None


def _guard_reduce(chain: Chain, config: SeamConfig, ancestry: _Ancestry) -> tuple[Reason, str] | None:
    reduce = chain.reduce
    assert reduce is not None
    if not config.fuse_all_reduce:
        return Reason.DISABLED, "SeamConfig.fuse_all_reduce is False"
    if reduce.op not in _SUM:
        return Reason.ALL_REDUCE_NOT_SUM, f"its op is {reduce.op!r}"
    if reduce.read_early:
        return Reason.ALL_REDUCE_READ_EARLY, f"{len(reduce.start.users)} nodes read it"
    if ancestry.collective_between(reduce.start, chain.norm.output):
        # The operator stands where the norm was: it would change the order of the two collectives.
        return Reason.COLLECTIVE_BETWEEN, f"between {reduce.start.name} and {chain.norm.output.name}"
    return _guard_group(reduce)


def _guard_norm(norm: NormMatch) -> tuple[Reason, str] | None:
    val = value(norm.input)
    if val is not None and val.device.type not in _DEVICES:
        return Reason.DEVICE, f"the norm is on {val.device}"
    if val is None or val.dtype not in _FLOATS:
        return Reason.DTYPE, f"the norm reads {None if val is None else val.dtype}"
    if not isinstance(val.shape[-1], int):
        return Reason.SHAPE, "the hidden size is symbolic"
    weight = None if norm.weight is None else value(norm.weight)
    if weight is not None and weight.dtype not in _FLOATS:
        return Reason.DTYPE, f"the weight is {weight.dtype}"
    if weight is not None and tuple(weight.shape) != (val.shape[-1],):
        return Reason.SHAPE, f"the weight has shape {tuple(weight.shape)}, the rows {val.shape[-1]} values"
    return None


def _guard_activations(chain: Chain) -> tuple[Reason, str] | None:
    """x, the residual, the inner norm and the norm's input must be of one dtype and one row length."""
    named = {"x": chain.x, "residual": chain.residual, "sum": chain.add}
    if chain.reduce is not None:
        named["all_reduce"] = chain.reduce.node
    if chain.inner is not None:
        named |= {"inner norm": chain.inner.input, "inner norm's output": chain.inner.output}
    want, hidden = value(chain.norm.input), last_dim(chain.norm.input)
    for name, node in named.items():
        if node is None:
            continue
        val = value(node)
        if val is None or val.dtype is not want.dtype:
            return (
                Reason.DTYPE,
                f"{name} is {None if val is None else val.dtype}, the norm reads {want.dtype}",
            )
        if last_dim(node) != hidden:
            return Reason.SHAPE, f"{name} has rows of {last_dim(node)}, the norm of {hidden}"
    return None


def _guard_quant(found: FoundQuant, chain: Chain, config: SeamConfig) -> tuple[Reason, str] | None:
    quant = found.match.quant
    if quant.scheme not in config.schemes:
        return Reason.DISABLED, f"SeamConfig.schemes is {config.schemes}"
    hidden = last_dim(chain.norm.input)
    if hidden % quant.multiple_of:
        return Reason.HIDDEN_SIZE, f"{hidden} is not a multiple of {quant.multiple_of}"
    lacking = local.unsupported_recipe(quant) if value(chain.norm.input).device.type == "cuda" else None
    if lacking is not None:
        # The reference would run in the kernel's place: slower than what Inductor makes of the quantiser.
        return Reason.QUANT_SPELLING, lacking
    scale = found.match.scale
    if scale is not None:
        val = value(scale)
        if val is None or val.dtype is not torch.float32:
            return Reason.DTYPE, f"the scale is {None if val is None else val.dtype}, not float32"
        if val.numel() != 1:
            return Reason.SHAPE, f"the scale has shape {tuple(val.shape)}, not one number"
        if val.device != value(chain.norm.input).device:
            return Reason.DTYPE, f"the scale is on {val.device}"
    return None


def _guard_inputs(chain: Chain, ancestry: _Ancestry) -> tuple[Reason, str] | None:
    """Residual and weights must exist before the seam begins."""
    inside = own_values(chain)
    for node in (chain.residual, chain.inner.weight if chain.inner else None, chain.norm.weight):
        if node is not None and ancestry.depends(node, inside):
            return Reason.DEPENDENCE, f"{node.name} is"
    return None


def _guard_scale(found: FoundQuant, inside: set[Node], ancestry: _Ancestry) -> tuple[Reason, str] | None:
    scale = found.match.scale
    if scale is not None and ancestry.depends(scale, inside):
        return Reason.DEPENDENCE, f"the scale {scale.name} is"
    return None


# ---- decisions ----------------------------------------------------------------------------------


def _without_reduce(chain: Chain) -> Chain:
    """The chain that begins after its all_reduce."""
    assert chain.reduce is not None
    return dataclasses.replace(chain, x=chain.reduce.node, reduce=None)


def _norm_only(chain: Chain) -> Chain:
    """The chain that begins at its norm, or at the sum that its norm makes itself."""
    if chain.norm.residual is not None:
        norm = chain.norm
        return Chain(norm, norm.input, add=norm.total, residual=norm.residual, quants=chain.quants)
    return Chain(chain.norm, chain.norm.input, quants=chain.quants)


def _prune(chain: Chain, guard: Callable[[FoundQuant], tuple[Reason, str] | None], refusals: list[Refusal]) -> Chain:
    kept = []
    for found in chain.quants:
        problem = guard(found)
        if problem is None:
            kept.append(found)
        else:
            refusals.append(_refuse(found.match.quant.scheme, *problem, found.match.nodes[-1]))
    return dataclasses.replace(chain, quants=tuple(kept))


def _split(chain: Chain) -> list[Chain]:
    """A chain cut before its residual: what the collective still fuses with, and the norm after it."""
    if chain.inner is None:
        return [_norm_only(chain)]
    if chain.reduce is None:
        return [Chain(chain.inner, chain.inner.input), _norm_only(chain)]
    _, views = strip(chain.inner.input)
    return [Chain(chain.inner, chain.reduce.input, (), chain.reduce, norm_views=views), _norm_only(chain)]


def _inner_read_elsewhere(chain: Chain) -> bool:
    """Whether a sandwich's first norm has another reader, for whom Inductor would compute it anew, in its order."""
    if chain.inner is None:
        return False
    inside = set(internal_nodes(chain))
    first = chain.inner.output
    after = [first, *(view for view in chain.x_views if view > first)]
    return any(user not in inside for node in after for user in node.users)


def decide(chain: Chain, config: SeamConfig, ancestry: _Ancestry, refusals: list[Refusal]) -> list[Chain]:
    """The largest parts of a chain that may be fused; empty when its norm cannot be.

    One chain comes back as one, or as two when something forbids the residual of a sandwich.
    """
    for norm in filter(None, (chain.norm, chain.inner)):
        problem = _guard_norm(norm)
        if problem is not None:
            if chain.reduce is not None or chain.quants:
                refusals.append(_refuse("norm", *problem, norm.output))
            return []
    if chain.reduce is not None and (problem := _guard_reduce(chain, config, ancestry)) is not None:
        refusals.append(_refuse("all_reduce", *problem, chain.reduce.node))
        chain = _without_reduce(chain)
    problem = _guard_activations(chain) or _guard_inputs(chain, ancestry)
    if problem is not None:
        if chain.residual is None or chain.norm.residual is not None:
            # The norm itself is at fault, or it adds the residual itself: nothing shorter is left.
            if chain.norm.residual is None or chain.reduce is not None or chain.quants:
                refusals.append(_refuse("norm", *problem, chain.norm.output))
            return []
        if chain.reduce is not None or chain.quants:
            refusals.append(_refuse("residual", *problem, chain.add))
        return [part for piece in _split(chain) for part in decide(piece, config, ancestry, refusals)]
    if config.exact and _inner_read_elsewhere(chain):
        return [part for piece in _split(chain) for part in decide(piece, config, ancestry, refusals)]
    inside = own_values(chain)
    chain = _prune(chain, lambda found: _guard_quant(found, chain, config), refusals)
    chain = _prune(chain, lambda found: _guard_scale(found, inside, ancestry), refusals)
    if chain.reduce is None and chain.quants and not config.fuse_norm_quant:
        why = (Reason.DISABLED, "SeamConfig.fuse_norm_quant is False")
        refusals.append(_refuse("norm", *why, chain.norm.output))
        return []
    return [chain]


def plan(graph: Graph, findings: Findings, config: SeamConfig) -> Plan:
    """Guard every finding. Raises ValueError for a configured backend that cannot work here."""
    select.resolve(config.backend)
    ancestry = _Ancestry(graph)
    result = Plan([], [])
    for reduce in findings.loose_reduces:
        problem = (Reason.NO_NORM, f"its readers are {_readers(reduce.node)}")
        if reduce.op not in _SUM:
            problem = (Reason.ALL_REDUCE_NOT_SUM, f"its op is {reduce.op!r}")
        result.refusals.append(_refuse("all_reduce", *problem, reduce.node))
    for miss in findings.misses:
        reason = Reason.PARTIAL_ROW if miss.partial_row else Reason.NORM_SPELLING
        result.refusals.append(_refuse("norm", reason, miss.why, miss.node))
    for unread in findings.quant_misses:
        result.refusals.append(_refuse("quantiser", Reason.QUANT_SPELLING, unread.why, unread.node))
    for failure in findings.failures:
        result.refusals.append(_refuse(failure.part, Reason.FAILURE, failure.why, failure.node))
    for chain in findings.chains:
        for part in decide(chain, config, ancestry, result.refusals):
            if part.reduce is not None or part.quants:
                planned = [part]
            elif config.exact:
                planned = _split(part)
                result.exact_norms += len(planned)
            else:
                planned = []
                result.plain_norms += len(_split(part))
            for each in planned:
                ancestry.add(each)
            result.chains += planned
    return result


def _readers(node: Node) -> str:
    names = dict.fromkeys(str(u.target) if u.op == "call_function" else u.op for u in node.users)
    return ", ".join(names) or "none"
