"""FlashInfer's real kernels between real GPUs: each kind of seam against the reference, eager and in CUDA graphs.

    torchrun --nproc-per-node 2 tests/backends/flashinfer_check.py [--backend trtllm|mnnvl]

Needs torch with CUDA, flashinfer and as many GPUs as ranks, not pytest. Prints what differs, how each kind of seam
was run, and a summary; exits with 1 on any mismatch. mnnvl makes NVLink multicast objects: nothing else here does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from torch import Tensor

from torchseam import reference
from torchseam.backends import select
from torchseam.formats import layout
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

BF16, F16 = torch.bfloat16, torch.float16
TOKENS = (1, 2, 5, 16, 64, 127, 128, 129, 1000)
HIDDEN = (2048, 4096, 5120, 8192)
PACKED = Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed", scale_floor=1e-10)
QUANTS = (
    (),
    (Quant("fp8_static", rule="reciprocal"),),
    (Quant("fp8_static"),),
    (Quant("fp8_token"),),
    (Quant("fp8_group"),),
    (Quant("nvfp4"),),
    (Quant("nvfp4", scale_layout="linear"),),
    (PACKED,),
)
#: With the dtype of the weight; bf16 means that of the activations.
NORMS = (
    (Norm(1e-6), BF16),
    (Norm(1e-5, offset=1), BF16),
    (Norm(1e-6), torch.float32),
    (Norm(1e-6, "after_cast"), BF16),
    (Norm(1e-6, "none"), BF16),
)
REPLAYS = 5


@dataclass(frozen=True)
class Case:
    seam: Seam
    tokens: int
    hidden: int
    dtype: torch.dtype
    weight_dtype: torch.dtype


def cases(group: str, backend: str) -> Iterator[Case]:
    reduce = Reduce(group, backend)
    count = 0
    for norm, weight_dtype in NORMS:
        for quants in QUANTS:
            for with_norm in (True, False) if quants else (True,):
                outputs = ("residual", "norm") if with_norm else ("residual",)
                seam = Seam(norm, reduce, residual=True, quants=quants, outputs=outputs)
                for tokens in TOKENS:
                    # Every kind of seam meets every number of rows; hidden sizes and fp16 take turns.
                    count += 1
                    dtype = F16 if count % 5 == 0 else BF16
                    weight = dtype if weight_dtype == BF16 else weight_dtype
                    yield Case(seam, tokens, HIDDEN[count % len(HIDDEN)], dtype, weight)
    for tokens in TOKENS:
        outputs = ("reduced", "norm")
        yield Case(Seam(Norm(1e-6), reduce, outputs=outputs), tokens, 4096, BF16, BF16)
        # Ten groups: the last word of a row is half padding.
        seam = Seam(Norm(1e-6), reduce, residual=True, quants=(PACKED,), outputs=("residual",))
        yield Case(seam, tokens, 1280, BF16, BF16)


def operands(case: Case, rank: int, seed: int) -> Operands:
    device = torch.device("cuda", torch.cuda.current_device())
    own = torch.Generator(device).manual_seed(1000 * seed + rank + 1)
    shared = torch.Generator(device).manual_seed(1000 * seed)
    shape = (case.tokens, case.hidden)
    x = torch.randn(shape, device=device, generator=own).to(case.dtype)
    residual = torch.randn(shape, device=device, generator=shared).to(case.dtype) if case.seam.residual else None
    weight = None
    if case.seam.norm.has_weight:
        weight = (torch.rand(case.hidden, device=device, generator=shared) + 0.5).to(case.weight_dtype)
    numbers = {"fp8_static": 0.013, "nvfp4": 448 * 6 / 8.0}
    scales = tuple(torch.tensor([numbers[q.scheme]], device=device) for q in case.seam.quants if q.takes_scale)
    return Operands(x, residual, weight=weight, scales=scales)


def all_reduce(x: Tensor) -> Tensor:
    """The sum in fp32 and rank order."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    return total.to(x.dtype)


def steps(a: Tensor, b: Tensor) -> Tensor:
    """How many numbers of their format lie between a and b."""

    def place(t: Tensor) -> Tensor:
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[t.itemsize]
        bits = t.contiguous().view(integers).long()
        least = -(2 ** (8 * t.itemsize - 1))
        return torch.where(bits < 0, least - bits, bits)

    return (place(a) - place(b)).abs()


