"""The collective kernels with all of their ranks side by side on one GPU, for machines that have no second.

    PYTHONPATH=src python3 tests/kernels/one_gpu_check.py [--workers N] [--calls 5000] [--world-sizes 2,3,4]

Each rank has a stream, and a buffer that is plain memory of the same GPU. Every call of `one_gpu_cases.py`, bit for
bit against the sum through the local kernel, all bytes alike on all ranks; then many calls of both kernels in random
order on the same channels, a rank stalled now and then. Prints what differs; exits with 1 on any. Compilation is most
of the work, so the calls are split over processes that share the GPU. What several GPUs do to the protocol only
`symmetric_check.py` and `two_shot_check.py` can show.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import subprocess
import sys
import time

import one_gpu_cases
import torch
from collective_cases import Call, same_bytes, same_storage
from kernel_cases import poisoned_outputs, storage
from one_gpu_cases import SLOT_BYTES, leaves_sharded, reads_sharded
from torch import Tensor

from torchseam.kernels import channel, owners
from torchseam.kernels.channel import Watch
from torchseam.kernels.packets import ABSENT_WORD
from torchseam.operands import Operands

#: Clock ticks of a stall: about 1, 25 and 500 us.
STALLS = (2_000, 50_000, 1_000_000)


class Ranks:
    """All ranks of a group, each with a stream and a channel."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]
        size = channel.buffer_bytes(world_size, SLOT_BYTES)
        self.buffers = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
        self._mailbox = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        # Both in 32 bits of nanoseconds: more would be another variant of the kernel.
        self._watch = Watch(2.0, self._mailbox.data_ptr(), trap=False)
        #: For a rank that runs while no other does, and so gives up.
        self.alone = dataclasses.replace(self._watch, timeout=0.0002)
        self._loaded: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Channels as at first."""
        for buffer in self.buffers:
            buffer.fill_(0xFF)
        self._mailbox.zero_()
        programs = one_gpu_cases.programs_of_rank(self.world_size, self.multiprocessors)
        words = channel.slots_words(programs)
        self.channels = [
            channel.Channel(
                rank=rank,
                world_size=self.world_size,
                addresses=torch.tensor([b.data_ptr() for b in self.buffers], device="cuda"),
                counter=torch.zeros(1, dtype=torch.int64, device="cuda"),
                slots=torch.full((words,), ABSENT_WORD, dtype=torch.int32, device="cuda"),
                slot_bytes=SLOT_BYTES,
                multiprocessors=programs,
            )
            for rank in range(self.world_size)
        ]
        torch.cuda.synchronize()

    def load(self, call: Call) -> None:
        """Compile and load the kernels of all ranks: none can be loaded while another waits for it, so each rank runs
        alone at first, and gives up."""
        kernel = one_gpu_cases.kernel_of(call)
        if kernel not in self._loaded:
            self._loaded.add(kernel)
            for rank in range(self.world_size):
                self.run(call, rank, self.alone)
                torch.cuda.synchronize()
            self.reset()

    def run(self, call: Call, rank: int, watch: Watch | None = None) -> list[Tensor]:
        """The rank's part of the call, on the current stream."""
        operands = call.operands_of(call.terms[rank])
        return call.run(call.seam, operands, self.channels[rank], launch=call.launch, watch=watch or self._watch)

    def left(self) -> list[str]:
        """What is wrong with the channels when all calls have ended."""
        torch.cuda.synchronize()
        broken = []
        if record := int(self._mailbox):
            broken.append(channel.explain(record))
        for rank, buffer in enumerate(self.buffers):
            if count := int((buffer != 0xFF).sum()):
                broken.append(f"{count} bytes are left in the buffer of rank {rank}")
        if broken:
            self.reset()
        return [f"W={self.world_size}: {text}" for text in broken]


def on_gpu(call: Call) -> Call:
    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cuda()

    given = call.operands
    terms = tuple(term.cuda() for term in call.terms)
    operands = Operands(
        terms[0],
        moved(given.residual),
        moved(given.inner_weight),
        moved(given.weight),
        tuple(scale.cuda() for scale in given.scales),
    )
    return dataclasses.replace(call, terms=terms, operands=operands)


# ---- one call after another -------------------------------------------------------------------


def check_calls(world_size: int, shard: int, shards: int) -> tuple[int, list[str]]:
    """(results compared, what is wrong)."""
    ranks = Ranks(world_size)
    compared, broken = 0, []
    for case in one_gpu_cases.part(one_gpu_cases.calls(world_size, ranks.multiprocessors), shard, shards):
        call = on_gpu(case)
        with poisoned_outputs():
            ranks.load(call)
            expected = call.by_kernel()
            # All that runs beside the kernels under test is made ready first: loading it would wait for them.
            given = [without_others_residual(call, rank) for rank in range(world_size)]
            torch.cuda.synchronize()
            got = []
            for rank, stream in enumerate(ranks.streams):
                with torch.cuda.stream(stream):
                    got.append(ranks.run(given[rank], rank))
            torch.cuda.synchronize()
        compared += world_size
        broken += [f"{call}: {text}" for text in ranks.left()]
        for rank, outputs in enumerate(got):
            wrong = differences(call, rank, outputs, expected, got[0])
            broken += [f"W={world_size} rank {rank} {call}: {text}" for text in wrong]
    return compared, broken


