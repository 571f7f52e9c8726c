"""Runs the interpreted test modules of this folder in child processes (see conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


# About a minute of one free core; the limit is for machines that share theirs.
@pytest.mark.timeout(900)
def test_interpreted_kernels_meet_the_contract(interpreted_module):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(HERE / interpreted_module),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # What an outer pytest or xdist worker sets is meant for that process alone.
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True)
    sys.stdout.write(run.stdout)
    sys.stderr.write(run.stderr)
    assert run.returncode == 0, f"{interpreted_module} failed in its own process:\n{run.stdout[-4000:]}"
