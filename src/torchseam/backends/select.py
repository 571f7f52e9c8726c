"""Which backend runs a seam: chosen once per process group, by all its ranks together.

`auto` takes the first of `ORDER` that every rank can really run, and else `collective`. A backend that
was asked for by name and cannot run is a ValueError on all ranks; nothing is swapped for another
silently. Afterwards a call costs one look-up; a call that the chosen backend refuses (`Backend.refuses`)
goes to `collective`, on all ranks alike.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchseam.backends import base, collective, flashinfer, local, symmetric
from torchseam.config import BACKENDS
from torchseam.operands import Operands
from torchseam.seam import Reduce, Seam

_log = logging.getLogger("torchseam")

#: By the name that a configuration gives it, every backend but `collective`.
KINDS: dict[str, base.Kind] = {
    "symmetric": symmetric.KIND,
    "mnnvl": flashinfer.MNNVL,
    "trtllm": flashinfer.TRTLLM,
}


@dataclass(frozen=True)
class Row:
    """`auto` may choose `backend` where all of this holds; `why` says what shows that it wins there.

    since, before: compute capability in [since, before). several_nodes: whether the group spans nodes.
    """

    backend: str
    since: tuple[int, int]
    before: tuple[int, int]
    world_sizes: tuple[int, ...]
    several_nodes: bool
    why: str


#: The order of `auto`. What is in no row is never chosen unasked: a forced trtllm was 10 to 34 times slower
#: than unfused where it did not fit (FIELD section 4, 15).
ORDER: tuple[Row, ...] = (
    Row(
        "symmetric",
        (8, 0),
        (13, 0),
        (2, 3, 4, 5, 6, 7, 8),
        False,
        "2 x H200, 2026-12-01, static FP8, H 4096 and 8192, T from 1 to 4096: 1.6 to 3.5 times as fast as NCCL and "
        "Inductor (benchmarks/results/collective-2xh200.csv); not yet timed beside trtllm; other GPUs and world sizes "
        "are not measured, and its workspace bounds what it takes there",
    ),
    Row(
        "mnnvl",
        (10, 0),
        (11, 0),
        (2, 4, 8),
        False,
        "FlashInfer's benchmarks, not ours: as fast as trtllm when small, much faster when large (the comment of "
        "_workspace_creation_heuristic in its 0.7.4); not run by us, for want of NVLink multicast",
    ),
    Row(
        "trtllm",
        (9, 0),
        (9, 1),
        (2,),
        False,
        "2 x H200, 2026-11-30, residual + norm + static FP8, H 4096 and 8192, T 1 to 4096: 5.2 to 301 us against "
        "9.4 to 308 us of NCCL and Inductor, never slower",
    ),
    Row(
        "mnnvl",
        (10, 0),
        (11, 0),
        (2, 4, 8, 16, 32, 64),
        True,
        "the only fused one that leaves a node; FlashInfer's benchmarks, not ours",
    ),
)


def candidates(capability: tuple[int, int], world_size: int, nodes: int) -> list[str]:
    """What `auto` tries, best first."""
    return [
        row.backend
        for row in ORDER
        if row.since <= capability < row.before
        and world_size in row.world_sizes
        and row.several_nodes == (nodes > 1)
        and row.backend in KINDS
    ]


@dataclass(frozen=True)
class _Choice:
    """What one (group, configured name, device) came to: a backend, `collective` (None), or an error."""

    backend: base.Backend | None = None
    error: str | None = None


_choices: dict[tuple[str, str, torch.device], _Choice] = {}
#: (kind, group, device) -> what is open, whichever name led to it: `auto` and a name share a workspace.
_opened: dict[tuple[str, str, torch.device], base.Backend] = {}
#: (group, configured name) -> the refusals that were met, as an ordered set.
_refusals: dict[tuple[str, str], dict[str, None]] = {}
_MAX_REFUSALS = 20


def run(seam: Seam, operands: Operands) -> list[Tensor]:
    """Run a validated seam. Raises ValueError where the backend that the seam names cannot run."""
    reduce = seam.reduce
    if reduce is None:
        return local.run(seam, operands)
    device = operands.x.device
    choice = _choices.get((reduce.group, reduce.backend, device)) or _choose(reduce, device)
    if choice.error is not None:
        raise ValueError(choice.error)
    backend = choice.backend
    if backend is None or not operands.x.numel():
        return collective.run(seam, operands)
    refusal = backend.refuses(seam, operands)
    if refusal is None:
        if operands.reduced_out is not None:
            # x is still on its way to other GPUs when a row's sum is there: the sum must not be written into it.
            operands = dataclasses.replace(operands, reduced_out=None)
        return backend.run(seam, operands)
    refused = _refusals.setdefault((reduce.group, reduce.backend), {})
    if refusal not in refused and len(refused) < _MAX_REFUSALS:
        refused[refusal] = None
        _log.info("%s: %s: such calls go to %s", backend.name, refusal, collective.NAME)
    return collective.run(seam, operands)


def missing(name: str) -> str | None:
    """What this machine lacks for the backend that a configuration calls `name`, or None. Touches no other rank."""
    if name in ("auto", collective.NAME):
        return None
    if name not in BACKENDS:
        return f"unknown; allowed: {', '.join(BACKENDS)}"
    if name not in KINDS:
        return "planned, but not part of this version"
    return _objection(KINDS[name].missing)


def resolve(name: str) -> str:
    """`name`, if a configuration may name it on this machine; ValueError with the reason if it cannot run here.

    Whether it can run on a certain group is known when the group's first seam runs.
    """
    refusal = _refusal(name)
    if refusal is not None:
        raise ValueError(refusal)
    return name


def _refusal(name: str) -> str | None:
    why = missing(name)
    if why is None:
        return None
    works = [repr(other) for other in BACKENDS if missing(other) is None]
    return f"backend {name!r}: {why}; what works: {', '.join(works)}"


def expected(reduce: Reduce, device_type: str) -> str:
    """For reports: the backend of a group for tensors on a kind of device, or how it is going to be chosen."""
    known = chosen(reduce.group, reduce.backend, device_type)
    if known is not None:
        return known
    if reduce.backend == "auto":
        return collective.NAME if device_type != "cuda" else "auto"
    return KINDS[reduce.backend].name if reduce.backend in KINDS else reduce.backend


def chosen(group: str, configured: str | None = None, device_type: str | None = None) -> str | None:
    """The backend of a group; None as long as none is chosen. `configured`, `device_type`: None is any of them."""
    for (name, asked, device), choice in _choices.items():
        if name != group or configured not in (None, asked) or device_type not in (None, device.type):
            continue
        if choice.error is None:
            return choice.backend.name if choice.backend else collective.NAME
    return None


def remarks(group: str, configured: str | None = None) -> list[str]:
    """For reports: what went elsewhere than into the group's backend, or only in part into it, and why."""
    told: dict[str, None] = {}
    for (name, asked), refused in _refusals.items():
        if name == group and configured in (None, asked):
            told |= {f"some calls went to {collective.NAME}: {refusal}": None for refusal in refused}
    for (name, asked, _), choice in _choices.items():
        if name == group and configured in (None, asked):
            told |= dict.fromkeys(getattr(choice.backend, "remarks", ()))
    return list(told)


