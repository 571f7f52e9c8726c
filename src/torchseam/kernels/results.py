"""How the results of a row travel from its owner to the other ranks: sections of packets (`sections`).

Every section is 32-bit words that are never ABSENT:

- rows of 16 or 32 bits an element, FP8 codes: as they lie in memory, a word of all ones (NaNs) as other NaNs. FP8
  codes that are NaN are 0xFF or 0x7F either way.
- scales of FP8: a word each; those of one byte have zeros above it.
- NVFP4 codes: as they lie in memory, but all ones, which is eight times -6 and no NaN, travels as zeros. A word beside
  each packet, of 32 elements, has the packet's two block scales in its lower half, and above them a bit for each
  of the packet's words: all ones.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment"

import triton
import triton.language as tl

from torchseam.kernels.packets import (
    clear_packets,
    join_words,
    load_packets,
    pack_words,
    payload,
    store_packets,
)
from torchseam.kernels.rows import await_from
from torchseam.kernels.stores import store_scale_row

_ABSENT = tl.constexpr(-1)


# ---- words ------------------------------------------------------------------------------------


@triton.jit
def row_words(elements, LANES: tl.constexpr):
    """Elements [LANES] of 16 or 32 bits as the words that are sent and stored."""
    if elements.dtype.primitive_bitwidth == 32:
        words = elements.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(elements.to(tl.int16, bitcast=True), (LANES // 2, 2)))
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return payload(words)


@triton.jit
def byte_words(codes, LANES: tl.constexpr):
    """Bytes [LANES] (the lower ones of integers) as words."""
    first, second, third, fourth = pack_words(codes.to(tl.int32) & 0xFF, LANES // 4)
    return first | (second << 8) | (third << 16) | (fourth << 24)


@triton.jit
def scale_words(scales, LANES: tl.constexpr):
    """FP8 scales, [LANES] or one, fp32 or one-byte codes, as words."""
    words = scales
    if scales.dtype == tl.float32:
        words = scales.to(tl.int32, bitcast=True)
    return payload(tl.zeros((LANES,), tl.int32) + words)


@triton.jit
def scales_of_words(words, dtype: tl.constexpr):
    """The scales of `scale_words`, for storage as `dtype`."""
    scales = words
    if dtype == tl.float32:
        scales = words.to(tl.float32, bitcast=True)
    return scales


@triton.jit
def nvfp4_words(words, scales, LANES: tl.constexpr):
    """Code words [LANES / 8] and block scales [LANES / 16] as sent: words, and the word beside each packet."""
    lower, upper = tl.split(tl.reshape(scales.to(tl.int32) & 0xFF, (LANES // 32, 2)))
    first, second, third, fourth = pack_words((words == _ABSENT).to(tl.int32), LANES // 32)
    ones = first | (second << 1) | (third << 2) | (fourth << 3)
    return tl.where(words == _ABSENT, 0, words), lower | (upper << 8) | (ones << 16)


@triton.jit
def nvfp4_of_packets(first, second, third, fourth, beside, N: tl.constexpr):
    """Packets [N] and the words beside them -> code words [4 * N], block scales [2 * N]."""
    first = tl.where((beside & 0x10000) != 0, _ABSENT, first)
    second = tl.where((beside & 0x20000) != 0, _ABSENT, second)
    third = tl.where((beside & 0x40000) != 0, _ABSENT, third)
    fourth = tl.where((beside & 0x80000) != 0, _ABSENT, fourth)
    scales = tl.reshape(tl.join(beside & 0xFF, (beside >> 8) & 0xFF), (2 * N,))
    return join_words(first, second, third, fourth, N), scales


# ---- sections ---------------------------------------------------------------------------------


@triton.jit
def push_section(
    words,
    LANES: tl.constexpr,
    PACKETS: tl.constexpr,
    place,
    buffers_ptr,
    slot_packets,
    N: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Push the first PACKETS packets of words [LANES] to `place` (in packets) of this rank's slot on all others.

    N: lanes that the program has a thread for, at least. Fewer packets than that are repeated over so many lanes, and
    only one of them is sent: no two threads may hold the same lane, since both would push it.
    """
    COUNT: tl.constexpr = N if LANES < 4 * N else LANES // 4
    if LANES < 4 * COUNT:
        words = tl.reshape(tl.broadcast_to(tl.expand_dims(words, 0), (4 * COUNT // LANES, LANES)), (4 * COUNT,))
    first, second, third, fourth = pack_words(words, COUNT)
    lanes = tl.arange(0, COUNT)
    sent = lanes < PACKETS
    for distance in tl.static_range(1, WORLD):
        peer = (RANK + distance) % WORLD
        # A rank keeps no slot for itself.
        slot = RANK - 1 if peer < RANK else RANK
        buffer = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.int32))
        pointers = buffer + (slot * slot_packets + place) * 4 + lanes * 4
        store_packets(pointers, first, second, third, fourth, sent, PTX)


@triton.jit
def store_row_words(row_ptr, row, words, LANES: tl.constexpr, COUNT: tl.constexpr):
    """Store the first COUNT of words [LANES] as row `row` (int64) of a tensor of rows of COUNT words."""
    lanes = tl.arange(0, LANES)
    pointers = row_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * COUNT + lanes
    tl.store(pointers, words, mask=lanes < COUNT)


@triton.jit
def send_row(
    elements,
    row_ptr,
    row,
    place,
    buffers_ptr,
    slot_packets,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKETS: tl.constexpr,
    N: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Store elements [BLOCK] as row `row` (int64) here, and push them to all others, where PACKETS is not 0."""
    LANES: tl.constexpr = BLOCK * elements.dtype.primitive_bitwidth // 32
    COUNT: tl.constexpr = HIDDEN * elements.dtype.primitive_bitwidth // 32
    words = row_words(elements, BLOCK)
    store_row_words(row_ptr, row, words, LANES, COUNT)
    if PACKETS > 0:
        push_section(words, LANES, PACKETS, place, buffers_ptr, slot_packets, N, WORLD, RANK, PTX)


@triton.jit
def send_codes(
    codes,
    scales,
    codes_ptr,
    scales_ptr,
    row,
    column_stride,
    place,
    buffers_ptr,
    slot_packets,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
    CODES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    RESULT_PACKETS: tl.constexpr,
    N: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Store what `quantize_row` returned for `row` here, and push it to all others."""
    CODE_PACKETS: tl.constexpr = SCALES_AT - CODES_AT
    SCALE_PACKETS: tl.constexpr = RESULT_PACKETS - SCALES_AT
    if SCHEME == "nvfp4":
        words = byte_words(codes, BLOCK // 2)
        store_row_words(codes_ptr, row, words, BLOCK // 8, HIDDEN // 8)
        store_scale_row(scales_ptr, scales, row, 0, column_stride, HIDDEN // 16, HIDDEN // 16, BLOCK // 16, LAYOUT)
        sent, beside = nvfp4_words(words, scales, BLOCK)
        push_section(sent, BLOCK // 8, CODE_PACKETS, place + CODES_AT, buffers_ptr, slot_packets, N, WORLD, RANK, PTX)
        push_section(
            beside, BLOCK // 32, SCALE_PACKETS, place + SCALES_AT, buffers_ptr, slot_packets, N, WORLD, RANK, PTX
        )
    else:
        words = payload(byte_words(codes, BLOCK))
        store_row_words(codes_ptr, row, words, BLOCK // 4, HIDDEN // 4)
        push_section(words, BLOCK // 4, CODE_PACKETS, place + CODES_AT, buffers_ptr, slot_packets, N, WORLD, RANK, PTX)
        if SCHEME != "fp8_static":
            SCALES: tl.constexpr = 1 if SCHEME == "fp8_token" else BLOCK // GROUP
            COUNT: tl.constexpr = 1 if SCHEME == "fp8_token" else HIDDEN // GROUP
            words = scale_words(scales, SCALES)
            stored = scales_of_words(words, scales_ptr.dtype.element_ty)
            store_scale_row(scales_ptr, stored, row, 0, column_stride, COUNT, COUNT, SCALES, LAYOUT)
            push_section(
                words, SCALES, SCALE_PACKETS, place + SCALES_AT, buffers_ptr, slot_packets, N, WORLD, RANK, PTX
            )


@triton.jit
def receive_results(
    base,
    row,
    reduced_ptr,
    residual_out_ptr,
    norm_out_ptr,
    codes_ptr,
    scales_ptr,
    column_stride,
    source,
    call,
    mailbox,
    timeout,
    trap,
    HIDDEN: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROW_PACKETS: tl.constexpr,
    RESIDUAL_AT: tl.constexpr,
    NORM_AT: tl.constexpr,
    CODES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    RESULT_PACKETS: tl.constexpr,
    N: tl.constexpr,
    RANK: tl.constexpr,
    WATCH: tl.constexpr,
    PTX: tl.constexpr,
):
    """Wait for the results of `row` (int64) from rank `source` at `base`, store them, and set the packets back."""
    NORM_PACKETS: tl.constexpr = CODES_AT - NORM_AT
    CODE_PACKETS: tl.constexpr = SCALES_AT - CODES_AT
    SCALE_PACKETS: tl.constexpr = RESULT_PACKETS - SCALES_AT
    NORM_LANES: tl.constexpr = N if NORM_PACKETS <= N else 2 * N
    lanes = tl.arange(0, N)
    # All first reads are under way before the first is waited for.
    if RESIDUAL_AT > 0:
        reduced_at, reduced_mask = base + lanes * 4, lanes < ROW_PACKETS
        reduced = load_packets(reduced_at, reduced_mask, PTX)
    if NORM_AT > RESIDUAL_AT:
        residual_at, residual_mask = base + (RESIDUAL_AT + lanes) * 4, lanes < ROW_PACKETS
        residual = load_packets(residual_at, residual_mask, PTX)
    if NORM_PACKETS > 0:
        norm_lanes = tl.arange(0, NORM_LANES)
        norm_at, norm_mask = base + (NORM_AT + norm_lanes) * 4, norm_lanes < NORM_PACKETS
        norm = load_packets(norm_at, norm_mask, PTX)
    if CODE_PACKETS > 0:
        codes_at, codes_mask = base + (CODES_AT + lanes) * 4, lanes < CODE_PACKETS
        codes = load_packets(codes_at, codes_mask, PTX)
    if SCALE_PACKETS > 0:
        if SCHEME == "nvfp4":
            # Each lane reads the packet that has the word beside its own.
            scales_at, scales_mask = base + (SCALES_AT + lanes // 4) * 4, lanes < CODE_PACKETS
        else:
            scales_at, scales_mask = base + (SCALES_AT + lanes) * 4, lanes < SCALE_PACKETS
        scales = load_packets(scales_at, scales_mask, PTX)

    if RESIDUAL_AT > 0:
        a, b, c, d = await_from(
            reduced_at, reduced, reduced_mask, source, call, mailbox, timeout, trap, RANK, WATCH, PTX
        )
        store_row_words(reduced_ptr, row, join_words(a, b, c, d, N), 4 * N, 4 * ROW_PACKETS)
    if NORM_AT > RESIDUAL_AT:
        a, b, c, d = await_from(
            residual_at, residual, residual_mask, source, call, mailbox, timeout, trap, RANK, WATCH, PTX
        )
        store_row_words(residual_out_ptr, row, join_words(a, b, c, d, N), 4 * N, 4 * ROW_PACKETS)
    if NORM_PACKETS > 0:
        a, b, c, d = await_from(norm_at, norm, norm_mask, source, call, mailbox, timeout, trap, RANK, WATCH, PTX)
        store_row_words(norm_out_ptr, row, join_words(a, b, c, d, NORM_LANES), 4 * NORM_LANES, 4 * NORM_PACKETS)
    if CODE_PACKETS > 0:
        a, b, c, d = await_from(codes_at, codes, codes_mask, source, call, mailbox, timeout, trap, RANK, WATCH, PTX)
        if SCHEME == "nvfp4":
            e, f, g, h = await_from(
                scales_at, scales, scales_mask, source, call, mailbox, timeout, trap, RANK, WATCH, PTX
            )
            which = lanes % 4
            beside = tl.where(which == 0, e, tl.where(which == 1, f, tl.where(which == 2, g, h)))
            words, blocks = nvfp4_of_packets(a, b, c, d, beside, N)
            store_row_words(codes_ptr, row, words, 4 * N, HIDDEN // 8)
            store_scale_row(scales_ptr, blocks, row, 0, column_stride, HIDDEN // 16, HIDDEN // 16, 2 * N, LAYOUT)
        else:
            store_row_words(codes_ptr, row, join_words(a, b, c, d, N), 4 * N, HIDDEN // 4)
            if SCALE_PACKETS > 0:
                COUNT: tl.constexpr = 1 if SCHEME == "fp8_token" else HIDDEN // GROUP
                a, b, c, d = await_from(
                    scales_at, scales, scales_mask, source, call, mailbox, timeout, trap, RANK, WATCH, PTX
                )
                values = scales_of_words(join_words(a, b, c, d, N), scales_ptr.dtype.element_ty)
                store_scale_row(scales_ptr, values, row, 0, column_stride, COUNT, COUNT, 4 * N, LAYOUT)

    # Threads may hold copies of each other's packets: all must have read before one clears.
    tl.debug_barrier()
    for chunk in tl.static_range((RESULT_PACKETS + N - 1) // N):
        cleared = chunk * N + lanes
        clear_packets(base + cleared * 4, cleared < RESULT_PACKETS, PTX)
