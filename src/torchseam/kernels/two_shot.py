"""Two-shot all_reduce + epilogue: rows are dealt to owners, who sum, run the epilogue and send the results to all.

    owner of a row: s = round(sum of x over the ranks, in rank order, fp32); h = round(s + residual);
                    y = rms_norm(h) * weight; codes, scales = quantise(y)        # once a row
    every rank:     codes, scales, and what else the seam emits, as the owner sent them

One launch, and the bits of `one_shot`. What is gathered are the final bytes, so that a row costs less of NVLink than
in one-shot where many ranks share it. `owners` deals the rows. docs/protocol.md has the protocol and why it is right.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="var-annotated,assignment"

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torchseam.kernels import local
from torchseam.kernels.arguments import arguments, on_device
from torchseam.kernels.calls import Call, run_seam
from torchseam.kernels.casts import round_to, to_float32
from torchseam.kernels.channel import UNWATCHED, Channel, Watch, call_number, count_program
from torchseam.kernels.epilogue import epilogue
from torchseam.kernels.launch import PACKET, TwoShot, choose_two_shot
from torchseam.kernels.owners import first_row, owned_rows, row_count
from torchseam.kernels.packets import clear_packets, pack_words, payload, store_packets
from torchseam.kernels.results import receive_results, send_codes, send_row
from torchseam.kernels.rows import own_row, sum_in_rank_order
from torchseam.kernels.sections import sections_of
from torchseam.kernels.stores import store_padding_row
from torchseam.operands import Operands
from torchseam.seam import Seam


# Not specialised: what changes from call to call, or each new T could mean a new compilation.
@triton.jit(
    do_not_specialize=[
        "tokens",
        "padded_tokens",
        "column_stride",
        "pushers",
        "first_reducer",
        "reducers",
        "first_gatherer",
        "mailbox",
        "timeout",
        "trap",
    ]
)
def two_shot_kernel(
    x_ptr,
    residual_ptr,
    inner_weight_ptr,
    weight_ptr,
    scale_ptr,
    reduced_ptr,
    residual_out_ptr,
    norm_out_ptr,
    codes_ptr,
    scales_ptr,
    buffers_ptr,
    counter_ptr,
    mailbox,
    timeout,
    trap,
    tokens,
    padded_tokens,
    x_stride,
    residual_stride,
    column_stride,
    slot_packets,
    pushers,
    first_reducer,
    reducers,
    first_gatherer,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INNER_WEIGHT: tl.constexpr,
    INNER_OFFSET: tl.constexpr,
    INNER_EPS: tl.constexpr,
    WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    SCHEME: tl.constexpr,
    RULE: tl.constexpr,
    GROUP: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    SCALE_ROUNDING: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_REDUCED: tl.constexpr,
    HAS_RESIDUAL_OUT: tl.constexpr,
    HAS_NORM_OUT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    RESIDUAL_AT: tl.constexpr,
    NORM_AT: tl.constexpr,
    CODES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    RESULT_PACKETS: tl.constexpr,
    AHEAD: tl.constexpr,
    WATCH: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, residual: T rows of HIDDEN elements, x's 16-byte aligned; of the residual, rows that others own are not read.

    `buffers_ptr`: the addresses (int64) of all ranks' buffers; a buffer is two halves, taken in turn, of WORLD - 1
    slots of `slot_packets` packets. In a slot lie first the source's partials of this rank's rows, then its results
    of its own rows; each as if it owned as many as rank 0 does. Results are sections, which begin at the packets
    *_AT of RESULT_PACKETS (`sections.Sections`); a residual that is not gathered has none.
    Programs below `pushers` push partials; `reducers` from `first_reducer` on sum and send results; those from
    `first_gatherer` on receive them. A program does what it does of these in that order, and all of one before the
    next; so it waits only for programs that were there before it, on ranks that need not wait for it.
    WATCH: as in `one_shot_kernel`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    LANES_OF_PACKET: tl.constexpr = 16 // (dtype.primitive_bitwidth // 8)
    N: tl.constexpr = BLOCK // LANES_OF_PACKET
    ROW_PACKETS: tl.constexpr = HIDDEN // LANES_OF_PACKET
    ROW_LANES: tl.constexpr = 4 * N
    PEERS: tl.constexpr = WORLD - 1

    if PDL:
        # Whoever follows may be launched now: it waits, before it reads anything, until this grid is done.
        gdc_launch_dependents()
        gdc_wait()
    call = call_number(counter_ptr)
    half = (call & 1) * (PEERS * slot_packets)
    program = tl.program_id(0)
    # What makes an int64 of a loop's variable, which the interpreter has as an int.
    zero = tl.zeros((), tl.int64)
    most = row_count(tokens, 0, WORLD)
    packets = tl.arange(0, N)
    words_of_row = tl.arange(0, ROW_LANES)

    if program < pushers:
        for first in tl.range(program, most, pushers * AHEAD):
            # AHEAD rows for each peer are on their way from this GPU's memory before the first is sent on.
            held = ()
            for k in tl.static_range(AHEAD * PEERS):
                peer = (RANK + 1 + k % PEERS) % WORLD
                index = zero + first + k // PEERS * pushers
                row = first_row(tokens, peer, WORLD) + index
                pointers = (x_ptr + row * x_stride).to(tl.pointer_type(tl.int32), bitcast=True) + words_of_row
                count = tl.where(index < row_count(tokens, peer, WORLD), 4 * ROW_PACKETS, 0)
                words = tl.load(pointers, mask=words_of_row < count, other=0)
                held = held + (words,)  # noqa: RUF005  # Triton has no starred expressions
            for k in tl.static_range(AHEAD * PEERS):
                peer = (RANK + 1 + k % PEERS) % WORLD
                index = zero + first + k // PEERS * pushers
                count = tl.where(index < row_count(tokens, peer, WORLD), ROW_PACKETS, 0)
                a, b, c, d = pack_words(payload(held[k]), N)
                # A rank keeps no slot for itself.
                slot = RANK - 1 if peer < RANK else RANK
                buffer = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.int32))
                place = slot * slot_packets + half + index * ROW_PACKETS
                store_packets(buffer + place * 4 + packets * 4, a, b, c, d, packets < count, PTX)

    tl.debug_barrier()
    count_program(counter_ptr)

    buffer = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int32))
    # Where results begin in the half, of a slot.
    behind_partials = half + most.to(tl.int64) * ROW_PACKETS

    if (program >= first_reducer) & (program < first_reducer + reducers):
        columns = tl.arange(0, BLOCK)
        inside = columns < HIDDEN
        scale = None
        if HAS_SCALE:
            scale = tl.load(scale_ptr)
        for index in tl.range(program - first_reducer, row_count(tokens, RANK, WORLD), reducers):
            row = zero + first_row(tokens, RANK, WORLD) + index
            partials = buffer + (half + (zero + index) * ROW_PACKETS) * 4
            # Again for each row: what is kept from row to row is kept as fp32, in registers that are not there.
            inner_weight = None
            if INNER_WEIGHT == "before_cast" or INNER_WEIGHT == "after_cast":
                inner_weight = tl.load(inner_weight_ptr + columns, mask=inside, other=0.0)
            weight = None
            if WEIGHT == "before_cast" or WEIGHT == "after_cast":
                weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
            own, residual = own_row(x_ptr, residual_ptr, row, columns, inside, x_stride, residual_stride, RESIDUAL)
            total = sum_in_rank_order(
                to_float32(own),
                partials,
                packets,
                slot_packets,
                packets < ROW_PACKETS,
                call,
                mailbox,
                timeout,
                trap,
                WORLD,
                RANK,
                dtype,
                N,
                WATCH,
                PTX,
            )
            reduced = round_to(total, dtype, NATIVE)
            h, y, codes, scales = epilogue(
                reduced,
                residual,
                inner_weight,
                weight,
                scale,
                None,
                0,
                call,
                HIDDEN,
                HIDDEN,
                BLOCK,
                RESIDUAL,
                INNER_WEIGHT,
                INNER_OFFSET,
                INNER_EPS,
                WEIGHT,
                OFFSET,
                EPS,
                SCHEME,
                RULE,
                GROUP,
                FLOOR,
                SCALE_RULE,
                SCALE_ROUNDING,
                SCALE_DTYPE,
                NATIVE,
                1,
                0,
                PTX,
            )
            place = behind_partials + (zero + index) * RESULT_PACKETS
            if HAS_REDUCED:
                send_row(
                    reduced,
                    reduced_ptr,
                    row,
                    place,
                    buffers_ptr,
                    slot_packets,
                    HIDDEN,
                    BLOCK,
                    RESIDUAL_AT,
                    N,
                    WORLD,
                    RANK,
                    PTX,
                )
            if HAS_RESIDUAL_OUT:
                send_row(
                    h,
                    residual_out_ptr,
                    row,
                    place + RESIDUAL_AT,
                    buffers_ptr,
                    slot_packets,
                    HIDDEN,
                    BLOCK,
                    NORM_AT - RESIDUAL_AT,
                    N,
                    WORLD,
                    RANK,
                    PTX,
                )
            if HAS_NORM_OUT:
                send_row(
                    y,
                    norm_out_ptr,
                    row,
                    place + NORM_AT,
                    buffers_ptr,
                    slot_packets,
                    HIDDEN,
                    BLOCK,
                    CODES_AT - NORM_AT,
                    N,
                    WORLD,
                    RANK,
                    PTX,
                )
            if SCHEME != "absent":
                send_codes(
                    codes,
                    scales,
                    codes_ptr,
                    scales_ptr,
                    row,
                    column_stride,
                    place,
                    buffers_ptr,
                    slot_packets,
                    HIDDEN,
                    BLOCK,
                    SCHEME,
                    GROUP,
                    LAYOUT,
                    CODES_AT,
                    SCALES_AT,
                    RESULT_PACKETS,
                    N,
                    WORLD,
                    RANK,
                    PTX,
                )
            # Threads may hold copies of each other's packets: all must have read before one clears.
            tl.debug_barrier()
            for slot in tl.static_range(PEERS):
                clear_packets(partials + (slot * slot_packets + zero) * 4 + packets * 4, packets < ROW_PACKETS, PTX)

    if program >= first_gatherer:
        gatherers = tl.num_programs(0) - first_gatherer
        for index in tl.range(program - first_gatherer, most, gatherers):
            for slot in tl.range(0, PEERS):
                source = slot + tl.where(zero + slot >= RANK, 1, 0).to(tl.int32)
                if index < row_count(tokens, source, WORLD):
                    receive_results(
                        buffer + (slot * slot_packets + behind_partials + (zero + index) * RESULT_PACKETS) * 4,
                        zero + first_row(tokens, source, WORLD) + index,
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
                        HIDDEN,
                        SCHEME,
                        GROUP,
                        LAYOUT,
                        ROW_PACKETS,
                        RESIDUAL_AT,
                        NORM_AT,
                        CODES_AT,
                        SCALES_AT,
                        RESULT_PACKETS,
                        N,
                        RANK,
                        WATCH,
                        PTX,
                    )
        if LAYOUT == "swizzled" or LAYOUT == "tma_aligned" or LAYOUT == "tma_aligned_packed":
            for row in tl.range(tokens + program - first_gatherer, padded_tokens, gatherers):
                store_padding_row(scales_ptr, zero + row, column_stride, HIDDEN, BLOCK, GROUP, LAYOUT)


# ---- host -------------------------------------------------------------------------------------


def two_shot_bytes(seam: Seam, operands: Operands, world_size: int) -> int:
    """What a call needs of each slot of the buffers (`Channel.slot_bytes`): partials and results of one owner."""
    x = operands.x
    hidden = x.shape[-1]
    rows = len(owned_rows(x.numel() // hidden, 0, world_size))
    return rows * (hidden * x.itemsize + PACKET * sections_of(seam, operands).packets)


def run(
    seam: Seam, operands: Operands, channel: Channel, *, launch: TwoShot | None = None, watch: Watch = UNWATCHED
) -> list[Tensor]:
    """`reference.run` of a seam that reduces, on every rank of the channel, by one launch; `one_shot.run`'s bits.

    Collective, and several quantisers: as `one_shot.run`. It reads no rows of the residual that others own
    (`owned_rows`), and writes none where `residual_out` is `sharded`. ValueError where `two_shot_bytes` are not in a
    slot, and for a launch of more threads than packets.
    """
    needed = two_shot_bytes(seam, operands, channel.world_size)
    if needed > channel.slot_bytes:
        raise ValueError(f"the call needs {needed} bytes of each slot; the workspace's have {channel.slot_bytes}")
    return run_seam(seam, operands, lambda call: _launch(call, channel, launch, watch), local.launch_quantizer)


def _launch(call: Call, channel: Channel, launch: TwoShot | None, watch: Watch) -> None:
    x = call.operands.x
    hidden = x.shape[-1]
    rows = len(owned_rows(x.numel() // hidden, 0, channel.world_size))
    choice = launch or choose_two_shot(rows, hidden, x.itemsize, channel.world_size, channel.multiprocessors)
    roles = choice.roles(rows, channel.multiprocessors)
    pdl = choice.launch_pdl and local.has_pdl(x)
    with on_device(x):
        two_shot_kernel[(roles.programs,)](
            **arguments(call, channel, watch, choice.num_warps),
            **sections_of(call.seam, call.operands).constants(),
            pushers=roles.pushers,
            first_reducer=roles.first_reducer,
            reducers=roles.reducers,
            first_gatherer=roles.first_gatherer,
            AHEAD=choice.ahead,
            PDL=pdl,
            **choice.options(pdl),
        )
