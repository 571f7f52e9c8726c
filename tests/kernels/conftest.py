"""Kernels run on a CPU in Triton's interpreter, which a process chooses before it imports Triton.

So the interpreted modules are collected only under TRITON_INTERPRET=1, and test_kernel_interpreted.py
runs each of them in a child process with it set; the others need a Triton that compiles.
"""

from __future__ import annotations

import os

import pytest

INTERPRETED = (
    "test_kernel_casts.py",
    "test_kernel_exchange.py",
    "test_kernel_local.py",
    "test_kernel_stores.py",
    "test_kernel_tuning.py",
    "test_one_shot.py",
    "test_symmetric.py",
    "test_two_shot.py",
)
COMPILED = ("test_collective_build.py", "test_kernel_build.py", "test_kernel_interpreted.py")

collect_ignore = list(COMPILED if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETED)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "interpreted_module" in metafunc.fixturenames:
        metafunc.parametrize("interpreted_module", INTERPRETED)
