"""torchseam: find the seams of a torch.compile'd tensor-parallel LLM and fuse each into one operator.

model = torchseam.compile(model)
print(torchseam.report(model))
"""

from __future__ import annotations

from typing import Any

from torchseam.config import VERSION, SeamConfig
from torchseam.seam import Norm, Quant, Reduce, Seam

__version__ = VERSION

#: Names that need torch, imported when first used: `import torchseam` alone stays cheap.
_LAZY = {
    "compile": "torchseam.integrations.inductor",
    "inductor_options": "torchseam.integrations.inductor",
    "report": "torchseam.integrations.inductor",
    "reset": "torchseam.integrations.inductor",
    "FusionReport": "torchseam.compiler.report",
    "Reason": "torchseam.compiler.report",
    "SeamsNotFusedError": "torchseam.compiler.report",
}

__all__ = ["Norm", "Quant", "Reduce", "Seam", "SeamConfig", "__version__", "ops", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "ops":
        import importlib

        return importlib.import_module("torchseam.ops")
    raise AttributeError(f"module 'torchseam' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