def without_others_residual(call: Call, rank: int) -> Call:
    """NaN in the rows of the residual that the rank must not read."""
    if not reads_sharded(call):
        return call
    assert call.operands.residual is not None
    rows = owned(call, rank)
    residual = torch.full_like(call.operands.residual, float("nan"))
    residual[rows] = call.operands.residual[rows]
    return dataclasses.replace(call, operands=dataclasses.replace(call.operands, residual=residual))


def owned(call: Call, rank: int) -> slice:
    """The rows that the rank owns."""
    rows = owners.owned_rows(call.terms[0].shape[0], rank, len(call.terms))
    return slice(rows.start, rows.stop)


def differences(
    call: Call, rank: int, got: list[Tensor], expected: list[Tensor], first_rank: list[Tensor]
) -> list[str]:
    broken = []
    for index, (a, b, other) in enumerate(zip(got, expected, first_rank, strict=True)):
        if leaves_sharded(call, index):
            rows = owned(call, rank)
            if not same_storage(a[rows].clone(), b[rows].clone()):
                broken.append(f"output {index} differs in rows that it owns")
            a[rows].view(torch.uint8).fill_(0x7F)
            if not bool((storage(a) == 0x7F).all()):
                broken.append(f"output {index} was written where others own it")
        elif not same_storage(a, b):
            broken.append(f"output {index} differs from the local kernel's")
        elif not same_bytes(a, other):
            broken.append(f"output {index} differs from rank 0's")
    return broken


# ---- many calls -------------------------------------------------------------------------------


def check_many(world_size: int, calls: int) -> list[str]:
    """Both kernels in random order with nothing but the protocol between the ranks, which are stalled at random."""
    ranks = Ranks(world_size)
    cases = []
    for case in one_gpu_cases.mixed(world_size, ranks.multiprocessors):
        call = on_gpu(case)
        ranks.load(call)
        cases.append((call, call.by_kernel()))
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in ranks.streams]
    # What compares and stalls must be loaded before a rank waits for another.
    for (call, expected), stream in ((c, s) for c in cases for s in ranks.streams):
        with torch.cuda.stream(stream):
            for rank in range(world_size):
                wrong[rank] += differing(call, rank, expected, expected)
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
    alike = random.Random(world_size)
    for _ in range(calls):
        call, expected = alike.choice(cases)
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                if alike.random() < 0.02:
                    torch.cuda._sleep(alike.choice(STALLS))
                wrong[rank] += differing(call, rank, ranks.run(call, rank), expected)
    broken = ranks.left()
    for rank, (count, made) in enumerate(zip(wrong, ranks.channels, strict=True)):
        if int(count):
            broken.append(f"W={world_size} rank {rank}: {int(count)} wrong bytes in {calls} calls")
        if not broken and int(made.counter) != calls << 20:
            broken.append(f"W={world_size} rank {rank}: {int(made.counter) / 2**20} calls of {calls} were counted")
    return broken


def differing(call: Call, rank: int, got: list[Tensor], expected: list[Tensor]) -> Tensor:
    """How many bytes differ, on the device; of a sharded residual in the rank's own rows."""
    counts = []
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        if leaves_sharded(call, index):
            rows = owned(call, rank)
            counts.append((a[rows].view(torch.uint8) != b[rows].view(torch.uint8)).sum())
        else:
            counts.append((storage(a) != storage(b)).sum())
    return torch.stack(counts).sum()


# ---- all of it --------------------------------------------------------------------------------


def check_in_processes(workers: int, world_sizes: str) -> int:
    """`check_calls` of all world sizes, split over processes; how many broke."""
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__, "--world-sizes", world_sizes, "--shards", str(workers), "--shard"]
    children = [
        subprocess.Popen(
            [*command, str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(workers)
    ]
    compared = broken = failed = 0
    for child in children:
        output, _ = child.communicate()
        *lines, last = output.strip().splitlines() or [""]
        if last.startswith("done "):
            counts = [int(n) for n in last.split()[1:]]
            compared, broken = compared + counts[0], broken + counts[1]
        else:
            failed += 1
            lines.append(last)
        print("\n".join(lines[-30:]), end="\n" if lines else "")
    print(
        f"{compared} results compared, {broken} broken, {failed} of {workers} workers died, "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    return broken + failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--world-sizes", default=",".join(map(str, one_gpu_cases.WORLD_SIZES)))
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    world_sizes = [int(n) for n in given.world_sizes.split(",")]
    if given.shard is not None:
        found = [check_calls(world_size, given.shard, given.shards) for world_size in world_sizes]
        wrong = [text for _, texts in found for text in texts]
        print("\n".join([*wrong[:20], f"done {sum(n for n, _ in found)} {len(wrong)}"]))
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    broken = check_in_processes(given.workers, given.world_sizes)
    for world_size in world_sizes:
        started = time.monotonic()
        wrong = check_many(world_size, given.calls)
        print(f"W={world_size}, {given.calls} calls: {wrong or 'ok'}, {time.monotonic() - started:.0f} s", flush=True)
        broken += len(wrong)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
