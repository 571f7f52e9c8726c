"""What FlashInfer's functions, methods and pattern codes are, read from its sources without importing it.

Importing it takes a CUDA driver's Python bindings and more; its sources say the same. The signatures of two
versions are kept in flashinfer_signatures.json, written by

    python tests/backends/flashinfer_signatures.py FLASHINFER_FOLDER VERSION [FLASHINFER_FOLDER VERSION ...]

where a folder is the `flashinfer` of an unpacked wheel; tests compare the record with what is installed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
FUNCTIONS = {
    "create_allreduce_fusion_workspace": "comm/allreduce.py",
    "allreduce_fusion": "comm/allreduce.py",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion": "comm/trtllm_ar.py",
    "get_trtllm_comm_module": "comm/trtllm_ar.py",
    "get_trtllm_mnnvl_comm_module": "comm/trtllm_mnnvl_ar.py",
    "add_rmsnorm_fp4quant": "cute_dsl/add_rmsnorm_fp4quant.py",
}
WORKSPACES = {"trtllm": "TRTLLMAllReduceFusionWorkspace", "mnnvl": "MNNVLAllReduceFusionWorkspace"}
WORKSPACE_FILES = {"trtllm": "comm/allreduce.py", "mnnvl": "comm/trtllm_mnnvl_ar.py"}
METHODS = ("is_buffer_size_sufficient", "destroy", "checkpoint_prepare", "checkpoint_restore")
CODES = {
    "AllReduceFusionPattern": "comm/trtllm_ar.py",
    "QuantizationSFLayout": "comm/trtllm_ar.py",
    "MNNVLQuantType": "comm/trtllm_mnnvl_ar.py",
}
#: Names that `flashinfer.comm` must hand on.
EXPORTS = (
    "create_allreduce_fusion_workspace",
    "allreduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "AllReduceFusionPattern",
    "QuantizationSFLayout",
)


def read(folder: Path) -> dict[str, Any]:
    """The signatures and codes of one `flashinfer` folder."""

    def named(file: str, name: str) -> Any:
        body = ast.parse((folder / file).read_text()).body
        return next((node for node in body if getattr(node, "name", None) == name), None)

    methods: dict[str, dict[str, str]] = {}
    for backend, cls in WORKSPACES.items():
        found = {node.name: node for node in named(WORKSPACE_FILES[backend], cls).body if hasattr(node, "name")}
        methods[backend] = {name: _arguments(found[name]) for name in METHODS if name in found}
    codes = {}
    for name, file in CODES.items():
        node = named(file, name)
        assigned = [n for n in node.body if isinstance(n, ast.Assign)] if node else []
        codes[name] = {n.targets[0].id: ast.literal_eval(n.value) for n in assigned}  # type: ignore[attr-defined]
    init = ast.parse((folder / "comm/__init__.py").read_text())
    exported = {a.asname or a.name for n in init.body if isinstance(n, ast.ImportFrom) for a in n.names}
    return {
        "functions": {name: _arguments(named(file, name)) for name, file in FUNCTIONS.items()},
        "methods": methods,
        "codes": codes,
        "exports": [name for name in EXPORTS if name in exported],
    }


def _arguments(node: ast.FunctionDef) -> str:
    """`a, b=..., *, c=...`: names, order and which have a default."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.args.defaults = defaults  # type: ignore[assignment]
    node.args.kw_defaults = [None if d is None else ast.Constant(None) for d in node.args.kw_defaults]
    return ast.unparse(node.args)


def signature(arguments: str) -> inspect.Signature:
    space: dict[str, Any] = {}
    exec(f"def f({arguments}): pass", space)
    return inspect.signature(space["f"])


def recorded() -> dict[str, dict[str, Any]]:
    """Version -> what `read` said of it."""
    return json.loads(RECORD.read_text())


def installed() -> tuple[str, Path] | None:
    """The version and folder of the flashinfer that is installed, if one is."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        return None
    try:
        return importlib.metadata.version("flashinfer-python"), Path(found.submodule_search_locations[0])
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    record = {version: read(Path(folder)) for folder, version in pairs}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
