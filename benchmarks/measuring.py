"""What the benchmarks of the kernels share: the schemes and the table of results. The timer is torchseam's own.

They time the launches that are shipped, whatever `torchseam tune` has found on the machine.
"""

from __future__ import annotations

import csv
import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton

from torchseam.config import TUNED_VARIABLE
from torchseam.seam import Quant

#: One row a measurement.
COLUMNS = (
    *("date", "gpu", "world_size", "torch", "triton", "flashinfer", "commit", "command"),
    *("scheme", "hidden", "tokens", "implementation", "microseconds", "limit_microseconds"),
)
SCHEMES = {q.scheme: q for q in (Quant("fp8_static"), Quant("fp8_token"), Quant("fp8_group"), Quant("nvfp4"))}


def launch_as_shipped() -> None:
    """This process and its children use no tuned table."""
    os.environ[TUNED_VARIABLE] = "0"


@contextmanager
def results(
    file: Path | None, world_size: int, commit: str | None, append: bool = False
) -> Iterator[Callable[..., None]]:
    """What adds a row (the columns from `scheme` on) to a CSV file, which has it at once; None: nothing is written.

    `commit`: what was measured, where git cannot tell. `append`: the file keeps the rows that it has.
    """
    if file is None:
        yield lambda *row: None
        return
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    launcher = f"torchrun --nproc-per-node {world_size}" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    fixed = (
        datetime.date.today().isoformat(),
        torch.cuda.get_device_name(),
        world_size,
        torch.__version__,
        triton.__version__,
        "",
        commit or said,
        f"PYTHONPATH=src {launcher} {' '.join(sys.argv)}",
    )
    has_rows = append and file.exists()
    with file.open("a" if append else "w", newline="") as opened:
        writer = csv.writer(opened)
        if not has_rows:
            writer.writerow(COLUMNS)

        def add(*row: object) -> None:
            writer.writerow((*fixed, *row))
            opened.flush()

        yield add
