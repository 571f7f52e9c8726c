"""The one-shot kernel between real processes: `one_shot_ranks.py` in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_has_the_sum_in_rank_order_and_all_that_follows(ranks, tmp_path):
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1] / "src")]),
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(here / "one_shot_ranks.py"), str(ranks), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("calls exact") == ranks
