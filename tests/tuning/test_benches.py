"""Ranks that time together choose together: `tune_ranks.py` in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


RANKS = 3


def test_all_ranks_choose_what_is_fastest_on_the_slowest_of_them(tmp_path):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parents[1] / "src"),
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "tune_ranks.py"), str(RANKS), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = {line.partition("chose ")[2] for line in ran.stdout.splitlines() if "chose" in line}
    assert len(lines) == 1 and "ahead=4" in lines.pop()
    assert ran.stdout.count("chose") == RANKS
