"""The one-shot kernel in Triton's interpreter between real processes, whose buffers are shared memory.

    TRITON_INTERPRET=1 python one_shot_ranks.py RANKS FOLDER

Every rank makes the same calls (T, dtype, scheme, payload and outputs changing from call to call), asleep now and
then, and compares each bit with the sum in rank order run through the local kernel. Exits with 1 on any difference,
and where the buffers are not all absent words at the end.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from kernel_cases import same

from torchseam.kernels import channel, local, one_shot
from torchseam.kernels.launch import OneShot
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

SLOT_BYTES = 2**16
MULTIPROCESSORS = 20
HIDDEN = 640
QUANTS = (
    Quant("fp8_static"),
    Quant("fp8_token"),
    Quant("fp8_group"),
    Quant("fp8_group", scale_dtype="ue8m0", scale_layout="tma_aligned"),
    Quant("nvfp4"),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: One program for all rows, several, and programs that only push beside others that only reduce.
LAUNCHES = (None, OneShot(4), OneShot(4, pushers=2, ahead=4))


def rows(tokens: int, dtype: torch.dtype, seed: int, payload: str) -> torch.Tensor:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if payload == "minus zero":
        x.fill_(-0.0)
    elif payload == "all ones":
        x.view(torch.int16).fill_(-1)
    elif payload == "special":
        x[:, ::5] = float("nan")
        x[:, 1::7] = float("inf")
        x[:, 2::9] = torch.finfo(dtype).smallest_normal / 4
    return x


def total_of(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms[0].dtype)


def run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    count = channel.buffer_bytes(size, SLOT_BYTES)
    buffers = [
        torch.from_file(f"{folder}/{r}", shared=True, size=count, dtype=torch.uint8)  # type: ignore[call-overload]
        for r in range(size)
    ]
    ch = channel.Channel(
        rank=rank,
        world_size=size,
        addresses=torch.tensor([b.data_ptr() for b in buffers]),
        counter=torch.zeros(1, dtype=torch.int64),
        slots=torch.full((channel.slots_words(MULTIPROCESSORS),), -1, dtype=torch.int32),
        slot_bytes=SLOT_BYTES,
        multiprocessors=MULTIPROCESSORS,
    )
    sleepy = random.Random(rank)
    calls = 0
    for index in range(24):
        quant, dtype, launch = QUANTS[index % 5], DTYPES[index % 3], LAUNCHES[index % 4 % 3]
        payload = ("random", "minus zero", "all ones", "special")[index % 4]
        tokens = (1, 3, 9, 2, 0, 21, 5)[index % 7]
        inner = Norm(1e-6, "none") if index % 3 == 1 else None
        adds = inner is not None or index % 2 == 0
        kept = ("reduced", "residual", "norm") if adds else ("reduced", "norm")
        seam = Seam(Norm(1e-6, "none"), Reduce("g"), inner, adds, (quant,), kept)
        # All ones from one rank alone: with NaN in its own term, a rank would not see what arrived.
        alone = payload == "all ones"
        terms = [
            rows(tokens, dtype, 100 * index + r, payload if not alone or r == index % size else "random")
            for r in range(size)
        ]
        residual = rows(tokens, dtype, 7, "random") if adds else None
        scales = (torch.tensor([0.02 if quant.scheme == "fp8_static" else 300.0]),) if quant.takes_scale else ()
        if sleepy.random() < 0.3:
            time.sleep(sleepy.random() * 0.05)
        got = one_shot.run(seam, Operands(terms[rank], residual, scales=scales), ch, launch=launch)
        total = total_of(terms)
        expected = [total, *local.run(seam.local(), Operands(total, residual, scales=scales))]
        wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not same(a, b)]
        assert not wrong, (
            f"rank {rank} call {index} {seam.to_json()} T={tokens} {dtype} {payload}: outputs {wrong} differ"
        )
        calls += tokens > 0
    assert int(ch.counter) == calls << 20
    Path(f"{folder}/done{rank}").touch()
    while not all(os.path.exists(f"{folder}/done{r}") for r in range(size)):
        time.sleep(0.01)
    assert bool((buffers[rank] == 0xFF).all()), f"rank {rank}: words are left in the buffer"
    print(f"rank {rank}: {calls} calls exact", flush=True)


if __name__ == "__main__":
    ranks, where = int(sys.argv[1]), sys.argv[2]
    for r in range(ranks):
        Path(where, str(r)).write_bytes(b"\xff" * channel.buffer_bytes(ranks, SLOT_BYTES))
    mp.spawn(run_rank, (ranks, where), ranks)
