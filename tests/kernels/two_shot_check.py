"""The two-shot kernel on real GPUs, one rank on each: its bits are one-shot's, and how long both take.

    PYTHONPATH=src torchrun --nproc-per-node 2 tests/kernels/two_shot_check.py [--hidden 4096,8192] [--tokens 1,2,...]
        [--calls 20000] [--part I/N] [--sweep] [--no-times]

Checks every scheme and layout with every launch that `choose_two_shot` can return, the residual full and sharded;
then many calls of both kernels in random order on one workspace, a rank stalled now and then; then that the buffer is
absent again. Times are medians of CUDA graph replays, the slowest rank's, in microseconds. --sweep tries other
numbers of pushers and reducers. --part 2/4 does a quarter of the first check and nothing else (compilation is most
of it, so parts can run side by side). Exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import sys
from collections.abc import Callable

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch
import torch.distributed as dist
from kernel_cases import same
from one_gpu_cases import SHARDED
from symmetric_check import all_same, differing, spin_kernel
from torch import Tensor

from torchseam.backends import base, workspace
from torchseam.kernels import one_shot, owners, two_shot
from torchseam.kernels.channel import Channel
from torchseam.kernels.launch import TwoShot, choose_two_shot
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

TOKENS = (1, 2, 3, 17, 133, 1000, 4096)
QUANTS = (
    Quant("fp8_static"),
    Quant("fp8_token"),
    Quant("fp8_group"),
    Quant("fp8_group", 64, "ue8m0", "tma_aligned"),
    Quant("fp8_group", 128, "float32", "column_major"),
    Quant("nvfp4"),
    Quant("nvfp4", scale_layout="linear"),
    Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed"),
)
CALLS_PER_GRAPH, REPLAYS = 20, 15


class Case:
    """One seam's operands on this rank."""

    def __init__(self, group: base.Group, quant: Quant, hidden: int, tokens: int, dtype: torch.dtype, outputs) -> None:
        own = torch.Generator(device=group.device).manual_seed(1 + group.rank)
        alike = torch.Generator(device=group.device).manual_seed(99)

        def rows(generator: torch.Generator) -> Tensor:
            return torch.randn(tokens, hidden, device=group.device, generator=generator).to(dtype)

        value = 0.01 if quant.scheme == "fp8_static" else 600.0
        scales = (torch.tensor([value], device=group.device),) if quant.takes_scale else ()
        weight = torch.rand(hidden, device=group.device, generator=alike).to(dtype)
        self.seam = Seam(Norm(1e-6), Reduce(group.name), None, True, (quant,), outputs)
        self.operands = Operands(rows(own), rows(alike), None, weight, scales)

    def sharded(self, into: str = "sharded", out: str = "sharded") -> Seam:
        reduce = dataclasses.replace(self.seam.reduce, residual_in=into, residual_out=out)
        return dataclasses.replace(self.seam, reduce=reduce)

    def without_others_residual(self, owned: range) -> Operands:
        """NaN in the rows of the residual that this rank must not read."""
        residual = torch.full_like(self.operands.residual, float("nan"))
        residual[owned.start : owned.stop] = self.operands.residual[owned.start : owned.stop]
        return dataclasses.replace(self.operands, residual=residual)


def launches_of(channel: Channel, hidden: int, dtype: torch.dtype) -> list[TwoShot]:
    """Every kind that `choose_two_shot` can return, whatever it returns for so few rows."""
    of = [choose_two_shot(t, hidden, dtype.itemsize, channel.world_size, channel.multiprocessors) for t in (1, 10**6)]
    return list(dict.fromkeys(of))


def combinations(hiddens: list[int]) -> list[tuple[int, Quant, torch.dtype, tuple[str, ...]]]:
    """(H, quantiser, dtype, outputs): all of them at the first H, the usual at the others."""
    every = (
        (torch.bfloat16, ("residual",)),
        (torch.bfloat16, ("reduced", "residual", "norm")),
        (torch.float16, ("norm",)),
        (torch.float32, ("residual",)),
    )
    return [
        (hidden, quant, *rest)
        for hidden in hiddens
        for quant in QUANTS
        for rest in every[: 4 if hidden == hiddens[0] else 1]
    ]


def check_bits(
    group: base.Group, channel: Channel, hiddens: list[int], tokens: list[int], part: int = 0, parts: int = 1
) -> list[str]:
    broken = []
    for hidden, quant, dtype, outputs in combinations(hiddens)[part::parts]:
        for count in tokens:
            case = Case(group, quant, hidden, count, dtype, outputs)
            needed = two_shot.two_shot_bytes(case.seam, case.operands, group.world_size)
            if max(needed, case.operands.x.nbytes) > channel.slot_bytes:
                continue
            name = f"T={count} H={hidden} {dtype} {quant.to_json()} {outputs}"
            expected = one_shot.run(case.seam, case.operands, channel)
            for launch in launches_of(channel, hidden, dtype):
                got = two_shot.run(case.seam, case.operands, channel, launch=launch)
                if not all_same(got, expected):
                    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not same(a, b)]
                    broken.append(f"{name} {launch}: outputs {wrong}")
            if "residual" in outputs:
                at = outputs.index("residual")
                owned = owners.owned_rows(count, group.rank, group.world_size)
                for into, out in SHARDED:
                    operands = case.operands if into == "full" else case.without_others_residual(owned)
                    got, wanted = two_shot.run(case.sharded(into, out), operands, channel), list(expected)
                    if out == "sharded":
                        for tensors in (got, wanted):
                            tensors[at] = tensors[at][owned.start : owned.stop]
                    if not all_same(got, wanted):
                        broken.append(f"{name}: residual {into} -> {out}")
    return broken


