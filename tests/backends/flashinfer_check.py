"""FlashInfer's real kernels between real GPUs: what `torchseam doctor --check --thorough` runs, for one backend.

    torchrun --nproc-per-node 2 tests/backends/flashinfer_check.py [--backend trtllm|mnnvl] [--every N]

Needs torch with CUDA, flashinfer and as many GPUs as ranks, not pytest. Prints what differs, how each kind of seam
was run, and a summary; exits with 1 on any mismatch, and where the backend cannot run. mnnvl makes NVLink multicast
objects: nothing else here does.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist

from torchseam.backends import select
from torchseam.checking import run
from torchseam.checking.cases import cases


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("trtllm", "mnnvl"), default="trtllm")
    parser.add_argument("--every", type=int, default=1, help="run every n-th case")
    options = parser.parse_args()
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD.group_name
    table = list(cases(run.reduce_of(options.backend, group), thorough=True))[:: options.every]
    result = run.check(options.backend, table, device, rank, world_size, lambda _: None)
    if rank == 0:
        told = [*result.told, *result.remarks]
        print(
            f"{select.chosen(group)}: {result.cases} cases, {result.wrong} bad, {result.seconds:.0f} s",
            *told,
            sep="\n  ",
        )
        if result.skipped:
            print(f"not run: {result.skipped}")
        print(*(f"{name}: {held >> 20} MiB a rank" for (_, name), held in select.memory().items()), sep="\n")
    dist.barrier()
    select.reset()
    dist.destroy_process_group()
    return int(result.bad or result.skipped is not None)


if __name__ == "__main__":
    sys.exit(main())
