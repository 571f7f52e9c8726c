"""Every command and every snippet in README.md and docs/ runs, and what the README shows is what the demo prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for page in PAGES for kind, text in _FENCE.findall(page.read_text()) if kind == language]


def commands() -> list[str]:
    lines = [line for text in blocks("bash") for line in text.splitlines() if line.strip()]
    return [line.split(" # ")[0].split("  #")[0].strip() for line in lines]


def environment(tmp_path: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def run(command: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    # The demo takes a minute or two where nothing else runs, and several beside other tests on two cores.
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_pages_have_commands_and_snippets():
    assert len(commands()) >= 5
    assert len(blocks("python")) >= 1


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_targets_exist(command, tmp_path):
    """They set up `.venv` and run this very suite or the demo, so here make only says what it would do."""
    done = run([*shlex.split(command)[:1], "-n", *shlex.split(command)[1:]], tmp_path)
    target = {"demo": "torchseam demo", "test": "pytest"}[shlex.split(command)[1]]
    assert target in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("make ")])
def test_commands_run(command, tmp_path, converted_gemma):
    done = run(shlex.split(command), tmp_path)
    assert done.stdout.strip()


@pytest.mark.parametrize("snippet", blocks("python"))
def test_python_snippets_run(snippet, tmp_path):
    prelude = "import torch\nmodel, inputs = torch.nn.RMSNorm(64), torch.ones(2, 64)\n"
    done = run([sys.executable, "-c", prelude + snippet], tmp_path)
    assert "0 seams fused" in done.stdout


def test_relative_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
