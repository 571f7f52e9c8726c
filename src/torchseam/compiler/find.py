"""Grow the longest chain of parts around every norm: all_reduce, inner norm, residual, norm, quantisers.

Finding only names parts and says how they hang together. What may be fused is `plan`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch.fx import Graph, Node

from torchseam.compiler.dialects.collectives import AllReduce, match_all_reduce
from torchseam.compiler.dialects.norm_match import NormMatch, NormMiss
from torchseam.compiler.dialects.norms import match_norm
from torchseam.compiler.dialects.quant_match import QuantMatch, QuantMiss
from torchseam.compiler.dialects.quants import match_quant
from torchseam.compiler.dialects.views import aten, same_shape, strip, value, viewed

log = logging.getLogger("torchseam")

Views = tuple[Node, ...]
_Match = TypeVar("_Match")


@dataclass(frozen=True)
class FoundQuant:
    """A quantiser that reads the norm through `views`."""

    match: QuantMatch
    views: Views


@dataclass(frozen=True)
class Chain:
    """One candidate seam.

    x -> [reduce] -> x_views -> [inner] -> [+ residual = add] -> norm_views -> norm -> quants.
    `x` is the input of the first part that is present. `add` holds the sum; an operator that adds the residual
    itself may have none, when nobody reads it.
    """

    norm: NormMatch
    x: Node
    x_views: Views = ()
    reduce: AllReduce | None = None
    inner: NormMatch | None = None
    add: Node | None = None
    residual: Node | None = None
    norm_views: Views = ()
    quants: tuple[FoundQuant, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A dialect of `part` raised at a node: `why`."""

    part: str
    node: Node
    why: str


@dataclass
class Findings:
    """What a graph holds: candidate seams in graph order, all_reduces that no chain took, unreadable norms,
    unreadable quantisers of readable norms, and nodes at which a dialect itself failed."""

    chains: list[Chain] = field(default_factory=list)
    loose_reduces: list[AllReduce] = field(default_factory=list)
    misses: list[NormMiss] = field(default_factory=list)
    quant_misses: list[QuantMiss] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def _quants_of(norm: NormMatch, quants: dict[Node, list[QuantMatch]]) -> tuple[FoundQuant, ...]:
    """Quantisers that read a norm, directly or through row views."""
    found: list[FoundQuant] = []
    queue: list[tuple[Node, Views]] = [(norm.output, ())]
    while queue:
        node, views = queue.pop(0)
        found += [FoundQuant(match, views) for match in quants.get(node, ())]
        queue += [(user, (*views, user)) for user in node.users if viewed(user) is node]
    return tuple(found)


@dataclass(frozen=True)
class _Source:
    """Where a summand comes from: an all_reduce, perhaps through an inner norm."""

    reduce: AllReduce
    inner: NormMatch | None
    views: Views


def _source(
    node: Node, reduces: dict[Node, AllReduce], norms: dict[Node, NormMatch], inner_too: bool
) -> _Source | None:
    producer, views = strip(node)
    if producer in reduces:
        return _Source(reduces[producer], None, views)
    if inner_too and producer in norms and norms[producer].residual is None:
        inner = norms[producer]
        below, more = strip(inner.input)
        if below in reduces:
            return _Source(reduces[below], inner, (*more, *views))
    return None


def _is_plain_add(node: Node) -> bool:
    if node.op != "call_function" or node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    a, b = node.args[:2]
    if not (isinstance(a, Node) and isinstance(b, Node)) or value(a) is None or value(b) is None:
        return False
    return value(a).dim() > 0 and same_shape(value(a), value(b))


