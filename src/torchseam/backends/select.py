"""Which backend runs a seam.

Today one backend exists, so the choice is its check: `auto` is `collective`, and a backend by name
that this version does not have is refused with the reason, never swapped for another.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from torchseam.backends import collective, local
from torchseam.config import BACKENDS
from torchseam.operands import Operands
from torchseam.seam import Seam

_BACKENDS: dict[str, ModuleType] = {collective.NAME: collective}


def resolve(name: str) -> str:
    """The name of the backend that a configured `name` means; ValueError when it cannot run here."""
    if name == "auto":
        return collective.NAME
    if name in _BACKENDS:
        return name
    known = f"backend {name!r} is planned, but not part of this version" if name in BACKENDS else f"backend is {name!r}"
    raise ValueError(f"{known}; what works: 'auto', {', '.join(map(repr, _BACKENDS))}")


def run(seam: Seam, operands: Operands) -> list[Tensor]:
    """Run a validated seam."""
    if seam.reduce is None:
        return local.run(seam, operands)
    return _BACKENDS[resolve(seam.reduce.backend)].run(seam, operands)
