"""The wheel: what it holds, and that it works with torch, typer and rich alone."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
REQUIRED = ("torch", "typer", "rich")
ABSENT = ("transformers", "triton", "flashinfer", "torchao", "gguf", "sentencepiece", "numpy")

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def with_dependencies(names: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that `names` need, themselves included, extras and ABSENT left out."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found or name in ABSENT:
            continue
        found[name] = importlib.metadata.distribution(name)
        for line in found[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves build/ and an egg-info beside the sources."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and, as links, only the packages that it requires."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    for distribution in with_dependencies(REQUIRED).values():
        files = distribution.files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return home


def test_wheel_holds_the_type_marker_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "torchseam/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith(("torchseam/", "torchseam-"))]


def test_import_works_with_required_packages_alone(empty_venv):
    script = f"""
import importlib.util, json, pathlib, sys
import torchseam
print(json.dumps({{
    "home": str(pathlib.Path(torchseam.__file__)),
    "present": [name for name in {ABSENT!r} if importlib.util.find_spec(name)],
}}))
"""
    seen = json.loads(run(empty_venv / "bin" / "python", "-I", "-c", script, cwd=empty_venv).splitlines()[-1])
    assert seen["home"].startswith(str(empty_venv))
    assert seen["present"] == []


def test_entry_points_lead_somewhere(empty_venv):
    script = """
import importlib.metadata
for point in importlib.metadata.distribution("torchseam").entry_points:
    print(point.group, point.name, callable(point.load()))
"""
    lines = run(empty_venv / "bin" / "python", "-I", "-c", script, cwd=empty_venv).splitlines()
    assert sorted(lines) == ["console_scripts torchseam True", "torch_dynamo_backends torchseam True"]


def test_command_explains_itself(empty_venv):
    assert "demo" in run(empty_venv / "bin" / "torchseam", "--help", cwd=empty_venv)
