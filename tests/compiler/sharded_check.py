"""A compiled model whose residual stays with the owners of its rows, one rank on each GPU: bits, and time.

    PYTHONPATH=src torchrun --nproc-per-node 2 tests/compiler/sharded_check.py [--hidden 4096] [--tokens 1,2,...]

The same model is compiled with `shard_residual` and without: the outputs must have the same bits for every T, for one
that `symmetric` refuses too, and under CUDA graphs. Prints which kernels ran, and the medians of graph replays, the
slowest rank's, in microseconds for each seam with the matrix product before it. Exits with 1 when anything differs.
Without a GPU it runs on gloo, `collective` alone, and times nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import torchseam
from torchseam import SeamConfig
from torchseam.backends import collective, select

TOKENS = (1, 2, 3, 17, 64, 133, 1000, 4096)
LAYERS, REPLAYS = 6, 15
SCALE = 0.02


class Model(torch.nn.Module):
    """Layers: this rank's matrix product, all_reduce, residual, norm, static FP8. Returns the last codes and norm."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        super().__init__()
        own = torch.Generator(device=device).manual_seed(dist.get_rank())
        each = torch.randn(LAYERS, hidden, hidden, device=device, generator=own)
        self.matrices = each.mul_(hidden**-0.5).bfloat16()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden, eps=1e-6) for _ in range(LAYERS))
        self.norms.to(device, torch.bfloat16).requires_grad_(False)
        self.scale = torch.tensor(SCALE, device=device)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        y = h
        for matrix, norm in zip(self.matrices, self.norms, strict=True):
            h = h + funcol.all_reduce(y @ matrix, "sum", dist.group.WORLD)
            n = norm(h)
            codes = (n.float() / self.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            y = (codes.float() * self.scale).to(h.dtype)
        return codes, n


def count_calls(ran: Counter[str]) -> None:
    """Count from now on what runs the seams."""

    def counted(name: str, run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def counting(*args, **kwargs) -> list[Tensor]:
            ran[name] += 1
            return run(*args, **kwargs)

        return counting

    collective.run = counted("collective", collective.run)
    if torch.cuda.is_available():
        from torchseam.kernels import one_shot, two_shot

        one_shot.run = counted("one-shot", one_shot.run)
        two_shot.run = counted("two-shot", two_shot.run)


def rows(tokens: int, hidden: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(tokens)
    return torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()


def different(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[int]:
    pairs = zip(got, expected, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]


def captured(
    call: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(x)
    return graph, outputs


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of a replay; the slowest rank's median."""
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    median = torch.tensor(statistics.median(times[3:]), device="cuda")
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    given = parser.parse_args()
    os.environ["TORCHSEAM_TWO_SHOT"] = "1"  # what is off by default is checked too
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    ran: Counter[str] = Counter()
    count_calls(ran)
    broken: list[str] = []
    with torch.no_grad():
        model = Model(given.hidden, device)
        backend = "symmetric" if on_gpu else "auto"
        compiled = {
            shard: torchseam.compile(model, config=SeamConfig(backend=backend, shard_residual=shard), dynamic=True)
            for shard in (False, True)
        }
        tokens = [int(n) for n in given.tokens.split(",")]
        compiled[False](rows(tokens[-1], given.hidden, device))
        if on_gpu:
            # One row more than one-shot, and so two-shot, has room for: both go to `collective`.
            (opened,) = select.opened()
            tokens.append(opened.channel.slot_bytes // (2 * given.hidden) + 1)
        for count in tokens:
            x = rows(count, given.hidden, device)
            results, by = {}, {}
            for shard, call in compiled.items():
                ran.clear()
                results[shard] = tuple(tensor.clone() for tensor in call(x))
                by[shard] = dict(ran)
            wrong = different(results[True], results[False])
            broken += [f"T={count}: outputs {wrong}"] * bool(wrong)
            took = ""
            if on_gpu and "collective" not in by[True]:
                times = []
                for call in compiled.values():
                    graph, outputs = captured(call, x)
                    for _ in range(3):
                        graph.replay()
                    wrong = different(outputs, results[False])
                    broken += [f"T={count}: outputs {wrong} of a CUDA graph"] * bool(wrong)
                    times.append(microseconds(graph) / LAYERS)
                took = f", {times[0]:.1f} us full, {times[1]:.1f} us sharded"
            if rank == 0:
                print(f"T={count}: full by {by[False]}, sharded by {by[True]}{took}", flush=True)
        residuals = [residual.full for graph in torchseam.report(compiled[True]).graphs for residual in graph.residuals]
        if not residuals or any(residuals):
            broken.append(f"residuals that are not sharded, and why: {residuals}")
    print(f"rank {rank}: {broken or 'ok'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
