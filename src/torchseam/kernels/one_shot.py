"""One-shot all_reduce + epilogue: every rank pushes its rows to every other, and each sums all of them.

    s = round(sum of x over the ranks, in rank order, fp32); h = round(s + residual); y = rms_norm(h) * weight;
    codes, scales = quantise(y)                                                  # every row, on every rank

One launch. A program pushes its rows (or parts of rows) into the peers' buffers, then takes its rows in
turn: it reads what the peers pushed into its own buffer as soon as that is there, sums, and runs the
epilogue of the local kernel. The grid must be running all at once (`launch.OneShot`): programs wait for
those of the same number on the peers. docs/protocol.md has the protocol and why it is right.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="var-annotated,assignment"

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torchseam.kernels import launch as launches
from torchseam.kernels import local
from torchseam.kernels.arguments import arguments, on_device
from torchseam.kernels.calls import Call, run_seam
from torchseam.kernels.casts import round_to, to_float32
from torchseam.kernels.channel import UNWATCHED, Channel, Watch, call_number, count_program
from torchseam.kernels.epilogue import epilogue
from torchseam.kernels.launch import OneShot
from torchseam.kernels.packets import clear_packets, pack_words, payload, store_packets
from torchseam.kernels.rows import own_row, sum_in_rank_order
from torchseam.kernels.stores import store_padding_row, store_quantized
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
        "mailbox",
        "timeout",
        "trap",
    ]
)
def one_shot_kernel(
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
    slots_ptr,
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
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
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
    AHEAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    WATCH: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Units (rows, or PARTS parts of each, of WIDTH elements in BLOCK lanes) of the seam.

    x, residual: T rows of HIDDEN elements, 16-byte aligned rows. `buffers_ptr`: the addresses (int64) of all
    ranks' buffers; a buffer is two halves, taken in turn, of WORLD - 1 slots of `slot_packets` packets.
    Programs below `pushers` push, programs from `first_reducer` on reduce. `slots_ptr`: EXCHANGES * SLOTS
    packets on this GPU, where the parts of a row meet. WATCH: a wait ends after `timeout` nanoseconds, with a
    record for the host in `mailbox` (`channel.Watch`).
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    LANES_OF_PACKET: tl.constexpr = 16 // (dtype.primitive_bitwidth // 8)
    N: tl.constexpr = BLOCK // LANES_OF_PACKET
    ROW_PACKETS: tl.constexpr = HIDDEN // LANES_OF_PACKET
    PART_PACKETS: tl.constexpr = WIDTH // LANES_OF_PACKET

    if PDL:
        # Whoever follows may be launched now: it waits, before it reads anything, until this grid is done.
        gdc_launch_dependents()
        gdc_wait()
    call = call_number(counter_ptr)
    half = (call & 1) * ((WORLD - 1) * slot_packets)
    program = tl.program_id(0)
    # What makes an int64 of a loop's variable, which the interpreter has as an int.
    zero = tl.zeros((), tl.int64)
    units = tokens * PARTS
    packets = tl.arange(0, N)
    sent = packets < PART_PACKETS

    if program < pushers:
        for first in tl.range(program, units, pushers * AHEAD):
            # AHEAD rows are on their way from this GPU's memory before the first is sent on.
            held = ()
            for ahead in tl.static_range(AHEAD):
                unit = zero + first + ahead * pushers
                words = (x_ptr + unit // PARTS * x_stride + unit % PARTS * WIDTH).to(
                    tl.pointer_type(tl.int32), bitcast=True
                ) + tl.arange(0, 4 * N)
                mask = tl.arange(0, 4 * N) < tl.where(unit < units, 4 * PART_PACKETS, 0)
                held = held + (tl.load(words, mask=mask, other=0),)  # noqa: RUF005  # Triton has no starred expressions
            for ahead in tl.static_range(AHEAD):
                unit = zero + first + ahead * pushers
                a, b, c, d = pack_words(payload(held[ahead]), N)
                offsets = half + unit // PARTS * ROW_PACKETS + unit % PARTS * PART_PACKETS + packets
                for distance in tl.static_range(1, WORLD):
                    peer = (RANK + distance) % WORLD
                    # A rank keeps no slot for itself.
                    slot = RANK - 1 if peer < RANK else RANK
                    buffer = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.int32))
                    pointers = buffer + (slot * slot_packets + offsets) * 4
                    store_packets(pointers, a, b, c, d, packets < tl.where(unit < units, PART_PACKETS, 0), PTX)

    tl.debug_barrier()
    count_program(counter_ptr)

    if program >= first_reducer:
        buffer = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int32))
        lanes = tl.arange(0, BLOCK)
        inside = lanes < WIDTH
        first_unit = program - first_reducer
        step = tl.num_programs(0) - first_reducer
        # Parts share a row only where every program has one unit: the columns are the same for all its units.
        part = first_unit % PARTS
        columns = part * WIDTH + lanes
        inner_weight = None
        if INNER_WEIGHT == "before_cast" or INNER_WEIGHT == "after_cast":
            inner_weight = tl.load(inner_weight_ptr + columns, mask=inside, other=0.0)
        weight = None
        if WEIGHT == "before_cast" or WEIGHT == "after_cast":
            weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        scale = None
        if HAS_SCALE:
            scale = tl.load(scale_ptr)
        first, mask = zero + first_unit // PARTS, lanes < tl.where(first_unit < units, WIDTH, 0)
        own, residual = own_row(x_ptr, residual_ptr, first, columns, mask, x_stride, residual_stride, RESIDUAL)
        for unit in tl.range(first_unit, units, step):
            row = zero + unit // PARTS
            offsets = half + row * ROW_PACKETS + part * PART_PACKETS + packets
            if not PREFETCH:
                own, residual = own_row(x_ptr, residual_ptr, row, columns, inside, x_stride, residual_stride, RESIDUAL)
            total = sum_in_rank_order(
                to_float32(own),
                buffer,
                offsets,
                slot_packets,
                sent,
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
            added = residual
            if PREFETCH:
                # The next row is on its way while this one is worked on.
                own, residual = own_row(
                    x_ptr,
                    residual_ptr,
                    zero + (unit + step) // PARTS,
                    columns,
                    lanes < tl.where(zero + unit + step < units, WIDTH, 0),
                    x_stride,
                    residual_stride,
                    RESIDUAL,
                )

            h, y, codes, scales = epilogue(
                reduced,
                added,
                inner_weight,
                weight,
                scale,
                slots_ptr + row.to(tl.int32) * PARTS * 4,
                part,
                call,
                HIDDEN,
                WIDTH,
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
                PARTS,
                SLOTS,
                PTX,
            )
            if HAS_REDUCED:
                tl.store(reduced_ptr + row * HIDDEN + columns, reduced, mask=inside)
            if HAS_RESIDUAL_OUT:
                tl.store(residual_out_ptr + row * HIDDEN + columns, h, mask=inside)
            if HAS_NORM_OUT:
                tl.store(norm_out_ptr + row * HIDDEN + columns, y, mask=inside)
            if SCHEME != "absent":
                store_quantized(
                    codes_ptr,
                    scales_ptr,
                    codes,
                    scales,
                    row,
                    part,
                    column_stride,
                    HIDDEN,
                    WIDTH,
                    BLOCK,
                    SCHEME,
                    GROUP,
                    LAYOUT,
                )
            # Threads may hold copies of each other's packets: all must have read before one clears.
            tl.debug_barrier()
            for source in tl.static_range(WORLD - 1):
                clear_packets(buffer + (source * slot_packets + offsets) * 4, sent, PTX)

        if LAYOUT == "swizzled" or LAYOUT == "tma_aligned" or LAYOUT == "tma_aligned_packed":
            for row in tl.range(tokens + program - first_reducer, padded_tokens, tl.num_programs(0) - first_reducer):
                store_padding_row(scales_ptr, zero + row, column_stride, HIDDEN, BLOCK * PARTS, GROUP, LAYOUT)


# ---- host -------------------------------------------------------------------------------------


def run(
    seam: Seam, operands: Operands, channel: Channel, *, launch: OneShot | None = None, watch: Watch = UNWATCHED
) -> list[Tensor]:
    """`reference.run` of a seam that reduces, on every rank of the channel, by one launch.

    Collective: all ranks call it with the same seam, shapes, dtypes and launch. A seam with several
    quantisers takes one launch more for each after the first. x must fit in `channel.slot_bytes`.
    ValueError where the residual that is read is sharded (every rank adds it to every row), and for a launch of more
    threads than packets.
    """
    if seam.reduce is not None and seam.reduce.residual_in != "full":
        raise ValueError(f"the residual is {seam.reduce.residual_in}; one-shot needs all of its rows on every rank")
    return run_seam(seam, operands, lambda call: _launch(call, channel, launch, watch), local.launch_quantizer)


def _launch(call: Call, channel: Channel, launch: OneShot | None, watch: Watch) -> None:
    x = call.operands.x
    hidden = x.shape[-1]
    tokens = x.numel() // hidden
    choice = launch or launches.choose_one_shot(tokens, hidden, x.itemsize, call.quant, channel.multiprocessors)
    programs, pushers, first_reducer = choice.grid(tokens, channel.multiprocessors)
    pdl = choice.launch_pdl and local.has_pdl(x)
    with on_device(x):
        one_shot_kernel[(programs,)](
            **arguments(call, channel, watch, choice.num_warps, choice.parts),
            slots_ptr=channel.slots,
            pushers=pushers,
            first_reducer=first_reducer,
            WIDTH=hidden // choice.parts,
            PARTS=choice.parts,
            SLOTS=channel.multiprocessors,
            AHEAD=choice.ahead,
            PREFETCH=choice.pushers > 0,
            PDL=pdl,
            **choice.options(pdl),
        )
