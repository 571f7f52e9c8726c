"""Symmetric memory of one group: the buffers into which its ranks push (kernels/channel.py, docs/protocol.md).

One workspace serves every hidden size, dtype and seam of its group: what is in it between calls is the
same for all. Its size is fixed when it is made, so that captured CUDA graphs, which hold its addresses,
stay valid until `close`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchseam.backends.base import Group, Unavailable, agree, verdict
from torchseam.kernels.channel import Channel, buffer_bytes, slots_words
from torchseam.kernels.packets import ABSENT_WORD

#: Bytes of one rank's buffer: 64 MiB of rows for two ranks (4096 rows of 8192 in bf16), 9 MiB for eight.
BUFFER_BYTES = 2**27
#: Slots begin at multiples of this.
_ALIGNMENT = 2**12
_INT32, _INT64 = 4, 8


def slot_bytes_of(world_size: int, total: int = BUFFER_BYTES) -> int:
    """Bytes that one call may push, for a buffer of at most `total` bytes."""
    return total // buffer_bytes(world_size, 1) // _ALIGNMENT * _ALIGNMENT


def bytes_of(world_size: int, multiprocessors: int, slot_bytes: int | None = None) -> int:
    """Device memory that each rank's workspace holds, between GPUs of so many multiprocessors.

    Beside it lies what the driver rounds up to, and torch's signal pad of the buffer.
    """
    buffer = buffer_bytes(world_size, slot_bytes or slot_bytes_of(world_size))
    counter, addresses = _INT64, world_size * _INT64
    return buffer + addresses + counter + slots_words(multiprocessors) * _INT32


class Workspace:
    """One rank's buffer, mapped by all ranks of the group, and what the programs of a call share."""

    def __init__(self, group: Group, buffer: Tensor, addresses: list[int], slot_bytes: int, programs: int) -> None:
        self._buffer: Tensor | None = buffer
        self.channel = Channel(
            rank=group.rank,
            world_size=group.world_size,
            addresses=torch.tensor(addresses, dtype=torch.int64, device=group.device),
            counter=torch.zeros(1, dtype=torch.int64, device=group.device),
            slots=torch.full((slots_words(programs),), ABSENT_WORD, dtype=torch.int32, device=group.device),
            slot_bytes=slot_bytes,
            multiprocessors=programs,
        )

    def memory(self) -> int:
        """Bytes of device memory."""
        tensors = (self._buffer, self.channel.addresses, self.channel.counter, self.channel.slots)
        return sum(t.nbytes for t in tensors if t is not None)

    def close(self) -> None:
        """Give the buffer back. Nothing may use the channel afterwards, a captured graph neither."""
        self._buffer = None


def create(group: Group, slot_bytes: int | None = None) -> Workspace:
    """A workspace of the group, all ranks at once; outside CUDA graph capture.

    Raises `Unavailable` on every rank when one of them fails, and then holds nothing.
    """
    # torch.distributed._symmetric_memory is all there is for this in torch; its surface here is `empty`
    # and `rendezvous`, the same from torch 2.11 to 2.13.
    from torch.distributed import _symmetric_memory as symmetric_memory

    size = slot_bytes or slot_bytes_of(group.world_size)
    buffer: Tensor | None = None
    failure: str | None = None
    try:
        buffer = symmetric_memory.empty(buffer_bytes(group.world_size, size), dtype=torch.uint8, device=group.device)
        buffer.fill_(0xFF)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    _raise_alike(group, failure, "cannot allocate symmetric memory")
    assert buffer is not None
    # Launches are chosen by it, and must be the same on all ranks: GPUs of one group can differ.
    own = torch.cuda.get_device_properties(group.device).multi_processor_count
    programs = min(agree(group, own))
    addresses: list[int] = []
    try:
        handle = symmetric_memory.rendezvous(buffer, group.name)  # type: ignore[arg-type]
        addresses = list(handle.buffer_ptrs)
        workspace = Workspace(group, buffer, addresses, size, programs)
        torch.cuda.synchronize(group.device)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    # Also the barrier after which every buffer is ready to be pushed into.
    _raise_alike(group, failure, "cannot map the peers' memory")
    return workspace


def _raise_alike(group: Group, failure: str | None, what: str) -> None:
    objection = verdict(group, None if failure is None else f"{what} ({failure})")
    if objection is not None:
        raise Unavailable(objection)
