"""The `symmetric` backend on real GPUs, one rank on each: every combination, launch choice and order of calls.

One-shot and two-shot alike, on one workspace; two_shot_check.py has two-shot's launches and times.

    PYTHONPATH=src torchrun --nproc-per-node 2 tests/kernels/symmetric_check.py [--table I/N] [--calls 100000]

The expected values are the sum over the ranks in rank order, computed from every rank's inputs, run through
the local kernel, which `gpu_check.py` holds to the reference. Prints what differs; exits with 1 on any.
`--table 3/8` runs the third eighth of the table alone, so that several can run side by side (compilation is
most of the work); without it everything else runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
import sys
import time

import kernel_cases
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from kernel_cases import inputs, same
from torch import Tensor

from torchseam.backends import base, symmetric, workspace
from torchseam.backends.algorithms import Model
from torchseam.kernels import channel, local, one_shot, rows, two_shot
from torchseam.kernels.launch import OneShot, choose_one_shot
from torchseam.kernels.tuned import Table
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

HIDDENS = (4096, 2880, 8192, 640, 5120, 7168)
RUNS = (one_shot.run, two_shot.run)


def reduced_seam(seam: Seam, group: base.Group, reduced: bool = False) -> Seam:
    outputs = ("reduced", *seam.outputs) if reduced else seam.outputs
    return dataclasses.replace(seam, reduce=Reduce(group.name), outputs=outputs)


def total_of(terms: list[Tensor]) -> Tensor:
    """The sum in rank order, fp32, rounded once."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms[0].dtype)


def differing(got: list[Tensor], expected: list[Tensor]) -> Tensor:
    """How many bytes differ, on the device."""
    pairs = zip(got, expected, strict=True)
    return torch.stack([(a.view(torch.uint8) != b.view(torch.uint8)).sum() for a, b in pairs]).sum()


def all_same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(same(a, b) for a, b in zip(got, expected, strict=True))


def launches_for(hidden: int, case_quant: Quant | None, dtype: torch.dtype, many: int) -> list[OneShot]:
    """Every kind that `choose_one_shot` can return, whatever it returns for so few rows."""
    of = [choose_one_shot(t, hidden, dtype.itemsize, case_quant, many) for t in (1, 64, many + 1)]
    return list(dict.fromkeys(of))


# ---- the table --------------------------------------------------------------------------------


def check_table(group: base.Group, ch: channel.Channel, shard: int, shards: int) -> list[str]:
    broken = []
    cases = [c for c in kernel_cases.cases(HIDDENS) if c.seam is not None]
    mine = [
        c
        for i, c in enumerate(cases)
        if i % shards == shard and not rows.unsupported(torch.empty(1, c.hidden, dtype=c.dtype))
    ]
    runs = 0
    for index, case in enumerate(mine):
        assert case.seam is not None
        given = [inputs(case, 3, seed=1000 * index + rank).to(group.device) for rank in range(group.world_size)]
        mine_, total = given[group.rank], total_of([g.x for g in given])
        shared = given[0].operands()
        full = kernel_cases.everything(case.seam)
        quant = full.quants[0] if full.quants else None
        expected = [total, *local.run(full, dataclasses.replace(shared, x=total))]
        operands = dataclasses.replace(shared, x=mine_.x)
        seam = reduced_seam(full, group, reduced=True)
        for launch in launches_for(case.hidden, quant, case.dtype, ch.multiprocessors):
            got = one_shot.run(seam, operands, ch, launch=launch)
            runs += 1
            if not all_same(got, expected):
                wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not same(a, b)]
                broken.append(f"{case} {launch}: outputs {wrong} differ")
        if not all_same(two_shot.run(seam, operands, ch), expected):
            broken.append(f"{case}: two-shot differs")
        kept = local.run(case.seam, dataclasses.replace(shared, x=total))
        for run in RUNS:
            if not all_same(run(reduced_seam(case.seam, group), operands, ch), kept):
                broken.append(f"{case}: the seam's own outputs differ in {run.__module__}")
    print(
        f"rank {group.rank} table {shard + 1}/{shards}: {len(mine)} cases, {runs} launches, {len(broken)} broken",
        flush=True,
    )
    return broken


