"""The architecture, as DESIGN section 3 draws it, and what a clone must not contain."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "torchseam"
SOURCES = ROOT / "src" / PACKAGE

#: From the top; a floor imports only from floors below it. `torchseam/__init__.py` is the roof.
FLOORS = (
    "cli",
    "integrations",
    "compiler",
    "nn",
    "ops",
    "checking",
    "tuning",
    "backends",
    "kernels",
    "reference",
    "config",
    "outputs",
    "operands",
    "seam",
    "formats",
)
ROOF = "the roof"
MAX_LINES = 400
OPTIONAL = {"transformers", "triton", "flashinfer", "torchao", "gguf", "sentencepiece"}

#: In two parts each, so that this file does not name them.
REGISTRY_HOSTS = [
    ".".join(parts).encode()
    for parts in (
        ("pypi", "org"),
        ("pypi.python", "org"),
        ("pythonhosted", "org"),
        ("pypi.nvidia", "com"),
        ("download.pytorch", "org"),
        ("conda.anaconda", "org"),
        ("deb.debian", "org"),
        ("security.debian", "org"),
        ("archive.ubuntu", "com"),
        ("registry.npmjs", "org"),
        ("registry.yarnpkg", "com"),
        ("crates", "io"),
        ("proxy.golang", "org"),
        ("repo.maven.apache", "org"),
        ("rubygems", "org"),
    )
]


def module_name(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(SOURCES).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCES.rglob("*.py"))}


def floor_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ROOF


def height(floor: str) -> int:
    """0 is the ground."""
    return len(FLOORS) if floor == ROOF else len(FLOORS) - 1 - FLOORS.index(floor)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, those inside functions too, except what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for other in node.orelse:
                yield other
                yield from nodes_that_run(other)
            continue
        yield node
        yield from nodes_that_run(node)


def imported_names(module: str, is_package: bool, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported, as far up as the statement tells."""
    for node in nodes_that_run(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                here = parts[: len(parts) - node.level + is_package]
                base = ".".join([*here, base] if base else here)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno


def imports_of(module: str) -> dict[str, int]:
    """Our own modules that `module` imports -> the line of the first such import."""
    path = MODULES[module]
    found: dict[str, int] = {}
    for name, line in imported_names(module, path.name == "__init__.py", ast.parse(path.read_text())):
        while name.split(".")[0] == PACKAGE:
            if name in MODULES:
                found.setdefault(name, line)
                break
            if "." not in name:
                break
            name = name.rpartition(".")[0]
    return found


def where(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def test_every_module_has_a_floor():
    homeless = [str(MODULES[m].relative_to(ROOT)) for m in MODULES if floor_of(m) not in (*FLOORS, ROOF)]
    assert not homeless, f"on no floor of DESIGN section 3 (and of FLOORS here): {homeless}"


def test_each_floor_imports_only_from_floors_below():
    upward = [
        f"{where(module, line)} imports {target}: {floor_of(module)} is not above {floor_of(target)}"
        for module in MODULES
        for target, line in imports_of(module).items()
        if floor_of(module) != floor_of(target) and height(floor_of(module)) < height(floor_of(target))
    ]
    assert not upward, "\n".join(upward)


def test_no_module_imports_itself_through_others():
    graph = {module: set(imports_of(module)) - {module} for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import circle: " + " <- ".join(error.args[1]))


def test_no_file_is_too_long():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in MODULES.values()}
    long = {path: lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torchseam.seam as s", {"torchseam.seam"}),
        ("from torchseam.seam import Norm", {"torchseam.seam.Norm"}),
        ("from . import launch", {"torchseam.kernels.launch"}),
        ("from ..formats import fp8", {"torchseam.formats.fp8"}),
        ("def f():\n    from torchseam import ops", {"torchseam.ops"}),
        ("import importlib\nimportlib.import_module('torchseam.nn')", {"importlib", "torchseam.nn"}),
        ("if TYPE_CHECKING:\n    import torchseam.cli", set()),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", {"b"}),
    ],
)
def test_imports_are_read_as_python_reads_them(source, expected):
    names = {name for name, _ in imported_names("torchseam.kernels.local", False, ast.parse(source))}
    assert names == expected


def test_importing_the_package_brings_no_optional_dependency():
    script = (
        "import json, sys, torch; before = set(sys.modules); import torchseam; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    brought = {name.split(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}
    assert PACKAGE in brought
    assert not brought & OPTIONAL


def test_no_file_names_a_package_registry():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so which files belong to it is unknown")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    assert files
    named = [
        f"{path.relative_to(ROOT)}: {host.decode()}"
        for path in files
        if path.is_file()
        for host in REGISTRY_HOSTS
        if host in path.read_bytes().lower()
    ]
    assert not named, "\n".join(named)
