"""A row of a collective kernel: what this GPU holds of it, the sum over the ranks, and which rows can be exchanged."""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="var-annotated,assignment"

import triton
import triton.language as tl
from torch import Tensor

from torchseam.kernels import launch as launches
from torchseam.kernels import local
from torchseam.kernels.casts import to_float32
from torchseam.kernels.launch import PACKET
from torchseam.kernels.packets import await_packets, await_packets_watched, load_packets, unpack_words


@triton.jit
def own_row(x_ptr, residual_ptr, row, columns, mask, x_stride, residual_stride, RESIDUAL: tl.constexpr):
    """What this GPU holds of a row (int64): x, and the residual or anything where the seam has none."""
    own = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    residual = own
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
    return own, residual


@triton.jit
def await_from(
    pointers,
    read,
    mask,
    source,
    call,
    mailbox,
    timeout,
    trap,
    RANK: tl.constexpr,
    WATCH: tl.constexpr,
    PTX: tl.constexpr,
):
    """The four words of packets that rank `source` pushes; `read` is what `load_packets` gave."""
    a, b, c, d = read
    if WATCH:
        record = call * 256 + (RANK * 16 + source)
        a, b, c, d = await_packets_watched(pointers, a, b, c, d, timeout, mailbox, record, trap)
    else:
        a, b, c, d = await_packets(pointers, a, b, c, d, mask, PTX)
    return a, b, c, d


@triton.jit
def sum_in_rank_order(
    own,
    buffer,
    offsets,
    slot_packets,
    sent,
    call,
    mailbox,
    timeout,
    trap,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    dtype: tl.constexpr,
    N: tl.constexpr,
    WATCH: tl.constexpr,
    PTX: tl.constexpr,
):
    """fp32 sum over the ranks, from rank 0 on; `own` is this rank's term.

    The others' lie at `offsets` (in packets) of `buffer`'s slots.
    """
    stride = slot_packets.to(tl.int64) * 4
    # The first reads are under way before the first is waited for; all of seven peers would not fit in registers.
    AHEAD: tl.constexpr = 4
    read = ()
    for slot in tl.static_range(min(AHEAD, WORLD - 1)):
        words = load_packets(buffer + slot * stride + offsets * 4, sent, PTX)
        read = read + (words,)  # noqa: RUF005  # Triton has no starred expressions
    if RANK == 0:
        total = own
    else:
        total = tl.zeros_like(own)
    for slot in tl.static_range(WORLD - 1):
        if slot == RANK and RANK != 0:
            total = total + own
        pointers = buffer + slot * stride + offsets * 4
        source = slot + 1 if slot >= RANK else slot
        a, b, c, d = await_from(pointers, read[slot], sent, source, call, mailbox, timeout, trap, RANK, WATCH, PTX)
        if slot + AHEAD < WORLD - 1:
            words = load_packets(buffer + (slot + AHEAD) * stride + offsets * 4, sent, PTX)
            read = read + (words,)  # noqa: RUF005
        term = to_float32(unpack_words(a, b, c, d, dtype, N))
        if slot == 0 and RANK != 0:
            total = term
        else:
            total = total + term
    if RANK == WORLD - 1:
        total = total + own
    return total


# ---- host -------------------------------------------------------------------------------------


def unsupported(x: Tensor) -> str | None:
    """Why rows like those of x [..., H], which the local kernel takes, cannot be exchanged, or None."""
    row = x.shape[-1] * x.itemsize
    if row % PACKET:
        return f"a row is {row} bytes; the ranks exchange packets of {PACKET} bytes"
    lanes = launches.block_of(x.shape[-1]) * x.itemsize // PACKET
    if lanes < launches.WARP:
        # The threads of a warp would share packets, and each push them: the second copy could come after the first
        # was read and set back.
        return f"a row is {row} bytes; the ranks exchange rows that give each thread of a warp a packet of its own"
    return None


def as_aligned_rows(x: Tensor) -> Tensor:
    """x [..., H] as rows that begin at multiples of 16 bytes: a view where x allows one, else a copy."""
    rows = local.as_rows(x)
    if rows.data_ptr() % PACKET or rows.stride(0) * rows.itemsize % PACKET:
        rows = rows.contiguous() if not rows.is_contiguous() else rows.clone()
    return rows