def check_many(group: base.Group, channel: Channel, hidden: int, calls: int) -> list[str]:
    """Both kernels in random order, T and scheme changing, one rank stalled at random."""
    cases = []
    # Others' scales cannot be looked at as bytes.
    for quant in (q for q in QUANTS if q.scale_layout not in ("column_major", "tma_aligned", "tma_aligned_packed")):
        for tokens in (1, 2, 3, 8, 40, 133, 300):
            case = Case(group, quant, hidden, tokens, torch.bfloat16, ("residual",))
            cases.append((case, one_shot.run(case.seam, case.operands, channel)))
    alike, own = random.Random(5), random.Random(group.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    for _ in range(calls):
        case, expected = alike.choice(cases)
        run = alike.choice((one_shot.run, two_shot.run))
        if own.random() < 0.02:
            spin_kernel[(1,)](own.choice((2_000, 50_000, 1_000_000)))
        wrong += differing(run(case.seam, case.operands, channel), expected)
    return [f"{int(wrong)} wrong bytes in {calls} calls"] if int(wrong) else []


def microseconds(group: base.Group, call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS_PER_GRAPH)
    return max(base.agree(group, statistics.median(times[3:])))


def swept(channel: Channel, hidden: int) -> list[TwoShot]:
    warps = launches_of(channel, hidden, torch.bfloat16)[0].num_warps
    found = [TwoShot(warps)]
    for pushers in (4, 8, 16, 32):
        rest = channel.multiprocessors - pushers
        for reducers in (rest // 3, rest // 2, rest * 2 // 3):
            for ahead in {1, max(4 // (channel.world_size - 1), 1)}:
                found.append(TwoShot(warps, pushers, reducers, ahead))
    return found


def time_both(group: base.Group, channel: Channel, hiddens: list[int], tokens: list[int], sweep: bool) -> None:
    say = print if group.rank == 0 else lambda *_, **__: None
    say(
        f"{'scheme':12} {'H':>6} {'T':>6} {'one-shot':>9} {'two-shot':>9} {'sharded':>9}  best two-shot launch",
        flush=True,
    )
    for hidden in hiddens:
        for quant in (QUANTS[0], QUANTS[1], QUANTS[2], QUANTS[5]):
            for count in tokens:
                case = Case(group, quant, hidden, count, torch.bfloat16, ("residual",))
                if two_shot.two_shot_bytes(case.seam, case.operands, group.world_size) > channel.slot_bytes:
                    continue
                took = [
                    microseconds(group, lambda c=case: one_shot.run(c.seam, c.operands, channel)),
                    microseconds(group, lambda c=case: two_shot.run(c.seam, c.operands, channel)),
                    microseconds(group, lambda c=case: two_shot.run(c.sharded(), c.operands, channel)),
                ]
                best = ""
                if sweep and quant is QUANTS[0]:
                    launches = swept(channel, hidden)
                    of = [
                        microseconds(
                            group, lambda c=case, way=way: two_shot.run(c.seam, c.operands, channel, launch=way)
                        )
                        for way in launches
                    ]
                    ranked = sorted(zip(of, map(str, launches), strict=True))[:3]
                    best = "; ".join(f"{t:.1f} {way}" for t, way in ranked)
                line = " ".join(f"{t:9.1f}" for t in took)
                say(f"{quant.scheme:12} {hidden:6} {count:6} {line}  {best}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", default="4096,8192")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--part", help="I/N: this part of the first check, and nothing else")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    given = parser.parse_args()
    hiddens, tokens = ([int(n) for n in text.split(",")] for text in (given.hidden, given.tokens))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = base.Group(dist.group.WORLD.group_name, rank, size, device)
    # Two ranks gather more than they save: T = 4096 at H = 8192 in bf16 needs five quarters of one-shot's bytes.
    made = workspace.create(group, 2**27)
    channel = made.channel
    part, parts = (int(n) for n in (given.part or "1/1").split("/"))
    broken = check_bits(group, channel, hiddens, tokens, part - 1, parts)
    print(f"rank {rank} bits: {broken[:20] or 'ok'}", flush=True)
    many = [] if given.part else check_many(group, channel, hiddens[0], given.calls)
    torch.cuda.synchronize()
    dist.barrier()
    many += [] if bool((made._buffer == 0xFF).all()) else ["the buffer is not all absent"]
    print(f"rank {rank} many calls and the buffer: {many or 'ok'}", flush=True)
    if not given.no_times and not given.part:
        time_both(group, channel, hiddens, tokens, given.sweep)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if broken or many else 0


if __name__ == "__main__":
    sys.exit(main())
