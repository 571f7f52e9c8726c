"""The kernels under NVIDIA's compute-sanitizer, on one GPU: no byte out of bounds, no race in shared memory.

    PYTHONPATH=src python3 tests/kernels/sanitize.py [--tools memcheck,racecheck] [--workers N]

A small run: the local kernel with every quantiser in every layout, with rows that fill their block and rows that do
not, and both collective kernels on rows as models have them, one rank after the other: a rank that finds nothing
gives up, the next finds all rows that it needs (one-shot's results are compared; two-shot's second half works on what
the first rank gave up on). First without a tool, which compiles; then with each. Tensors
are allocated one by one, so that the byte after one belongs to none. Then a write past the end, planted, must be
found. Prints the tools' reports and a summary line; exits with 1 on any, with 2 where something is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kernel_cases
import one_gpu_cases
import one_gpu_check
import torch
import triton
import triton.language as tl
from collective_cases import Call, same_storage
from find_sanitizer import WHERE, find_sanitizer
from kernel_cases import Case

from torchseam.kernels import local, one_shot

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Blocks that are full, and not; 16 has fewer scales than a tile's columns; 8192 is a row in several warps' shares.
HIDDENS = (640, 4096, 464, 2880, 16, 8192)
#: A tile of 128 rows of scales and a part of one, with the special rows.
TOKENS = 121
#: Of the GPU, as far as the choice of launches goes.
MULTIPROCESSORS = 132
#: Seconds for all of one tool; a hang is no pass.
TIMEOUT = 500
#: What the tool exits with when it has found something.
FOUND = 9
PLANTED = "planted"


# ---- what runs --------------------------------------------------------------------------------


def local_cases() -> list[Case]:
    """One seam and one quantiser alone for every quantiser, and one seam for every norm."""
    kept: dict[object, Case] = {}
    for case in kernel_cases.cases(HIDDENS):
        if case.seam is None:
            kept.setdefault(("alone", case.quant), case)
        elif case.dtype == torch.bfloat16:
            kept.setdefault(("quantiser", case.seam.quants), case)
            kept.setdefault(("norm", case.seam.norm, case.weight_dtype, case.seam.inner_norm is None), case)
    return list(dict.fromkeys(kept.values()))


def run_local(index: int, case: Case) -> list[str]:
    given = kernel_cases.inputs(case, TOKENS, seed=index)
    return kernel_cases.check(case, given, local.run, local.quantize, device="cuda", also_own=False)


def collective_calls() -> list[Call]:
    """For two ranks: every quantiser, every launch that is chosen for some T, the fewest and the most rows."""
    calls = one_gpu_cases.long_rows(2, one_gpu_cases.programs_of_rank(2, MULTIPROCESSORS))
    return [call for call in calls if call.terms[0].shape[0] in (one_gpu_cases.TOKENS[0], one_gpu_cases.TOKENS[-1])]


def run_collective(call: Call) -> list[str]:
    """Each rank once as the second, which has all the rows that it waits for."""
    broken = []
    ranks = one_gpu_check.Ranks(2)
    moved = one_gpu_check.on_gpu(call)
    expected = moved.by_kernel()
    for order in ((0, 1), (1, 0)):
        for rank in order:
            got = ranks.run(moved, rank, ranks.alone if rank == order[0] else None)
            torch.cuda.synchronize()
        if call.run is one_shot.run:
            if not all(same_storage(a, b) for a, b in zip(got, expected, strict=True)):
                broken.append(f"rank {rank} differs")
            if left := int((ranks.buffers[rank] != 0xFF).sum()):
                broken.append(f"rank {rank} leaves {left} bytes in its buffer")
        ranks.reset()
    return broken


@triton.jit
def write_beyond_kernel(x_ptr, count):
    """Write past the end of x."""
    tl.store(x_ptr + count, 1)


def run_part(part: int, parts: int) -> int:
    """Every `parts`-th case; prints what differs."""
    torch.set_num_threads(1)
    work = [(run_local, (i, case), str(case)) for i, case in enumerate(local_cases())]
    work += [(run_collective, (call,), str(call)) for call in collective_calls()]
    failed = 0
    for run, arguments, name in work[part::parts]:
        if broken := run(*arguments):
            failed += 1
            print(f"MISMATCH {name}: {broken}", flush=True)
    print(f"part {part + 1} of {parts}: {len(work[part::parts])} cases, {failed} with a mismatch", flush=True)
    return int(failed > 0)


# ---- the tool ---------------------------------------------------------------------------------


def start(prefix: list[str], *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A child of this script under `prefix`, and the file that gets what it prints."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    handle, name = tempfile.mkstemp(suffix=".log")
    with open(handle, "wb") as output:
        command = [*prefix, sys.executable, __file__, *arguments]
        # A session of its own: the tool's child must not outlive it.
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return child, Path(name)


def finish(child: subprocess.Popen[bytes], log: Path, until: float) -> tuple[int, str]:
    """(exit status, what was printed); a child that is late is killed."""
    try:
        status = child.wait(max(until - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
    text = log.read_text(errors="replace")
    log.unlink()
    return status, text


def prefix_of(sanitizer: str, tool: str) -> list[str]:
    """Errors that CUDA's own calls return are none of ours: torch and Triton try what a GPU may not have."""
    options = ["--error-exitcode", str(FOUND), "--report-api-errors", "no", "--target-processes", "application-only"]
    return [sanitizer, "--tool", tool, *options, "--print-limit", "20"]


