"""Time all_reduce + residual + RMSNorm + quantise on the GPUs of one machine, one rank on each, beside its peers.

    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/collective.py [--out FILE.csv] [--hidden 4096,8192]
        [--tokens 1,8,64,...] [--schemes fp8_static,...] [--peers nccl+inductor,torchseam-collective,...]
    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/collective.py --launches    # as behind kernels/launch.py

One row a measurement: the median of CUDA graph replays of 30 calls, the slowest rank's; input sets are rotated
so that large ones do not stay in the cache. `limit_microseconds` is what NVLink alone would take for one-shot's
bytes at the rate measured in the same run (pushing 64 MB both ways at once), or the time of an empty kernel.
Rows are written as they come.

Peers: `nccl+inductor` (torch.distributed, and Inductor max-autotune of the eager rest), `torchseam-collective`
(torch.distributed, and our local kernel), and `flashinfer-trtllm` (the better of its two algorithms) where
`--flashinfer` names a module that runs it. NVLink multicast is used by none: TORCH_SYMM_MEM_DISABLE_MULTICAST=1
and NCCL_NVLS_ENABLE=0 are set.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"

import measuring
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from measuring import SCHEMES

from torchseam import reference
from torchseam.backends import base, collective, symmetric
from torchseam.kernels import one_shot
from torchseam.kernels.launch import OneShot, choose_one_shot
from torchseam.kernels.packets import pack_words, store_packets
from torchseam.operands import Operands
from torchseam.seam import Seam
from torchseam.tuning import timing
from torchseam.tuning.timing import EPS, operand_sets, seam_of

#: Its NVFP4 needs compute capability 10.0.
FLASHINFER_SCHEMES = ("fp8_static", "fp8_token", "fp8_group")
PEERS = ("nccl+inductor", "torchseam-collective", "flashinfer-trtllm")
CALLS_PER_GRAPH, REPLAYS = 30, 21

Call = Callable[[Operands], object]


class Bench:
    """One rank of the benchmark."""

    def __init__(self) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        self.group = base.Group(dist.group.WORLD.group_name, rank, size, device)
        self.cpu_group = dist.new_group(backend="gloo")

    def slowest(self, us: float) -> float:
        value = torch.tensor([us])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return float(value)

    def microseconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median time of one call, the calls taken in turn inside one CUDA graph; the slowest rank's."""
        return self.slowest(timing.microseconds(calls, CALLS_PER_GRAPH, REPLAYS, self.together))

    def together(self) -> None:
        dist.barrier(group=self.cpu_group)


# ---- the limits -------------------------------------------------------------------------------


@triton.jit
def push_kernel(x_ptr, peer_ptr, packets, N: tl.constexpr):
    """Copy packets to a peer, and nothing else."""
    lanes = tl.arange(0, N)
    for first in tl.range(tl.program_id(0) * N, packets, tl.num_programs(0) * N):
        inside = first + lanes < packets
        words = (first.to(tl.int64) * 4) + tl.arange(0, 4 * N)
        own = tl.load(x_ptr + words, mask=words < packets.to(tl.int64) * 4, other=0)
        a, b, c, d = pack_words(own, N)
        store_packets(peer_ptr + (first.to(tl.int64) + lanes) * 4, a, b, c, d, inside, True)


@triton.jit
def empty_kernel():
    pass


