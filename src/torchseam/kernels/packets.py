"""Packets of 16 bytes that programs and GPUs pass to each other without flags, locks or fences.

A packet is four 32-bit words. Each word says by itself whether it has arrived, so no ordering between
words, packets or memories is needed, only that a word is stored whole (PTX guarantees it):

- *rows*: a word of all ones (`ABSENT`, a NaN in bf16, fp16 and fp32 alike) means "not there yet"; a payload
  that happens to have those bits is sent as another NaN. Whoever has read a word sets it back to ABSENT.
- *tagged values*: 64 bits in two halves, each in one 64-bit word beside the number of the call, which no
  earlier call had. Nothing has to be set back.

docs/protocol.md says who may write what when. Where PTX is False (the interpreter, AMD GPUs) the same is
done with volatile loads and plain stores.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

#: Words of a packet.
WORDS = 4
#: A word that has not arrived, and the NaN that stands for a payload of the same bits: two NaNs for
#: 16-bit dtypes, one for fp32.
ABSENT_WORD = -1
_ABSENT = tl.constexpr(-1)
_OTHER_NAN = tl.constexpr(0x7FFF7FFF)


@triton.jit
def pack_words(words, N: tl.constexpr):
    """int32 words [4 * N] -> the N packets' first, second, third and fourth words."""
    even, odd = tl.split(tl.reshape(words, (N, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def join_words(first, second, third, fourth, N: tl.constexpr):
    """The inverse of `pack_words`: int32 [4 * N]."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (4 * N,))


@triton.jit
def unpack_words(first, second, third, fourth, dtype: tl.constexpr, N: tl.constexpr):
    """The packets of `pack_words` -> their elements of `dtype` (bf16, fp16: [8 * N]; fp32: [4 * N])."""
    words = join_words(first, second, third, fourth, N)
    if dtype == tl.float32:
        elements = words.to(tl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        elements = tl.reshape(tl.join(low, high), (8 * N,))
    return elements


@triton.jit
def payload(word):
    """The word as it is sent."""
    return tl.where(word == _ABSENT, _OTHER_NAN, word)


@triton.jit
def store_packets(pointers, first, second, third, fourth, mask, PTX: tl.constexpr):
    """Store packets at int32 pointers [N], 16 bytes aligned, here or in a peer's memory."""
    if PTX:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred stored;
            setp.ne.s32 stored, $6, 0;
            @stored st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r,r,r,r",
            [pointers.to(tl.int64), first, second, third, fourth, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, first, mask=mask)
        tl.store(pointers + 1, second, mask=mask)
        tl.store(pointers + 2, third, mask=mask)
        tl.store(pointers + 3, fourth, mask=mask)


@triton.jit
def clear_packets(pointers, mask, PTX: tl.constexpr):
    """Set packets [N] of this GPU's memory back to ABSENT. Every thread must have read them before."""
    absent = tl.full(pointers.shape, _ABSENT, tl.int32)
    store_packets(pointers, absent, absent, absent, absent, mask, PTX)


@triton.jit
def load_packets(pointers, mask, PTX: tl.constexpr):
    """The four words of packets [N] as they are now, 0 where masked. Does not wait for the memory."""
    if PTX:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """
            {
            .reg .pred loaded;
            setp.ne.s32 loaded, $5, 0;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
            @loaded ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
            }
            """,
            "=&r,=&r,=&r,=&r,l,r",
            [pointers.to(tl.int64), mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        first = tl.load(pointers, mask=mask, other=0, volatile=True)
        second = tl.load(pointers + 1, mask=mask, other=0, volatile=True)
        third = tl.load(pointers + 2, mask=mask, other=0, volatile=True)
        fourth = tl.load(pointers + 3, mask=mask, other=0, volatile=True)
    return first, second, third, fourth


def _poll(before: str = "", after_each_load: str = "", behind: str = "") -> str:
    """PTX: packets ($5 to $8 as read before, at $4) read again until no word is ABSENT, into $0 to $3.

    The loop ends in one place, where the threads of a warp wait for each other: what Triton does next within a warp
    (shuffles, a barrier before packets are cleared) is only right where they run together, and ptxas does not always
    see to that behind a loop that it finds in inline assembly.
    """
    return f"""
        {{
        .reg .pred absent;
        {before}
        mov.b32 $0, $5;
        mov.b32 $1, $6;
        mov.b32 $2, $7;
        mov.b32 $3, $8;
        again:
        setp.eq.s32 absent, $0, -1;
        setp.eq.or.s32 absent, $1, -1, absent;
        setp.eq.or.s32 absent, $2, -1, absent;
        setp.eq.or.s32 absent, $3, -1, absent;
        @!absent bra there;
        ld.relaxed.sys.global.v4.b32 {{$0, $1, $2, $3}}, [$4];
        {after_each_load}
        bra again;
        there:
        bar.warp.sync 0xffffffff;
        {behind}
        }}
        """


_POLL = tl.constexpr(_poll())
# After $9 nanoseconds $11 is stored at $10, and then it traps if $12 is not 0. That comes behind the loop: with a trap
# in it, ptxas 12.8 (Triton 3.6) put the place where the threads meet again behind the whole kernel.
_WATCHED_POLL = tl.constexpr(
    _poll(
        """.reg .pred late, traps;
        .reg .u64 start, now;
        setp.ne.s32 late, 0, 0;
        mov.u64 start, %globaltimer;""",
        """mov.u64 now, %globaltimer;
        sub.u64 now, now, start;
        setp.gt.u64 late, now, $9;
        @late bra there;""",
        """@late st.relaxed.sys.global.b64 [$10], $11;
        @late fence.acq_rel.sys;
        setp.ne.and.s32 traps, $12, 0, late;
        @traps trap;""",
    )
)


@triton.jit
def await_packets(pointers, first, second, third, fourth, mask, PTX: tl.constexpr):
    """The words of `load_packets` once none is ABSENT: reads again until then."""
    if PTX:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _POLL,
            "=&r,=&r,=&r,=&r,l,r,r,r,r",
            [pointers.to(tl.int64), first, second, third, fourth],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        absent = (first == _ABSENT) | (second == _ABSENT) | (third == _ABSENT) | (fourth == _ABSENT)
        while tl.max(absent.to(tl.int32), axis=0) != 0:
            first, second, third, fourth = load_packets(pointers, mask, PTX)
            absent = (first == _ABSENT) | (second == _ABSENT) | (third == _ABSENT) | (fourth == _ABSENT)
    return first, second, third, fourth


@triton.jit
def await_packets_watched(pointers, first, second, third, fourth, timeout, mailbox, record, trap):
    """As `await_packets` with PTX, for at most `timeout` nanoseconds (int64).

    Then `record` (int64) is stored at the address `mailbox`, in memory that the host reads, and the kernel
    traps where `trap` is not 0, else goes on with what it has.
    """
    return tl.inline_asm_elementwise(
        _WATCHED_POLL,
        "=&r,=&r,=&r,=&r,l,r,r,r,r,l,l,l,r",
        [pointers.to(tl.int64), first, second, third, fourth, timeout.to(tl.int64), mailbox.to(tl.int64), record, trap],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


# ---- tagged values: between the programs that share a row -----------------------------------------


@triton.jit
def exchange(value, slots, part, call, PARTS: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """The fp64 values of all parts of a row in the first PARTS of LANES lanes, 0 in the others; `value` is `part`'s.

    `slots` points at PARTS packets that only this exchange of this call uses: two 64-bit words, each half of the
    value beside the lower 32 bits of `call` (int64), which is larger than in any earlier use of the slots. PTX
    stores and loads 64 bits whole, not more. All parts must be running at once. LANES: one for each thread, so
    that no two threads ask for the same packet (512 that did took 0.7 us longer on an H200).
    """
    tl.static_assert(PARTS <= LANES, "a part without a lane would be left out")
    bits = value.to(tl.int64, bitcast=True)
    tag = call & 0xFFFFFFFF
    low, high = (bits << 32) | tag, (bits & -4294967296) | tag
    lanes = tl.arange(0, LANES)
    asked = lanes < PARTS
    words = slots.to(tl.pointer_type(tl.int64), bitcast=True)
    mine, theirs = words + (part + lanes * 0) * 2, words + lanes * 2
    if PTX:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred stored;
            setp.ne.s32 stored, $4, 0;
            @stored st.relaxed.gpu.global.v2.b64 [$1], {$2, $3};
            mov.b32 $0, 0;
            }
            """,
            "=r,l,l,l,r",
            [mine.to(tl.int64), low, high, (lanes == 0).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        lows, highs = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 tag_low, tag_high, value;
            .reg .pred other;
            mov.b64 $0, 0;
            mov.b64 $1, 0;
            setp.eq.s32 other, $4, 0;
            @other bra there;
            again:
            ld.relaxed.gpu.global.v2.b64 {$0, $1}, [$2];
            mov.b64 {tag_low, value}, $0;
            mov.b64 {tag_high, value}, $1;
            setp.ne.s32 other, tag_low, $3;
            setp.ne.or.s32 other, tag_high, $3, other;
            @other bra again;
            there:
            bar.warp.sync 0xffffffff;
            }
            """,
            "=&l,=&l,l,r,r",
            [theirs.to(tl.int64), call.to(tl.int32), asked.to(tl.int32)],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(mine, low, mask=lanes == 0)
        tl.store(mine + 1, high, mask=lanes == 0)
        lows = tl.load(theirs, mask=asked, other=0, volatile=True)
        highs = tl.load(theirs + 1, mask=asked, other=0, volatile=True)
        other = asked & (((lows & 0xFFFFFFFF) != tag) | ((highs & 0xFFFFFFFF) != tag))
        while tl.max(other.to(tl.int32), axis=0) != 0:
            lows = tl.load(theirs, mask=asked, other=0, volatile=True)
            highs = tl.load(theirs + 1, mask=asked, other=0, volatile=True)
            other = asked & (((lows & 0xFFFFFFFF) != tag) | ((highs & 0xFFFFFFFF) != tag))
    wide = ((lows >> 32) & 0xFFFFFFFF) | (highs & -4294967296)
    return wide.to(tl.float64, bitcast=True)
