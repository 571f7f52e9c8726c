"""What the ranks of a group share for its collective kernels, and how their programs count the calls.

`backends/workspace.py` makes it of symmetric memory; docs/protocol.md says who may write what when.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from torchseam.kernels.epilogue import EXCHANGES
from torchseam.kernels.packets import WORDS


@dataclass(frozen=True)
class Channel:
    """What the ranks of a group share, as one of them sees it.

    addresses: [W] int64 on the device, where each rank's buffer begins in this rank's address space.
    counter: [1] int64, 0 before the first call. slots: int32, `slots_words(multiprocessors)` of them.
    slot_bytes: what each of a buffer's 2 * (W - 1) slots holds. The buffer and `slots` are all ABSENT words at first
    (zeros in `slots` would be tags of call 0).
    multiprocessors: how many the smallest GPU of the group has: launches are chosen by it, the same on all ranks; so
        many programs at least run at once.
    """

    rank: int
    world_size: int
    addresses: Tensor
    counter: Tensor
    slots: Tensor
    slot_bytes: int
    multiprocessors: int


@dataclass(frozen=True)
class Watch:
    """How long a program waits for a packet, and what happens then.

    timeout: seconds; 0 waits for ever, and costs nothing. mailbox: address of an int64 that the host reads,
    0 until a wait ends: call * 256 + rank * 16 + source (`explain`). trap: the kernel is stopped (and with it the
    CUDA context), else it goes on with wrong values.
    """

    timeout: float = 0.0
    mailbox: int = 0
    trap: bool = True

    def arguments(self) -> tuple[int, int, int]:
        """mailbox, nanoseconds, trap: as the kernels take them."""
        return self.mailbox, int(self.timeout * 1e9), int(self.trap)


UNWATCHED = Watch()


def explain(record: int) -> str:
    """What a mailbox that is not 0 says."""
    call, rank, source = record >> 8, record >> 4 & 15, record & 15
    return f"rank {rank} waited in vain for what rank {source} pushes in call {call} of this group's workspace"


def slots_words(programs: int) -> int:
    """Words of `Channel.slots`."""
    return EXCHANGES * programs * WORDS


def buffer_bytes(world_size: int, slot_bytes: int) -> int:
    """Bytes of one rank's buffer."""
    return 2 * (world_size - 1) * slot_bytes


# The counter of a workspace counts calls in units of 2^20; the programs of a call add a unit up between them, so that
# however many they are, the call is over when the counter has grown by exactly one.


@triton.jit
def call_number(counter_ptr):
    """The number of this call (int64), the same in all of its programs whenever they ask."""
    return tl.load(counter_ptr, volatile=True) >> 20


@triton.jit
def count_program(counter_ptr):
    """This program knows the number: once all of them do, the counter is the next call's.

    After a barrier behind the last thread's `call_number`.
    """
    programs = tl.num_programs(0)
    share = tl.where(tl.program_id(0) == 0, (1 << 20) - programs + 1, 1).to(tl.int64)
    tl.atomic_add(counter_ptr, share, sem="relaxed")
