"""The benchmark of a seam that no fused backend takes runs, and the operator's own host time stays small."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "unfused_cost.py"
#: Host time of the operator without its work, us: 6 on a 2 GHz core. A bound that only a new kind of work would break.
OPERATOR_US = 100.0


@pytest.fixture
def unfused_cost(monkeypatch):
    spec = importlib.util.spec_from_file_location("unfused_cost", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "unfused_cost", module)  # where its dataclass looks for its own annotations
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SECONDS", 0.05)
    return module


def test_one_size_is_measured(unfused_cost, one_rank, fresh_dynamo, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    row = unfused_cost.measure(3, 128, torch.device("cpu"))
    assert min(row.unfused, row.fused, row.operator, row.functional) > 0
    assert row.operator < OPERATOR_US
    assert "128" in unfused_cost.table([row])