# ---- many calls -------------------------------------------------------------------------------


@triton.jit
def spin_kernel(nanoseconds):
    """Keep the stream busy."""
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < nanoseconds:
        now = tl.extra.cuda.globaltimer()


class Pool:
    """Rows of every rank, seams of every scheme, and the expected outputs for any slice of the rows."""

    def __init__(self, group: base.Group, hidden: int, tokens: int) -> None:
        generator = torch.Generator(device=group.device).manual_seed(1)

        def random_rows() -> Tensor:
            return torch.randn(tokens, hidden, device=group.device, generator=generator).bfloat16()

        rows = [random_rows() for _ in range(group.world_size)]
        self.x, self.total = rows[group.rank], total_of(rows)
        self.residual = random_rows()
        self.weight = torch.rand(hidden, device=group.device, generator=generator).bfloat16()
        self.seams = []
        for quant in (
            Quant("fp8_static"),
            Quant("fp8_token"),
            Quant("fp8_group"),
            Quant("nvfp4", scale_layout="linear"),
        ):
            seam = Seam(Norm(1e-6), residual=True, quants=(quant,), outputs=("residual",))
            scales = (torch.tensor([0.01 if quant.scheme == "fp8_static" else 600.0], device=group.device),)
            scales = scales if quant.takes_scale else ()
            whole = local.run(seam, Operands(self.total, self.residual, None, self.weight, scales))
            self.seams.append((reduced_seam(seam, group), scales, whole))
        self.tokens = tokens

    def operands(self, which: int, first: int, count: int) -> Operands:
        rows = slice(first, first + count)
        return Operands(self.x[rows], self.residual[rows], None, self.weight, self.seams[which][1])

    def wrong(self, which: int, first: int, count: int, got: list[Tensor]) -> Tensor:
        return differing(got, [t[first : first + count] for t in self.seams[which][2]])


