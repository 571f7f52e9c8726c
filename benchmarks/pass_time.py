"""How long torchseam's pass takes on the graph of a large tensor-parallel model.

The graph is traced from fake tensors, so 80 layers cost no memory and nothing is computed. Inductor's own
time is not measured, and neither is tracing: only find, plan, rewrite and lint.

    python benchmarks/pass_time.py [--layers 80] [--repeats 5]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchseam import Quant, SeamConfig, ops
from torchseam.compiler.fusion_pass import run_pass

#: A small Qwen3 (with norms of queries and keys): the size of the matrices does not matter to a pass over the graph.
TOKENS, HIDDEN, HEADS, INTERMEDIATE = 8, 256, 4, 512
HEAD = HIDDEN // HEADS
EPS = 1e-5
QUANT = Quant("fp8_static")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """Hugging Face Llama's spelling."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _linear(codes: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """An FP8 product as it looks after dequantising in the graph."""
    return (codes.to(torch.float32) * scale).to(weight.dtype) @ weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _attention(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (t.view(TOKENS, HEADS, HEAD) for t in qkv.chunk(3, dim=-1))
    q, k, v = (t.transpose(0, 1) for t in (_norm(q, q_norm), _norm(k, k_norm), v))
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    scores = torch.where(mask, (q @ k.transpose(1, 2)).float() * HEAD**-0.5, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(q.dtype)
    return (weights @ v).transpose(0, 1).reshape(TOKENS, HIDDEN)


def _model(
    x: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, layers: list[list[Tensor]], group: str
) -> Tensor:
    """Tensor parallel, with static FP8 activations: two seams a layer, and the last norm."""
    h = x
    for before, qkv, q_norm, k_norm, out, after, up, down in layers:
        (codes,) = ops.quantize(_norm(h, before), QUANT, scale)
        attended = _attention(_linear(codes, scale, qkv), q_norm, k_norm, cos, sin, mask)
        h = h + funcol.all_reduce(attended @ out, "sum", group)
        (codes,) = ops.quantize(_norm(h, after), QUANT, scale)
        gate, wide = _linear(codes, scale, up).chunk(2, dim=-1)
        h = h + funcol.all_reduce((torch.nn.functional.silu(gate) * wide) @ down, "sum", group)
    return _norm(h, layers[0][0])


def build(layers: int, group: str) -> GraphModule:
    """The functional graph of `layers` layers, as the post-grad pass sees it. `group`: a process group's name."""
    with FakeTensorMode(), torch.no_grad():

        def half(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.bfloat16)

        weights = [
            [
                half(HIDDEN),
                half(HIDDEN, 3 * HIDDEN),
                half(HEAD),
                half(HEAD),
                half(HIDDEN, HIDDEN),
                half(HIDDEN),
                half(HIDDEN, 2 * INTERMEDIATE),
                half(INTERMEDIATE, HIDDEN),
            ]
            for _ in range(layers)
        ]
        cos, sin, mask = half(TOKENS, HEAD), half(TOKENS, HEAD), torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        traced = make_fx(
            lambda *args: _model(*args, group), decomposition_table=select_decomp_table(), tracing_mode="real"
        )(half(TOKENS, HIDDEN), torch.empty(()), cos, sin, mask, weights)
    traced.graph.eliminate_dead_code()
    return traced


@dataclass(frozen=True)
class Timing:
    """One graph: its size, the seams that the pass fused, and seconds of each run of the pass.

    CPU seconds of the thread that runs it: it waits for nothing, and what else the machine does is not its time.
    """

    layers: int
    nodes: int
    seams: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def measure(layers: int, group: str, repeats: int) -> Timing:
    """Run the pass on `repeats` fresh copies of a graph, after one that is not counted."""
    module = build(layers, group)
    nodes = len(module.graph.nodes)
    seconds, seams = [], 0
    for _ in range(repeats + 1):
        graph = copy.deepcopy(module).graph
        start = time.thread_time()
        seams = len(run_pass(graph, SeamConfig()).fused)
        seconds.append(time.thread_time() - start)
    return Timing(layers, nodes, seams, tuple(seconds[1:]))


def table(timings: Sequence[Timing]) -> str:
    """What was measured, as text."""
    lines = [f"{'layers':>6} {'nodes':>7} {'seams':>6} {'median s':>9} {'best s':>8} {'us/node':>8}"]
    for t in timings:
        per_node = t.median / t.nodes * 1e6
        lines.append(f"{t.layers:>6} {t.nodes:>7} {t.seams:>6} {t.median:>9.3f} {t.best:>8.3f} {per_node:>8.1f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            print(f"torch {torch.__version__}, one core")
            print(table([measure(layers, dist.group.WORLD.group_name, given.repeats) for layers in given.layers]))
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