def opened() -> list[base.Backend]:
    """The backends that are open in this process."""
    return list(_opened.values())


def memory() -> dict[tuple[str, str], int]:
    """(process group, backend) -> bytes of device memory that this rank holds for it, for all that are open."""
    return {(group, backend.name): backend.memory() for (_, group, _), backend in _opened.items()}


def reset() -> None:
    """Close every backend and forget every choice, failures too. Call it on all ranks, and not while a captured
    graph may replay."""
    backends = opened()
    _choices.clear()
    _opened.clear()
    _refusals.clear()
    for backend in backends:
        try:
            backend.close()
        except Exception:  # the others must be closed all the same
            _log.exception("%s: closing failed", backend.name)


atexit.register(reset)


# ---- choosing ---------------------------------------------------------------------------------


def _choose(reduce: Reduce, device: torch.device) -> _Choice:
    """Collective: the ranks of the group choose together, and remember it."""
    key = (reduce.group, reduce.backend, device)
    capability = base.capability(device)
    process_group = _resolve_process_group(reduce.group)  # type: ignore[arg-type]
    world_size = process_group.size()
    unasked = reduce.backend == collective.NAME or (reduce.backend == "auto" and capability is None)
    if unasked:
        return _choices.setdefault(key, _Choice())
    if world_size == 1:
        # Nothing to reduce, so nothing to open; but a name that cannot be right here is no more right for that.
        return _choices.setdefault(key, _Choice(error=None if reduce.backend == "auto" else _refusal(reduce.backend)))
    group = base.Group(reduce.group, process_group.rank(), world_size, device)
    facts = base.agree(group, [reduce.backend, base.host(), capability, _capturing(device)])
    names, hosts, capabilities, capturing = (list(column) for column in zip(*facts, strict=True))
    if len(set(names)) > 1:
        told = ", ".join(f"rank {rank} {name!r}" for rank, name in enumerate(names))
        return _choices.setdefault(key, _Choice(error=f"the ranks of a group are configured differently: {told}"))
    if any(capturing):
        # Nothing can be allocated now, and the captured graph keeps what it gets: run once before capturing.
        _tell_once(logging.WARNING, f"group {reduce.group}: first used in a CUDA graph capture: {collective.NAME}")
        return _Choice()
    group = base.Group(group.name, group.rank, world_size, device, nodes=len(set(hosts)))
    if reduce.backend == "auto":
        oldest = min(tuple(c) if c else (0, 0) for c in capabilities)
        choice = _Choice(_first(candidates(oldest, world_size, group.nodes), group))
    else:
        choice = _named(reduce.backend, group)
    name = choice.backend.name if choice.backend else choice.error or collective.NAME
    _log.info("group %s, %d ranks on %d nodes, %s: %s", group.name, world_size, group.nodes, reduce.backend, name)
    return _choices.setdefault(key, choice)