def _grow(
    norm: NormMatch,
    order: dict[Node, int],
    free: dict[Node, AllReduce],
    norms: dict[Node, NormMatch],
    taken: set[Node],
    by_input: dict[Node, list[QuantMatch]],
) -> Chain:
    """The longest chain that ends in `norm`, taking no all_reduce and no sum that another chain has."""
    quants = _quants_of(norm, by_input)
    producer, norm_views = strip(norm.input)
    adds_itself = norm.residual is not None
    if adds_itself or (producer not in taken and _is_plain_add(producer)):
        a, b = (norm.input, norm.residual) if adds_itself else producer.args[:2]
        producer, norm_views = (norm.total, ()) if adds_itself else (producer, norm_views)
        sources = [(_source(a, free, norms, True), b), (_source(b, free, norms, True), a)]
        best = max(
            ((s, other) for s, other in sources if s is not None),
            key=lambda pair: order[pair[0].reduce.node],
            default=None,
        )
        if best is not None:
            source, residual = best
            return Chain(
                norm,
                source.reduce.input,
                source.views,
                source.reduce,
                source.inner,
                producer,
                residual,
                norm_views,
                quants,
            )
        return Chain(norm, a, (), None, None, producer, b, norm_views, quants)
    if producer in free:
        return Chain(norm, free[producer].input, (), free[producer], None, None, None, norm_views, quants)
    return Chain(norm, norm.input, quants=quants)


def _ask(dialect: Callable[[Node], _Match | None], node: Node, part: str, findings: Findings) -> _Match | None:
    """What a dialect says of a node. One that fails leaves that node alone, and never breaks a compilation."""
    try:
        return dialect(node)
    except Exception as error:
        log.warning("torchseam failed to read %s as a part of a seam; it is left alone", node.name, exc_info=True)
        findings.failures.append(Failure(part, node, f"{type(error).__name__}: {error}"))
        return None


def find(graph: Graph) -> Findings:
    """All candidate seams of a functional post-grad graph. Linear in the number of nodes."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    findings = Findings()
    found = (_ask(match_all_reduce, node, "all_reduce", findings) for node in graph.nodes)
    reduces = {r.node: r for r in found if r is not None}
    norms: dict[Node, NormMatch] = {}
    quants: dict[Node, list[QuantMatch]] = {}
    quant_misses: list[QuantMiss] = []
    for node in graph.nodes:
        quant = _ask(match_quant, node, "quantiser", findings)
        if isinstance(quant, QuantMatch):
            quants.setdefault(quant.input, []).append(quant)
        elif isinstance(quant, QuantMiss):
            quant_misses.append(quant)
        match = _ask(match_norm, node, "norm", findings)
        if isinstance(match, NormMatch):
            norms[match.output] = match
        elif isinstance(match, NormMiss):
            findings.misses.append(match)
    ordered = sorted(norms.values(), key=lambda n: order[n.output])
    free = dict(reduces)
    taken: set[Node] = set()
    inners: set[Node] = set()
    chains: dict[Node, Chain] = {}
    # Sandwiches first: their first norm would otherwise take the all_reduce for itself.
    for sandwich in (True, False):
        for norm in ordered:
            if norm.output in chains or norm.output in inners:
                continue
            chain = _grow(norm, order, free, norms, taken, quants)
            if sandwich and chain.inner is None:
                continue
            chains[norm.output] = chain
            if chain.reduce is not None:
                del free[chain.reduce.node]
            if chain.add is not None and (chain.reduce is not None or chain.quants):
                taken.add(chain.add)  # a norm that is no seam leaves the sum to another reader that is one
            if chain.inner is not None:
                inners.add(chain.inner.output)
    findings.chains = [chains[n.output] for n in ordered if n.output in chains]
    # The cast of NVFP4's block scales to e4m3 is a part of that quantiser, not one that cannot be read.
    parts = {node for matches in quants.values() for match in matches for node in match.nodes}
    parts.update(node for miss in quant_misses for node in miss.reads)
    unread = (miss for miss in quant_misses if miss.node not in parts)
    findings.quant_misses = [miss for miss in unread if any(node in norms for node in miss.reads)]
    findings.loose_reduces = list(free.values())
    return findings
