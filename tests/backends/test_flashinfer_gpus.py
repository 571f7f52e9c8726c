"""FlashInfer's backends on real GPUs, where there are any: flashinfer_check.py under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("flashinfer_check.py")


def check(*options: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(CHECK), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert " 0 bad" in done.stdout


@pytest.mark.needs_two_gpus
@pytest.mark.needs_flashinfer
@pytest.mark.timeout(1000)
def test_trtllm():
    check()


@pytest.mark.needs_multicast
@pytest.mark.needs_flashinfer
@pytest.mark.timeout(1000)
def test_mnnvl():
    check("--backend", "mnnvl")