def _first(names: list[str], group: base.Group) -> base.Backend | None:
    for name in names:
        backend, why = _open(KINDS[name], group)
        if backend is not None:
            return backend
        _tell_once(logging.WARNING, f"backend {name!r} is not used on groups like {group.name}: {why}")
    return None


def _named(name: str, group: base.Group) -> _Choice:
    if name not in KINDS:
        return _Choice(error=_refusal(name))
    backend, why = _open(KINDS[name], group)
    if backend is not None:
        return _Choice(backend)
    others = [o for o in KINDS if o != name and base.verdict(group, _probe(KINDS[o], group)) is None]
    works = ", ".join(map(repr, ("auto", collective.NAME, *others)))
    return _Choice(error=f"backend {name!r} cannot run on this group of {group.world_size} ranks: {why}; use {works}")


def _open(kind: base.Kind, group: base.Group) -> tuple[base.Backend | None, str | None]:
    """Collective: the open backend, or why it is not open. The same on all ranks, whatever one of them raises."""
    key = (kind.name, group.name, group.device)
    if key in _opened:
        return _opened[key], None
    why = base.verdict(group, _probe(kind, group))
    if why is not None:
        return None, why
    backend: base.Backend | None = None
    try:
        backend = kind.open(dataclasses.replace(group, attempt=f"{kind.name} {next(_attempts(group.name))}"))
    except base.Unavailable as error:
        why = str(error)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    outcome = base.verdict(group, why)
    if outcome is None and backend is not None:
        _opened[key] = backend
        return backend, None
    if backend is not None:
        backend.close()
    return None, outcome


@functools.cache
def _attempts(group: str) -> itertools.count[int]:
    return itertools.count()


def _probe(kind: base.Kind, group: base.Group) -> str | None:
    return _objection(functools.partial(kind.probe, group))


def _objection(ask: Callable[[], str | None]) -> str | None:
    """What a probe says; that it raised is an objection too."""
    try:
        return ask()
    except Exception as error:
        return f"its probe raised {type(error).__name__}: {error}"


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _tell_once(level: int, message: str) -> None:
    _log.log(level, "%s", message)
