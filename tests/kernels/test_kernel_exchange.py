"""What the parts of a row pass to each other (`packets.exchange`), in Triton's interpreter.

The interpreter runs programs one after another, so one part runs and finds what the others would have stored.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from torchseam.kernels import packets

PARTS, LANES = 4, 32
VALUES = torch.tensor([1.5, -0.0, float("nan"), 3e300], dtype=torch.float64)


@triton.jit
def exchange_kernel(values_ptr, slots_ptr, call_ptr, out_ptr, part, PARTS: tl.constexpr, LANES: tl.constexpr):
    value = tl.load(values_ptr + part)
    call = tl.load(call_ptr)
    every = packets.exchange(value, slots_ptr, part, call, PARTS, LANES, False)
    tl.store(out_ptr + tl.arange(0, LANES), every)


def stored(value: torch.Tensor, call: int) -> torch.Tensor:
    """The packet of a value: each half of its bits above the lower half of the call's number."""
    bits = int(value.view(torch.int64)) & (2**64 - 1)
    words = [(half << 32) | (call & 0xFFFFFFFF) for half in (bits & 0xFFFFFFFF, bits >> 32)]
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in words], dtype=torch.int64).view(torch.int32)


@pytest.mark.parametrize("call", [0, 1, 2**31, 2**32 + 7, 2**43])
@pytest.mark.parametrize("part", range(PARTS))
def test_a_part_stores_its_value_and_reads_all_of_them(part, call):
    slots = torch.full((PARTS * packets.WORDS,), packets.ABSENT_WORD, dtype=torch.int32)
    for other in range(PARTS):
        if other != part:
            slots[other * 4 : other * 4 + 4] = stored(VALUES[other], call)
    out = torch.full((LANES,), 7.0, dtype=torch.float64)
    exchange_kernel[(1,)](VALUES, slots, torch.tensor([call]), out, part, PARTS, LANES)
    assert torch.equal(out[:PARTS].view(torch.int64), VALUES.view(torch.int64))
    assert not out[PARTS:].any()
    assert torch.equal(slots[part * 4 : part * 4 + 4], stored(VALUES[part], call))


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("call", [0, 1, 2**32])
def test_neither_half_of_another_call_is_taken_for_this_one(call, half):
    """A packet of which one half is another call's is read again until the whole of it is there."""
    slots = torch.cat([stored(value, call) for value in VALUES])
    slots[12 + 2 * half : 14 + 2 * half] = stored(torch.tensor(-1.0, dtype=torch.float64), call + 1)[:2]
    arrival = threading.Timer(0.2, lambda: slots[12:16].copy_(stored(VALUES[3], call)))
    out = torch.zeros(LANES, dtype=torch.float64)
    started = time.monotonic()
    arrival.start()
    exchange_kernel[(1,)](VALUES, slots, torch.tensor([call]), out, 0, PARTS, LANES)
    assert time.monotonic() - started >= 0.2
    assert torch.equal(out[:PARTS].view(torch.int64), VALUES.view(torch.int64))
