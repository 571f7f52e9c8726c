"""The search for the one-shot kernel between real processes, in Triton's interpreter, with an injected clock.

    TRITON_INTERPRET=1 python tune_ranks.py RANKS FOLDER

Every rank has its own clock; the choice must be the one whose slowest rank is fastest, and the same on all. Prints a
line a rank; exits with 1 where one is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchseam.kernels import channel, one_shot
from torchseam.kernels.launch import OneShot
from torchseam.kernels.tuned import ONE_SHOT, Shape
from torchseam.tuning import timing
from torchseam.tuning.benches import OneShotBench
from torchseam.tuning.search import search

SLOT_BYTES = 2**14
#: The interpreter runs programs one after another: parts of a row would wait for each other, and 256 elements have
#: too few packets for parts.
MULTIPROCESSORS, HIDDEN, TOKENS = 6, 256, 7
SHIPPED = OneShot(1)
#: Rank 1 alone finds eight rows ahead slow; over both ranks four are the fastest. Replays are not equal.
US = {
    SHIPPED: (10.0, 10.0),
    OneShot(1, pushers=4, ahead=2): (9.9, 9.9),
    OneShot(1, pushers=4, ahead=4): (8.0, 8.5),
    OneShot(1, pushers=4, ahead=8): (2.0, 11.0),
}


def run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
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

    def replays(calls, calls_per_graph, count, together):
        together()
        choice = calls[0].args[-1]
        calls[0]()
        us = US[choice][min(rank, 1)]
        # Odd replays are slow on rank 0 alone, even ones on no rank: the median of the slowest is `us` of the slowest.
        return [us, us + 90.0 * (rank == 0), us, us, us]

    timing.replays = replays  # type: ignore[assignment]
    wrong = OneShot(1, pushers=4, ahead=2)
    right = one_shot.run

    def run(seam, operands, own, *, launch):
        outputs = right(seam, operands, own, launch=launch)
        if launch == wrong and rank == size - 1:
            outputs[1].view(torch.uint8)[0, 0] ^= 1
        return outputs

    one_shot.run = run  # type: ignore[assignment]
    bench = OneShotBench(dist.group.WORLD.group_name, dist.group.WORLD, ch, torch.device("cpu"))
    assert not bench.takes(Shape(ONE_SHOT, size, "fp8_token", "float32", HIDDEN, 17))
    shape = Shape(ONE_SHOT, size, "fp8_token", "bfloat16", HIDDEN, TOKENS)
    assert bench.takes(shape)
    (timed,) = search([shape], bench, lambda _: None)
    assert dict(timed.times) == {
        SHIPPED: 10.0,
        wrong: None,
        OneShot(1, pushers=4, ahead=4): 8.5,
        OneShot(1, pushers=4, ahead=8): 11.0,
    }
    assert timed.row.launch == OneShot(1, pushers=4, ahead=4)
    dist.barrier()
    print(f"rank {rank} chose {timed.row.launch}\n", end="", flush=True)  # one write: the ranks share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, where = int(sys.argv[1]), sys.argv[2]
    for r in range(ranks):
        Path(where, str(r)).write_bytes(b"\xff" * channel.buffer_bytes(ranks, SLOT_BYTES))
    mp.spawn(run_rank, (ranks, where), ranks)
