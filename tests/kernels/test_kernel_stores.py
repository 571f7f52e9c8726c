"""Scales of rows that several programs share: every part stores its own, and together they are the layout's bytes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import storage

from torchseam.formats import layout
from torchseam.kernels.stores import store_scale_row


@triton.jit
def _store(
    codes_ptr,
    scales_ptr,
    column_stride,
    COUNT: tl.constexpr,
    PART: tl.constexpr,
    LANES: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Part `program_id(1)` of row `program_id(0)`; the lanes that it has too many hold what must not be stored."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, LANES)
    codes = tl.load(codes_ptr + row * COUNT + part * PART + lanes, mask=lanes < PART, other=0x55)
    store_scale_row(scales_ptr, codes, row, part, column_stride, COUNT, PART, LANES, LAYOUT)


@pytest.mark.parametrize(("parts", "groups_of_part"), [(1, 1), (2, 1), (3, 1), (2, 3), (5, 2), (7, 3), (2, 4), (4, 5)])
def test_packed_words_may_be_of_several_parts(parts, groups_of_part):
    tokens, groups = 3, parts * groups_of_part
    codes = torch.randint(1, 256, (tokens, groups), generator=torch.Generator().manual_seed(groups)).to(torch.uint8)
    wanted = layout.lay_out_group_scales(codes.view(torch.float8_e8m0fnu), "ue8m0", layout.PACKED)
    got = layout.empty_group_scales(tokens, groups, "ue8m0", layout.PACKED)
    got.fill_(0x7F7F7F7F)
    lanes = triton.next_power_of_2(groups_of_part)
    _store[(tokens, parts)](codes, got, got.stride(1), groups, groups_of_part, lanes, layout.PACKED)
    assert torch.equal(storage(got), storage(wanted))
