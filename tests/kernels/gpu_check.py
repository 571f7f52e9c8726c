"""The kernels on a real GPU: every combination and every launch choice.

    PYTHONPATH=src python3 tests/kernels/gpu_check.py [--workers N]

Needs torch, Triton and one CUDA GPU, not pytest. Prints what differs and a summary line; exits with 1
on any mismatch. Compilation is most of the work, so the table is split over processes that share the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import kernel_cases
import torch
import triton
import triton.language as tl
from kernel_cases import Case, check, inputs, same, storage
from torch import Tensor

from torchseam import ops, reference
from torchseam.backends import local as backend
from torchseam.kernels import casts, launch, local
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Seam

#: Hidden sizes per group; the groups make `launch.choose` return every choice, and each block size
#: of the largest one. 16, 464 and 2880 don't fill their blocks; 32768 is the largest row.
HIDDEN_GROUPS = (
    (640, 464, 2048, 16, 1024),
    (2880, 4096, 2560, 3072),
    (8192, 5120, 7168, 6144),
    (16384, 32768, 12288, 24576),
)
TOKENS = {640: 129, 2880: 129, 8192: 65, 16384: 17}
#: Every how many cases the launch with only the case's own outputs is compared too (each is one more
#: compilation), and every choice's bits with each other's.
OWN_OUTPUTS_EVERY = 4
ALL_CHOICES_EVERY = 16
BIG_TOKENS, BIG_HIDDEN = 2**31 // 8192 + 3, 8192


# ---- correctness ------------------------------------------------------------------------------


def table() -> list[tuple[Case, int]]:
    return [(case, TOKENS[group[0]]) for group in HIDDEN_GROUPS for case in kernel_cases.cases(group)]


def check_shard(shard: int, shards: int) -> int:
    """Run every `shards`-th case from `shard` on; print what differs, then `done <cases> <launches>`."""
    torch.set_num_threads(1)
    broken_cases = 0
    launches = 0
    mine = list(enumerate(table()))[shard::shards]
    for index, (case, tokens) in mine:
        given = inputs(case, tokens, seed=index)
        own = index % OWN_OUTPUTS_EVERY == 0
        broken = check(case, given, local.run, local.quantize, device="cuda", also_own=own)
        launches += 1 + own
        if index % ALL_CHOICES_EVERY == 0:
            broken += choices_that_differ(case, given)
            launches += len(launch.CHOICES)
        # Small T is where codes were once wrong in some launch shapes only (FIELD section 1, "A trap").
        broken += [f"T=1: {b}" for b in check(case, given.rows(slice(0, 1)), local.run, local.quantize, "cuda", False)]
        launches += 1
        if broken:
            broken_cases += 1
            print(f"MISMATCH {case}: {broken}", flush=True)
    print(f"done {len(mine)} {launches} {broken_cases}", flush=True)
    return broken_cases


def choices_that_differ(case: Case, given: kernel_cases.Inputs) -> list[str]:
    """Launch choices whose bits are not those of the first."""
    on_gpu = given.to("cuda")

    def run(choice: launch.Launch) -> list[Tensor]:
        if case.seam is None:
            return local.quantize(on_gpu.x, case.quant, *(on_gpu.scales or [None]), launch=choice)
        return local.run(kernel_cases.everything(case.seam), on_gpu.operands(), launch=choice)

    first, *others = [run(choice) for choice in launch.CHOICES]
    return [
        f"{choice} gives other bits than {launch.CHOICES[0]}"
        for choice, outputs in zip(launch.CHOICES[1:], others, strict=True)
        if not all(same(a, b) for a, b in zip(first, outputs, strict=True))
    ]


def check_table(workers: int) -> int:
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__, "--shards", str(workers), "--shard"]
    children = [
        subprocess.Popen(
            [*command, str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(workers)
    ]
    cases = launches = broken = failed = 0
    for child in children:
        output, _ = child.communicate()
        *lines, last = output.strip().splitlines() or [""]
        if last.startswith("done "):
            counts = [int(n) for n in last.split()[1:]]
            cases, launches, broken = cases + counts[0], launches + counts[1], broken + counts[2]
        else:
            failed += 1
            lines.append(last)
        print("\n".join(lines[-40:]), end="\n" if lines else "")
    print(
        f"table: {cases} cases, {launches} kernel runs, {broken} with a mismatch, {failed} of {workers} workers "
        f"died, {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return broken + failed


def check_padding() -> list[str]:
    """Scales' padding is zero whatever was there, at every T and H at which tiles fill or overflow."""
    broken = []
    for quant, tokens, hidden in itertools.product(
        kernel_cases.PADDED_QUANTIZERS, (1, 5, 31, 32, 33, 127, 128, 129), (16, 464, 1040, 640, 4096)
    ):
        if hidden % quant.multiple_of:
            continue
        y = torch.randn(tokens, hidden)
        scale = torch.tensor([700.0]) if quant.takes_scale else None
        with kernel_cases.poisoned_outputs():
            got = local.quantize(y.cuda(), quant, None if scale is None else scale.cuda())
        for a, b in zip(got, reference.quantize(y, quant, scale), strict=True):
            if not torch.equal(storage(a).cpu(), storage(b)):
                broken.append(f"{quant.scheme} {quant.scale_layout} T={tokens} H={hidden}: bytes differ")
    return broken