def run_all(name: str, prefix: list[str], workers: int) -> bool:
    """Every part side by side; prints reports and returns whether all were clean."""
    started = time.monotonic()
    children = [start(prefix, "--part", str(i), "--parts", str(workers)) for i in range(workers)]
    ended = [finish(*child, started + TIMEOUT) for child in children]
    for status, text in ended:
        if status:
            print(f"{name}: a part ended with {status}:\n{text[-6000:]}", flush=True)
    summaries = {line.strip("= ") for _, text in ended for line in re.findall(r".*SUMMARY.*", text)}
    bad = sum(status != 0 for status, _ in ended)
    print(
        f"{name}: {'clean' if not bad else f'{bad} of {workers} parts FAILED'} {sorted(summaries) or ''} "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    return not bad


def finds_what_is_planted(sanitizer: str) -> bool:
    """Whether memcheck reports a write past the end: else its silence means nothing."""
    status, text = finish(*start(prefix_of(sanitizer, "memcheck"), "--part", PLANTED), time.monotonic() + TIMEOUT)
    found = status == FOUND and "Invalid __global__ write" in text
    print(f"planted write: {'found' if found else f'NOT found, exit status {status}:{chr(10)}{text[-3000:]}'}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default="memcheck,racecheck", help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == PLANTED:
        x = torch.zeros(128, dtype=torch.int32, device="cuda")
        write_beyond_kernel[(1,)](x, x.numel())
        torch.cuda.synchronize()
        return 0
    if given.part is not None:
        with kernel_cases.poisoned_outputs():
            return run_part(int(given.part), given.parts)

    tools = given.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"--tools has {', '.join(sorted(unknown))}; allowed: {', '.join(TOOLS)}")
    sanitizer = find_sanitizer()
    if not torch.cuda.is_available():
        print("sanitize needs a CUDA GPU; none is visible to torch", file=sys.stderr)
        return 2
    if sanitizer is None:
        print(f"sanitize needs {WHERE}", file=sys.stderr)
        return 2
    print(f"{sanitizer} on {torch.cuda.get_device_name()}", flush=True)
    clean = run_all("without a tool", [], given.workers)
    clean = finds_what_is_planted(sanitizer) and clean
    for tool in tools:
        clean = run_all(tool, prefix_of(sanitizer, tool), given.workers) and clean
    print(f"{Path(__file__).name}: {'passed' if clean else 'FAILED'}")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