def link_bandwidth(bench: Bench) -> float:
    """Bytes a second that each rank pushes to its neighbour, all at once."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    size = 2**26
    buffer = symmetric_memory.empty(size // 4, dtype=torch.int32, device=bench.group.device)
    handle = symmetric_memory.rendezvous(buffer, bench.group.name)
    peer = handle.get_buffer((bench.group.rank + 1) % bench.group.world_size, (size // 4,), torch.int32)
    x = torch.ones_like(buffer)
    us = bench.microseconds([lambda: push_kernel[(132,)](x, peer, size // 16, 1024, num_warps=32)])
    return size / us * 1e6


# ---- what is timed ----------------------------------------------------------------------------


def implementations(
    bench: Bench, backend: symmetric.Symmetric, seam: Seam, peers: Sequence[str], tokens: int, hidden: int
) -> Iterator[tuple[str, Call]]:
    """(name, call); alternatives of one name are timed each, and the fastest counts."""
    reason = backend.refuses(seam, Operands(torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")))
    if reason is None:
        yield "torchseam", lambda o: backend.run(seam, o)
    else:
        print(f"T={tokens} H={hidden}: {reason}", file=sys.stderr)
    if "nccl+inductor" in peers:
        torch._dynamo.reset()
        rest = torch.compile(reference.run, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)

        def nccl(o: Operands) -> object:
            dist.all_reduce(o.x)
            return rest(seam.local(), o)

        yield "nccl+inductor", nccl
    if "torchseam-collective" in peers:
        yield "torchseam-collective", lambda o: collective.run(seam, o)
    scheme = seam.quants[0].scheme
    if "flashinfer-trtllm" in peers and scheme in FLASHINFER_SCHEMES:
        peer = _flashinfer()
        for first in (True, False):
            if peer is not None and peer.can(tokens, hidden, first):
                yield (
                    "flashinfer-trtllm",
                    lambda o, first=first: peer.allreduce_fusion(
                        o.x, o.residual, o.weight, EPS, *(o.scales or (None,)), scheme, one_shot=first
                    ),
                )


@functools.cache
def _flashinfer() -> Any:
    """The peer that `--flashinfer` names, with a workspace for the largest shape, or None."""
    if not _flashinfer_module:
        return None
    return importlib.import_module(_flashinfer_module[0]).Peer(max_tokens=4096, hidden=8192)


_flashinfer_module: list[str] = []


def launches(bench: Bench, backend: symmetric.Symmetric, scheme: str, hidden: int, tokens: int) -> None:
    """The time of launch choices around the one that `choose_one_shot` takes, which has the `*`."""
    channel = backend._workspace.channel
    seam, sets = seam_of(SCHEMES[scheme], bench.group.name), operand_sets(SCHEMES[scheme], hidden, tokens)
    chosen = choose_one_shot(tokens, hidden, 2, SCHEMES[scheme], channel.multiprocessors)
    warps = min(hidden // 256, 32)
    choices = [OneShot(warps)]
    choices += [OneShot(max(warps // p, 1), p) for p in (2, 4, 8, 16) if tokens * p <= channel.multiprocessors]
    if tokens > channel.multiprocessors:
        choices += [OneShot(warps, pushers=pushers, ahead=4) for pushers in (4, 8, 12, 16, 24)]
    cells = []
    for choice in dict.fromkeys((*choices, chosen)):
        us = bench.microseconds([lambda o=o, c=choice: one_shot.run(seam, o, channel, launch=c) for o in sets])
        mark = "*" if choice == chosen else ""
        cells.append(f"{choice.num_warps} warps {choice.parts} parts {choice.pushers} pushers {us:.2f}{mark}")
    if bench.group.rank == 0:
        print(scheme, hidden, tokens, " | ".join(cells), flush=True)


def main() -> None:
    measuring.launch_as_shipped()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--commit", help="what to write into the file as the commit, where git cannot tell")
    parser.add_argument("--hidden", default="4096,5120,7168,8192")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,4096")
    parser.add_argument("--schemes", default="fp8_static")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--launches", action="store_true", help="the table behind kernels/launch.py instead")
    parser.add_argument("--flashinfer", help="module with `Peer`, a wrapper around FlashInfer's trtllm kernels")
    given = parser.parse_args()
    _flashinfer_module.extend([given.flashinfer] if given.flashinfer else [])
    bench = Bench()
    group = bench.group
    backend = symmetric.open_on(group)
    bandwidth = link_bandwidth(bench)
    shortest = bench.microseconds([lambda: empty_kernel[(1,)]()])
    if group.rank == 0:
        print(f"push {bandwidth / 1e9:.0f} GB/s each way, empty kernel {shortest:.2f} us", file=sys.stderr)
    out = given.out if group.rank == 0 else None
    shapes = itertools.product(
        given.schemes.split(","), map(int, given.hidden.split(",")), map(int, given.tokens.split(","))
    )
    with measuring.results(out, group.world_size, given.commit) as add:
        for name, hidden, tokens in shapes:
            if given.launches:
                launches(bench, backend, name, hidden, tokens)
                continue
            seam, sets = seam_of(SCHEMES[name], group.name), operand_sets(SCHEMES[name], hidden, tokens)
            limit = max(shortest, tokens * hidden * 2 * (group.world_size - 1) / bandwidth * 1e6)
            best: dict[str, float] = {}
            for implementation, call in implementations(bench, backend, seam, given.peers.split(","), tokens, hidden):
                us = bench.microseconds([lambda o=o, c=call: c(o) for o in sets])
                best[implementation] = min(us, best.get(implementation, us))
            for implementation, us in best.items():
                add(name, hidden, tokens, implementation, f"{us:.2f}", f"{limit:.2f}")
            if group.rank == 0:
                told = "  ".join(f"{k} {v:.2f}" for k, v in best.items())
                print(f"{name} H={hidden} T={tokens} limit {limit:.2f}  {told}", flush=True)
    dist.barrier()
    backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