def check_offsets_beyond_32_bits() -> list[str]:
    """The last rows of a tensor of more than 2^31 elements are what they are alone."""
    broken = []
    weight = torch.randn(BIG_HIDDEN, device="cuda")
    x = torch.empty(BIG_TOKENS, BIG_HIDDEN, dtype=torch.bfloat16, device="cuda").normal_()
    for quant in (
        Quant("fp8_static"),
        Quant("fp8_group", scale_dtype="ue8m0", scale_layout="tma_aligned"),
        Quant("nvfp4", scale_layout="linear"),
    ):
        seam = Seam(norm=Norm(1e-6), residual=True, quants=(quant,), outputs=("residual", "norm"))
        scales = (torch.tensor([0.01], device="cuda"),) if quant.takes_scale else ()
        whole = local.run(seam, Operands(x, x, None, weight, scales))
        end = local.run(seam, Operands(x[-5:], x[-5:], None, weight, scales))
        for many, few in zip(whole, end, strict=True):
            if not torch.equal(kernel_cases.bits(many[-5:]), kernel_cases.bits(few)):
                broken.append(f"{quant.scheme}: the last of {BIG_TOKENS} rows differ from the same rows alone")
        del whole
    return broken


def check_operators() -> list[str]:
    """The public operators reach the kernel on CUDA, in and out of a CUDA graph."""
    broken = []
    seam = Seam(norm=Norm(1e-6), residual=True, quants=(Quant("fp8_static"), Quant("nvfp4")), outputs=("residual",))
    case = Case(seam, None, 4096, torch.bfloat16)
    given = inputs(case, 37).to("cuda")
    if backend._kernel_for(given.x, seam.quants) is not local:
        broken.append("the local backend does not choose the kernel for a CUDA tensor")
    expected = local.run(seam, given.operands())
    keywords = {"residual": given.residual, "weight": given.weight, "scales": given.scales}
    got = ops.seam(seam, given.x, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.seam(seam, given.x, **keywords)
    for t in captured:
        (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).zero_()
    graph.replay()
    for what, outputs in (("operator", got), ("replayed graph", captured)):
        if not all(same(a, b) for a, b in zip(outputs, expected, strict=True)):
            broken.append(f"{what}: other bits than the kernel's own")
    empty = ops.seam(seam, given.x[:0], residual=given.residual[:0], weight=given.weight, scales=given.scales)
    if any(t.numel() for t in empty):
        broken.append("T = 0: outputs are not empty")
    return broken


def check_tiny_rows() -> list[str]:
    """The GPU's estimate of an inverse root takes subnormal numbers for 0; the kernel must not."""
    case, given = kernel_cases.tiny_case()
    return check(case, given, local.run, local.quantize, device="cuda")


@triton.jit
def divide_kernel(a_ptr, b_ptr, quick_ptr, long_ptr, count, BLOCK: tl.constexpr):
    """The e4m3 codes of a / b: by `casts.divide` and the GPU's conversion, and by the long way."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(a_ptr + at, mask=inside, other=1.0)
    b = tl.load(b_ptr)
    tl.store(quick_ptr + at, casts.to_e4m3_native(casts.divide(a, b)).to(tl.uint8, bitcast=True), mask=inside)
    tl.store(long_ptr + at, casts.to_e4m3(tl.div_rn(a, b)).to(tl.uint8), mask=inside)


def check_divide() -> list[str]:
    """All 65,536 bf16 values and random fp32 ones over scales from 1e-24 to 1e30: the same codes both ways."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    every = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    wrong = 0
    for round_ in range(300):
        exponent = torch.empty(2, device="cuda").uniform_(-6, 6, generator=generator)
        drawn = torch.randn(2**20, device="cuda", generator=generator) * 10 ** exponent[0]
        a = every if round_ % 2 else drawn
        b = 10 ** torch.empty(1, device="cuda").uniform_(-23.9, 29.9, generator=generator)
        if round_ % 3 == 0:
            b = torch.empty(1, device="cuda").uniform_(0.001, 2, generator=generator)
        quick, long = (torch.empty(a.shape, dtype=torch.uint8, device="cuda") for _ in range(2))
        grid = (triton.cdiv(a.numel(), 1024),)
        divide_kernel[grid](a, b, quick, long, a.numel(), 1024, enable_fp_fusion=False)
        nan = (quick & 0x7F == 0x7F) & (long & 0x7F == 0x7F)
        wrong += int(((quick != long) & ~nan).sum())
    return [f"{wrong} codes differ"] if wrong else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.shard is not None:
        with kernel_cases.poisoned_outputs():
            return 1 if check_shard(given.shard, given.shards) else 0

    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU; none is visible to torch", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    mismatches = check_table(given.workers)
    for checked in (check_tiny_rows, check_divide, check_padding, check_operators, check_offsets_beyond_32_bits):
        broken = checked()
        torch.cuda.empty_cache()
        print(f"{checked.__name__}: {broken or 'ok'}", flush=True)
        mismatches += len(broken)
    print(f"{Path(__file__).name}: {'FAILED' if mismatches else 'passed'}, {mismatches} mismatches")
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
