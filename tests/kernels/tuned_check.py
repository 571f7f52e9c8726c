"""Tuned launches on real GPUs: a table that all ranks have is used, one that they don't is not, and no bit changes.

    PYTHONPATH=src torchrun --nproc-per-node 2 tests/kernels/tuned_check.py

Writes tables with launches that `launch.py` does not ship into a temporary cache. Prints a line for each check and a
summary; exits with 1 where one fails. `torchseam tune` itself is run by hand: it compares bits too.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist

from torchseam.backends import base, symmetric
from torchseam.kernels import local, one_shot, tuned_file
from torchseam.kernels.launch import Launch, OneShot, choose, choose_one_shot
from torchseam.kernels.tuned import LOCAL, ONE_SHOT, Row, Shape
from torchseam.seam import Quant
from torchseam.tuning.benches import same_bits
from torchseam.tuning.timing import operand_sets, seam_of

HIDDEN = 8192
SCHEMES = ("fp8_static", "fp8_token", "fp8_group", "nvfp4")
#: T -> a launch that `choose_one_shot` does not take.
UNUSUAL = {1: OneShot(8, 4), 16: OneShot(16, 2), 64: OneShot(16), 1024: OneShot(32, pushers=12, ahead=2)}


def rows(size: int, other: int) -> list[Row]:
    """`other` ranks from 1 on keep what is shipped for T = 1."""
    found = []
    for scheme in SCHEMES:
        for tokens, launch in UNUSUAL.items():
            shape = Shape(ONE_SHOT, size, scheme, "bfloat16", HIDDEN, tokens)
            found.append(Row(shape, None if other and tokens == 1 else launch, 1.0, 2.0))
        found.append(Row(Shape(LOCAL, 1, scheme, "bfloat16", HIDDEN, 16), Launch(32), 1.0, 2.0))
    return found


def check(group: base.Group, folder: Path, together: bool) -> list[str]:
    """What is wrong. `together`: all ranks have the same table."""
    os.environ["TORCHSEAM_CACHE"] = str(folder / ("all" if together else str(group.rank)))
    if not together or group.rank == 0:
        tuned_file.write(
            tuned_file.machine_of(group.device.index), rows(group.world_size, 0 if together else group.rank)
        )
    dist.barrier()
    tuned_file.forget()
    backend = symmetric.open_on(group)
    many = backend.channel.multiprocessors
    launched: list[OneShot | None] = []
    run = one_shot.run

    def recorded(*args, launch=None, **options):  # type: ignore[no-untyped-def]
        launched.append(launch)
        return run(*args, launch=launch, **options)

    broken = []
    for scheme in SCHEMES:
        quant = Quant(scheme)  # type: ignore[arg-type]
        for tokens, unusual in UNUSUAL.items():
            assert unusual != choose_one_shot(tokens, HIDDEN, 2, quant, many)
            torch.manual_seed(tokens + 7 * group.rank)
            operands = operand_sets(quant, HIDDEN, tokens)[0]
            torch.manual_seed(1)
            operands.residual.copy_(torch.randn_like(operands.residual))  # type: ignore[union-attr,arg-type]
            operands.weight.copy_(torch.rand_like(operands.weight))  # type: ignore[union-attr,arg-type]
            seam = seam_of(quant, group.name)
            one_shot.run = recorded  # type: ignore[assignment]
            try:
                got = backend.run(seam, operands)
            finally:
                one_shot.run = run
            if launched[-1] != (unusual if together else None):
                broken.append(f"{scheme} T={tokens}: launched {launched[-1]}")
            shipped = run(seam, operands, backend.channel)
            for mine, theirs in zip(got, shipped, strict=True):
                if not torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
                    broken.append(f"{scheme} T={tokens}: other bits than as shipped")
        operands = operand_sets(quant, HIDDEN, 16)[0]
        found = tuned_file.local_launch(group.device.index, 16, HIDDEN, torch.bfloat16, scheme)
        if found != Launch(32):
            broken.append(f"{scheme}: the local kernel is launched as {found}")
        alone = seam_of(quant)
        if not same_bits(lambda o, c, s=alone: local.run(s, o, launch=c), operands, found, choose(HIDDEN)):  # type: ignore[misc]
            broken.append(f"{scheme}: other bits of the local kernel than as shipped")
    dist.barrier()
    backend.close()
    return broken


def main() -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    shared = [tempfile.mkdtemp(prefix="torchseam-tuned-")]
    dist.broadcast_object_list(shared)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    broken = []
    for together in (True, False):
        group = base.Group(name, rank, size, device, attempt=f"together {together}")
        wrong = check(group, Path(shared[0]), together)
        print(f"rank {rank}: one table for all: {together}: {len(wrong)} wrong", flush=True)
        broken += wrong
    print("\n".join(broken), flush=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(shared[0])
    dist.destroy_process_group()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
