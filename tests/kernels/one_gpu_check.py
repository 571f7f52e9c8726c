"""The one-shot kernel with both of its ranks side by side on one GPU, for machines that have no second.

    PYTHONPATH=src python3 tests/kernels/one_gpu_check.py

Each rank has a stream, and buffers that are plain memory of the same GPU. Every scheme in whole rows and in parts,
bit for bit against the sum through the local kernel. Prints what differs; exits with 1 on any. What two GPUs do to
the protocol only `symmetric_check.py` can show.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from kernel_cases import same
from torch import Tensor

from torchseam.kernels import channel, local, one_shot
from torchseam.kernels.launch import OneShot
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

RANKS = 2
SLOT_BYTES = 2**22
#: (H, launch, T): all programs of both ranks must run at once on one GPU.
SHAPES = (
    (8192, OneShot(4, 8), (1, 2, 3, 8)),
    (5120, OneShot(4, 8), (1, 5)),
    (4096, OneShot(4, 4), (1, 8)),
    (4096, OneShot(16), (1, 5, 60)),
    (8192, OneShot(32), (1, 60)),
    (1024, OneShot(4), (3, 64)),
)
QUANTS = (
    Quant("fp8_static"),
    Quant("fp8_token"),
    Quant("fp8_token", scale_rule="reciprocal", scale_rounding="activation"),
    Quant("fp8_group"),
    Quant("nvfp4"),
)


def make_channels(buffers: list[Tensor]) -> list[channel.Channel]:
    addresses = torch.tensor([b.data_ptr() for b in buffers], device="cuda")
    many = torch.cuda.get_device_properties("cuda").multi_processor_count
    return [
        channel.Channel(
            rank=rank,
            world_size=RANKS,
            addresses=addresses,
            counter=torch.zeros(1, dtype=torch.int64, device="cuda"),
            slots=torch.full((channel.slots_words(many),), -1, dtype=torch.int32, device="cuda"),
            slot_bytes=SLOT_BYTES,
            multiprocessors=many,
        )
        for rank in range(RANKS)
    ]


def make_buffers() -> list[Tensor]:
    size = channel.buffer_bytes(RANKS, SLOT_BYTES)
    return [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(RANKS)]


def fits(quant: Quant, hidden: int, launch: OneShot) -> bool:
    """Whether the parts of a row are whole groups."""
    return not quant.multiple_of or hidden // launch.parts % quant.multiple_of == 0


def case_of(quant: Quant, hidden: int, tokens: int) -> tuple[Seam, list[Operands], list[Tensor]]:
    """(seam, each rank's operands, the outputs of the local kernel for the sum)."""
    inner = Norm(1e-6, "before_cast", 1) if quant.scheme == "fp8_token" else None
    alone = Seam(Norm(1e-6), None, inner, True, (quant,), ("residual", "norm"))
    generator = torch.Generator(device="cuda").manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    terms = [random(tokens, hidden) for _ in range(RANKS)]
    scale = torch.tensor([0.01 if quant.scheme == "fp8_static" else 600.0], device="cuda")
    shared = Operands(
        (terms[0].float() + terms[1].float()).bfloat16(),
        random(tokens, hidden),
        random(hidden) if inner else None,
        random(hidden),
        (scale,) if quant.takes_scale else (),
    )
    given = [dataclasses.replace(shared, x=term) for term in terms]
    return dataclasses.replace(alone, reduce=Reduce("one GPU")), given, local.run(alone, shared)


def main() -> int:
    buffers = make_buffers()
    channels = make_channels(buffers)
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    # Seconds in 32 bits of nanoseconds: a longer one would be another variant of the kernel.
    mailbox = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    watch = channel.Watch(2.0, mailbox.data_ptr())
    loaded: set[object] = set()
    compared, broken = 0, []
    for quant in QUANTS:
        for hidden, launch, all_tokens in SHAPES:
            if not fits(quant, hidden, launch):
                continue
            for tokens in all_tokens:
                seam, given, expected = case_of(quant, hidden, tokens)
                if (quant, hidden, launch) not in loaded:
                    # A kernel cannot be loaded while another one waits for it: load both, each giving up alone.
                    loaded.add((quant, hidden, launch))
                    quick = dataclasses.replace(watch, timeout=0.0002, trap=False)
                    for rank in range(RANKS):
                        one_shot.run(seam, given[rank], channels[rank], launch=launch, watch=quick)
                        torch.cuda.synchronize()
                    for buffer in buffers:
                        buffer.fill_(0xFF)
                    channels = make_channels(buffers)
                torch.cuda.synchronize()
                got = []
                for rank in range(RANKS):
                    with torch.cuda.stream(streams[rank]):
                        got.append(one_shot.run(seam, given[rank], channels[rank], launch=launch, watch=watch))
                torch.cuda.synchronize()
                for rank in range(RANKS):
                    compared += 1
                    if not all(same(a, b) for a, b in zip(got[rank], expected, strict=True)):
                        broken.append(f"{quant} H={hidden} T={tokens} {launch} rank {rank}")
    left = [int((b != 0xFF).sum()) for b in buffers]
    print(f"{compared} results compared, {len(broken)} differ, bytes left in the buffers: {left}")
    print("\n".join(broken))
    return 1 if broken or any(left) else 0


if __name__ == "__main__":
    sys.exit(main())
