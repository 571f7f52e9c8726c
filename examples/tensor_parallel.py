"""A tensor-parallel block with a static FP8 quantiser in plain PyTorch: compiled, fused, compared with eager.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Runs on the CPU with gloo, or with NCCL where there is a GPU for each rank.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchseam


class Block(torch.nn.Module):
    """An MLP, the residual and the next layer's norm and quantiser: one seam."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = torch.nn.Linear(4 * hidden, hidden, bias=False)
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5)
        self.register_buffer("scale", torch.tensor(0.02))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self.down(torch.nn.functional.silu(self.up(x)))  # RowwiseParallel all-reduces here
        y = self.norm(residual)
        codes = (y.float() / self.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return codes, residual


def main() -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = Block(512).bfloat16().to(device).requires_grad_(False)
    model.scale = model.scale.float()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, residual = (torch.randn(2, 8, 512, device=device).bfloat16() for _ in range(2))

    with torch.no_grad():
        eager_codes, eager_residual = model(x, residual)
        compiled = torchseam.compile(model)
        codes, new_residual = compiled(x, residual)

    if dist.get_rank() == 0:
        print(torchseam.report(compiled))
        print("residual equal:", torch.equal(new_residual, eager_residual))
        different = (codes.view(torch.uint8) != eager_codes.view(torch.uint8)).sum().item()
        print(f"codes that differ: {different} of {codes.numel()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
