"""Everything that needs CUDA GPUs, one after the other, with a summary: `make test-gpu`, or with any interpreter

    PYTHONPATH=src python3 tests/gpu.py [--list] [--only gpu_check,sanitize]

Needs torch, Triton and at least one CUDA GPU, not pytest. What needs more than the machine has is skipped, and the
summary says why. Exits with 1 when anything failed, with 2 where there is no GPU. NVLink multicast is used by none.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.find_sanitizer import WHERE, find_sanitizer

HERE = Path(__file__).resolve().parent
#: Seconds for one step: ranks that wait for each other may wait for ever.
TIMEOUT = 1200
#: A group has at most so many ranks (backends/symmetric.py).
MOST_RANKS = 8


@dataclass(frozen=True)
class Step:
    """One script, with a rank on each GPU if it needs several; `parts` of it side by side, each told `part_option` I/N.

    gpus: how many it needs at least. package: what it needs beside torch and Triton. sanitized: it needs
    compute-sanitizer.
    """

    name: str
    script: str
    gpus: int = 1
    package: str | None = None
    parts: int = 1
    part_option: str = "--table"
    sanitized: bool = False

    def missing(self, gpus: int) -> str | None:
        """Why it cannot run here."""
        if gpus < self.gpus:
            return f"needs {self.gpus} CUDA GPU(s), found {gpus}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"needs the package {self.package}"
        if self.sanitized and find_sanitizer() is None:
            return f"needs {WHERE}"
        return None

    def commands(self, gpus: int) -> list[list[str]]:
        """What to run side by side."""
        command = [sys.executable]
        if self.gpus > 1:
            # --standalone: a port that is free.
            ranks = str(min(gpus, MOST_RANKS))
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command.append(str(HERE / self.script))
        if self.parts == 1:
            return [command]
        return [[*command, self.part_option, f"{part}/{self.parts}"] for part in range(1, self.parts + 1)]


STEPS = (
    Step("gpu_check", "kernels/gpu_check.py"),
    Step("one_gpu_check", "kernels/one_gpu_check.py"),
    Step("sanitize", "kernels/sanitize.py", sanitized=True),
    Step("symmetric_table", "kernels/symmetric_check.py", gpus=2, parts=8),
    Step("symmetric_check", "kernels/symmetric_check.py", gpus=2),
    Step("two_shot_table", "kernels/two_shot_check.py", gpus=2, parts=4, part_option="--part"),
    Step("two_shot_check", "kernels/two_shot_check.py", gpus=2),
    Step("tuned_check", "kernels/tuned_check.py", gpus=2),
    Step("sharded_check", "compiler/sharded_check.py", gpus=2),
    Step("flashinfer_check", "backends/flashinfer_check.py", gpus=2, package="flashinfer"),
)


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(HERE.parent / "src"), os.environ.get("PYTHONPATH"))))
    off = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    return {**os.environ, **off, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(step: Step, gpus: int, timeout: float = TIMEOUT) -> str:
    """Run a step, its output as it comes; what the summary says of it."""
    if reason := step.missing(gpus):
        return f"skipped: {reason}"
    print(f"---- {step.name}", flush=True)
    started = time.monotonic()
    # Sessions of their own: a step that is late is ended with all that it started.
    children = [subprocess.Popen(c, env=environment(), start_new_session=True) for c in step.commands(gpus)]
    statuses: list[int | None] = []
    for child in children:
        try:
            statuses.append(child.wait(max(timeout - (time.monotonic() - started), 0.1)))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            statuses.append(None)
    took = f"{time.monotonic() - started:.0f} s"
    if None in statuses:
        return f"FAILED: not done after {took}"
    bad = [status for status in statuses if status]
    return f"FAILED: exit status {', '.join(map(str, bad))}, {took}" if bad else f"passed, {took}"


def main(steps: tuple[Step, ...] = STEPS) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of steps, with commas between them; default: all")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else [step.name for step in steps]
    known = [step.name for step in steps]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only has {', '.join(unknown)}; allowed: {', '.join(known)}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = [step for step in steps if step.name in names]
    if given.list:
        for step in chosen:
            print(f"{step.name}: {step.missing(gpus) or 'runs'}")
        return 0
    if not gpus:
        print(
            f"These tests need a CUDA GPU, and torch {torch.__version__} sees none. `make test` runs what needs none.",
            file=sys.stderr,
        )
        return 2
    print(f"{gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    told = {step.name: run(step, gpus) for step in chosen}
    print("---- summary")
    for name, outcome in told.items():
        print(f"{name}: {outcome}")
    failed = sum(outcome.startswith("FAILED") for outcome in told.values())
    skipped = sum(outcome.startswith("skipped") for outcome in told.values())
    print(f"{len(told) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