def packed_scales(ours: Tensor, theirs: Tensor, groups: int) -> tuple[Tensor, list[str]]:
    """Which groups [T, G] have another exponent, and what of that (or of the padding) is not allowed.

    A norm 1 ulp away moves an exponent where amax / 448 sits on a power of two, which is seldom.
    """
    if (ours.dtype, ours.shape, ours.stride()) != (theirs.dtype, theirs.shape, theirs.stride()):
        none = torch.zeros(len(theirs), groups, dtype=torch.bool, device=theirs.device)
        return none, [f"packed scales are {ours.dtype} {ours.shape} {ours.stride()}"]
    exponents = [layout.unpack_group_scales(t, groups) for t in (ours, theirs)]
    off = (exponents[0].view(torch.uint8).int() - exponents[1].view(torch.uint8).int()).abs()
    found = []
    if int(off.max()) > 1 or float((off > 0).float().mean()) > 0.01:
        found.append(f"packed scales: {int((off > 0).sum())} of {off.numel()} differ, by up to {int(off.max())}")
    again = layout.lay_out_group_scales(exponents[0], "ue8m0", layout.PACKED)
    bytes_of = [torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in (ours, again)]
    if not torch.equal(*bytes_of):
        found.append("packed scales: padding is not 0")
    return off > 0, found


def differences(case: Case, got: list[Tensor], given: Operands) -> list[str]:
    """What is further from the reference than DESIGN section 4 allows."""
    expected = reference.run(case.seam, given, all_reduce)
    found = []
    for name, ours, theirs in zip(case.seam.outputs, got, expected, strict=False):
        allowed = 1 if name == "norm" else 0
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            found.append(f"{name} is {ours.dtype} {tuple(ours.shape)}")
        elif int(steps(ours, theirs).max()) > allowed:
            found.append(f"{name}: {int((steps(ours, theirs) > allowed).sum())} values off")
    if not case.seam.quants:
        return found
    quant = case.seam.quants[0]
    mine, theirs_all = got[len(case.seam.outputs) :], expected[len(case.seam.outputs) :]
    # A norm 1 ulp away moves a code by a step, and the amax of a row or block with it.
    codes, wanted = mine[0], theirs_all[0]
    if quant.scheme == "nvfp4":
        nibbles = [torch.stack((c & 15, c >> 4)).to(torch.int16) for c in (codes, wanted)]
        signed = [torch.where(n > 7, 7 - n, n) for n in nibbles]
        off = (signed[0] - signed[1]).abs()
        off = torch.where((nibbles[0] & 7 == 0) & (nibbles[1] & 7 == 0), 0, off)
    else:
        off = steps(codes, wanted)
    if quant == PACKED:
        moved, broken = packed_scales(mine[1], theirs_all[1], case.hidden // quant.group_size)
        off = torch.where(moved.repeat_interleave(quant.group_size, dim=1), 0, off)
        found += broken
    share = float((off > 0).float().mean())
    if int(off.max()) > 1 or share > 0.02:
        found.append(f"{quant.scheme} codes: {share:.2%} differ, by up to {int(off.max())} steps")
    if quant.emits_scale and quant != PACKED:
        # An e4m3 scale may move by a step; an fp32 one by the ulp of the bf16 amax that it comes from.
        allowed = 1 if quant.scheme == "nvfp4" else 2**16
        off = int(steps(mine[1], theirs_all[1]).max())
        if off > allowed:
            found.append(f"{quant.scheme} scales differ by up to {off} steps")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("trtllm", "mnnvl"), default="trtllm")
    parser.add_argument("--every", type=int, default=1, help="run every n-th case")
    options = parser.parse_args()
    backend, every = options.backend, options.every
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = dist.group.WORLD.group_name
    started, bad, count = time.monotonic(), 0, 0
    for index, case in enumerate(cases(group, backend)):
        if index % every:
            continue
        count += 1
        given = operands(case, rank, index)
        found = differences(case, select.run(case.seam, given), given)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = select.run(case.seam, given)
        for replay in range(REPLAYS):
            fresh = operands(case, rank, 7 * index + replay)
            given.x.copy_(fresh.x)
            if given.residual is not None:
                given.residual.copy_(fresh.residual)
            graph.replay()
            found += [f"replay {replay}: {f}" for f in differences(case, captured, given)]
        if found:
            bad += 1
            print(f"rank {rank}: MISMATCH {case}: {found}", flush=True)
    torch.cuda.synchronize()
    if rank == 0:
        (opened,) = select.opened()
        print(f"{select.chosen(group)}: {count} cases, {bad} bad, {time.monotonic() - started:.0f} s, ", end="")
        print(f"{opened.memory() >> 20} MiB a rank; remarks:", *select.remarks(group), sep="\n  ")
    dist.barrier()
    select.reset()
    dist.destroy_process_group()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