def check_many_calls(group: base.Group, ch: channel.Channel, calls: int) -> list[str]:
    """Random T, schemes, rows and kernels; one rank is stalled at random. Exact each time."""
    broken = []
    pools = [Pool(group, hidden, 600) for hidden in (4096, 8192)]
    same_on_all, own = random.Random(5), random.Random(group.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    started = time.monotonic()
    for _ in range(calls):
        pool = pools[same_on_all.random() < 0.3]
        count = same_on_all.choice((1, 1, 2, 3, 4, 7, 8, 9, 16, 40, 132, 133, 300))
        which, first = same_on_all.randrange(4), same_on_all.randrange(pool.tokens - count)
        if own.random() < 0.02:
            spin_kernel[(1,)](own.choice((2_000, 50_000, 1_000_000)))
        run = same_on_all.choice(RUNS)
        got = run(pool.seams[which][0], pool.operands(which, first, count), ch)
        wrong += pool.wrong(which, first, count, got)
    if int(wrong):
        broken.append(f"{int(wrong)} wrong bytes")
    if group.rank == 0:
        print(f"{calls} calls in {time.monotonic() - started:.0f} s, {int(wrong)} wrong bytes", flush=True)
    return broken


def check_graphs(group: base.Group, ch: channel.Channel) -> list[str]:
    """50 captured graphs of different T, half of each kernel, replayed in random order, mixed with eager calls; inputs
    change."""
    pool = Pool(group, 4096, 600)
    rng = random.Random(9)
    graphs = []
    for index in range(50):
        count, which = 1 + index * 4, index % 4
        static = dataclasses.replace(
            pool.operands(which, 0, count), x=pool.x[:count].clone(), residual=pool.residual[:count].clone()
        )
        run = RUNS[index // 4 % 2]
        run(pool.seams[which][0], static, ch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(pool.seams[which][0], static, ch)
        graphs.append((graph, count, which, static, got))
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    for _ in range(2000):
        if rng.random() < 0.3:
            count, which = rng.choice((1, 5, 64, 150)), rng.randrange(4)
            first = rng.randrange(pool.tokens - count)
            run = rng.choice(RUNS)
            wrong += pool.wrong(which, first, count, run(pool.seams[which][0], pool.operands(which, first, count), ch))
        else:
            graph, count, which, static, got = rng.choice(graphs)
            first = rng.randrange(pool.tokens - count)
            static.x.copy_(pool.x[first : first + count])
            static.residual.copy_(pool.residual[first : first + count])
            graph.replay()
            wrong += pool.wrong(which, first, count, got)
    return [f"{int(wrong)} wrong bytes"] if int(wrong) else []


def check_followers(group: base.Group, ch: channel.Channel) -> list[str]:
    """What follows reads what is there: T in 1, 2, 4, 16; our kernel, a plain one and Inductor's, each 10,000 times
    behind each of our two collective kernels."""
    pool = Pool(group, 4096, 64)
    broken = []
    compiled = torch.compile(lambda r: (r.float() * 2.0 + 1.0).bfloat16())
    after = Seam(Norm(1e-6, "none"), quants=(Quant("fp8_token"),), outputs=("norm",))
    for count, run in itertools.product((1, 2, 4, 16), RUNS):
        seam, operands = pool.seams[0][0], pool.operands(0, 0, count)
        residual = pool.seams[0][2][0][:count].clone()
        expected = [*local.run(after, Operands(residual)), (residual.float() * 2.0 + 1.0).bfloat16()]

        def chain(seam: Seam = seam, operands: Operands = operands, run=run) -> list[Tensor]:
            out = run(seam, operands, ch)
            # Each call's input is what the call before gave: the reader of x must wait as well.
            again = run(seam, dataclasses.replace(operands, residual=out[0]), ch)
            return [*local.run(after, Operands(out[0])), compiled(out[0]), again[0]]

        last = total_of([pool.total[:count], residual])
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
        wrong = torch.zeros((), dtype=torch.int64, device=group.device)
        for _ in range(10_000):
            for t in got:
                t.view(torch.uint8).fill_(0x7F)
            graph.replay()
            wrong += differing(got, [*expected, last])
        if int(wrong):
            broken.append(f"T={count} {run.__module__}: {int(wrong)} wrong bytes")
    return broken


def check_rows_alone(group: base.Group, ch: channel.Channel) -> list[str]:
    """One row alone has the bits it has among 4096; and all ranks have the same bits."""
    pool = Pool(group, 4096, 4096)
    broken = []
    for which, run in itertools.product(range(4), RUNS):
        name = f"scheme {which} {run.__module__}"
        whole = run(pool.seams[which][0], pool.operands(which, 0, 4096), ch)
        if int(pool.wrong(which, 0, 4096, whole)):
            broken.append(f"{name}: T=4096 differs from the local kernel")
        for first in (0, 1, 131, 132, 2047, 4095):
            alone = run(pool.seams[which][0], pool.operands(which, first, 1), ch)
            if not all_same(alone, [t[first : first + 1] for t in whole]):
                broken.append(f"{name}: row {first} alone differs")
        sums = [int(t.view(torch.uint8).long().sum()) for t in whole]
        if any(other != sums for other in base.agree(group, sums)):
            broken.append(f"{name}: the ranks differ")
    return broken


def check_payloads(group: base.Group, ch: channel.Channel) -> list[str]:
    """-0.0 everywhere, all ones (the word that means absent), NaN, infinities, subnormals: ends, and exact."""
    broken = []
    for dtype, integer in ((torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)):
        patterns = [torch.full((4096,), -0.0, dtype=dtype), torch.full((4096,), -1, dtype=integer).view(dtype)]
        for value in (float("nan"), float("inf"), torch.finfo(dtype).smallest_normal / 8):
            row = torch.linspace(-2, 2, 4096).to(dtype)
            row[::7] = value
            patterns.append(row)
        patterns.append(
            torch.randint(-(2**15), 2**15, (4096,), generator=torch.Generator().manual_seed(3))
            .to(torch.int16)
            .to(integer)
            .view(dtype)
        )
        rows = torch.stack(patterns).to(group.device)
        terms = [rows.roll(rank, 0) if rank % 2 else rows for rank in range(group.world_size)]
        seam = Seam(Norm(1e-6, "none"), residual=True, quants=(Quant("fp8_token"),), outputs=("residual", "norm"))
        residual = torch.ones_like(rows)
        total = total_of(terms)
        expected = [total, *local.run(seam, Operands(total, residual))]
        for run in (*RUNS, *RUNS, *RUNS):
            got = run(reduced_seam(seam, group, reduced=True), Operands(terms[group.rank], residual), ch)
            if not all_same(got, expected):
                broken.append(f"{dtype} {run.__module__}: differs")
        for run in RUNS:
            minus = run(reduced_seam(seam, group, reduced=True), Operands(rows[:1], residual[:1]), ch)
            if not bool((minus[0].view(integer) == rows[:1].view(integer)).all()):
                broken.append(f"{dtype} {run.__module__}: the sum of -0.0 is not -0.0")
    return broken


def check_choice(group: base.Group, made: workspace.Workspace) -> list[str]:
    """The backend's own choice, by a model in which a hop costs nothing, so that two ranks take both kernels."""
    broken = []
    model = Model(alpha=0.0, hop=0.0, least_gain=1.0001, least_ranks=2)
    capability = min(tuple(c) for c in base.agree(group, torch.cuda.get_device_capability(group.device)))
    backend = symmetric.Symmetric(group, made, Table(), capability, model=model)
    pool = Pool(group, 4096, 300)
    taken = set()
    for which, count in itertools.product(range(4), (1, 2, 3, 16, 133, 300)):
        whole, operands = pool.seams[which][0], pool.operands(which, 0, count)
        # Without the residual owners send less than half of a row; with it more than two ranks save.
        for seam, first in ((whole, 0), (dataclasses.replace(whole, outputs=()), 1)):
            if (refusal := backend.refuses(seam, operands)) is not None:
                broken.append(f"T={count} {seam.to_json()}: {refusal}")
                continue
            algorithm = backend.choice(seam, operands).algorithm
            taken.add(algorithm)
            if any(other != algorithm for other in base.agree(group, algorithm)):
                broken.append(f"T={count} {seam.to_json()}: the ranks choose differently")
            elif not all_same(backend.run(seam, operands), [t[:count] for t in pool.seams[which][2][first:]]):
                broken.append(f"T={count} {seam.to_json()} {algorithm}: differs")
    if taken != {"one_shot", "two_shot"}:
        broken.append(f"only {taken} was taken")
    return broken


def check_buffers(group: base.Group, made: workspace.Workspace) -> list[str]:
    """After all that, every word of the buffer is absent again."""
    torch.cuda.synchronize()
    dist.barrier()
    left = int((made._buffer != 0xFF).sum())
    return [f"{left} bytes of the buffer are not absent"] if left else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", help="I/N: this part of the table, and nothing else")
    parser.add_argument("--calls", type=int, default=100_000)
    given = parser.parse_args()
    os.environ["TORCHSEAM_TWO_SHOT"] = "1"  # what is off by default is checked too
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = base.Group(dist.group.WORLD.group_name, rank, size, device)
    failed = 0
    if given.table:
        shard, shards = (int(n) for n in given.table.split("/"))
        made = workspace.create(group, 2**22)
        checks = {"table": lambda: check_table(group, made.channel, shard - 1, shards)}
    else:
        reason = symmetric.probe(group)
        assert reason is None, reason
        backend = symmetric.open_on(group)
        made = backend._workspace
        ch = made.channel
        checks = {
            "self-tests": lambda: list(backend.remarks),
            "choice": lambda: check_choice(group, made),
            "payloads": lambda: check_payloads(group, ch),
            "rows alone": lambda: check_rows_alone(group, ch),
            "graphs": lambda: check_graphs(group, ch),
            "followers": lambda: check_followers(group, ch),
            "many calls": lambda: check_many_calls(group, ch, given.calls),
        }
    checks["buffers"] = lambda: check_buffers(group, made)
    for name, check in checks.items():
        started = time.monotonic()
        broken = check()
        torch.cuda.synchronize()
        failed += len(broken)
        if broken or rank == 0:
            print(f"rank {rank} {name}: {broken[:20] or 'ok'} ({time.monotonic() - started:.1f} s)", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
