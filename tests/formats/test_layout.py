"""Layouts: shapes, strides and the literal swizzle formula, one scale at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from torchseam.formats import layout

# One row, partial and whole 32-row lanes, and both sides of the 128-row tile.
TOKENS = (1, 5, 31, 32, 33, 127, 128, 129)
# 464/16 = 29 columns leave 1 of a tile of 4, 1040/16 = 65 leave 1 too, 4096/16 = 256 leave none.
HIDDEN = (464, 1040, 4096)


def swizzle_by_formula(scales: torch.Tensor) -> torch.Tensor:
    """DESIGN section 4, written out: offset of row m, column k in a flat zeroed buffer."""
    tokens, columns = scales.shape
    flat = torch.zeros(-(-tokens // 128) * 128 * -(-columns // 4) * 4, dtype=torch.uint8)
    m = torch.arange(tokens)[:, None]
    k = torch.arange(columns)[None, :]
    offset = ((m // 128) * -(-columns // 4) + k // 4) * 512 + (m % 32) * 16 + ((m // 32) % 4) * 4 + k % 4
    assert offset.unique().numel() == scales.numel()
    flat[offset.flatten()] = scales.flatten()
    return flat


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", (torch.uint8, torch.float8_e4m3fn))
def test_swizzle_follows_the_offset_formula_and_zeroes_padding(tokens, hidden, dtype):
    columns = hidden // 16
    # 1..251: no scale is 0, so a zero byte is padding; a prime period, so that shifts show.
    given = (torch.arange(tokens * columns) % 251 + 1).to(torch.uint8).reshape(tokens, columns)
    swizzled = layout.swizzle(given.view(dtype))
    assert swizzled.dtype == dtype and swizzled.is_contiguous()
    assert tuple(swizzled.shape) == (-(-tokens // 128) * 128, -(-columns // 4) * 4)
    assert tuple(swizzled.shape) == layout.swizzled_shape(tokens, columns)
    flat = swizzled.view(torch.uint8).flatten()
    assert torch.equal(flat, swizzle_by_formula(given))
    assert int((flat == 0).sum()) == flat.numel() - tokens * columns
    back = layout.unswizzle(swizzled, tokens, columns)
    assert back.dtype == dtype and back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), given)


def test_swizzle_of_known_offsets():
    scales = torch.zeros(160, 6, dtype=torch.uint8)
    scales[0, 1], scales[1, 0], scales[32, 0], scales[0, 4], scales[128, 0] = 11, 22, 33, 44, 55
    flat = layout.swizzle(scales).flatten()
    assert flat.nonzero().flatten().tolist() == [1, 4, 16, 512, 1024]
    assert flat[[1, 16, 4, 512, 1024]].tolist() == [11, 22, 33, 44, 55]


def test_swizzle_copies_its_input_even_when_nothing_is_padded():
    scales = torch.ones(128, 4, dtype=torch.uint8)
    layout.swizzle(scales).zero_()
    assert bool((scales == 1).all())


def test_swizzle_of_a_strided_input():
    scales = torch.randint(0, 255, (9, 37), dtype=torch.uint8).t()
    assert torch.equal(layout.swizzle(scales), layout.swizzle(scales.contiguous()))


def test_swizzle_of_no_rows():
    swizzled = layout.swizzle(torch.empty(0, 29, dtype=torch.float8_e4m3fn))
    assert tuple(swizzled.shape) == (0, 32)
    assert tuple(layout.unswizzle(swizzled, 0, 29).shape) == (0, 29)


@pytest.mark.parametrize("given", (torch.zeros(2, 3, 4, dtype=torch.uint8), torch.zeros(2, 3)))
def test_swizzle_refuses_other_dims_and_dtypes(given):
    with pytest.raises(ValueError, match="float8_e4m3fn or uint8 with 2 dims"):
        layout.swizzle(given)
    with pytest.raises(ValueError, match="float8_e4m3fn or uint8 with 2 dims"):
        layout.unswizzle(given, 2, 3)


def test_unswizzle_refuses_a_shape_that_is_not_padded():
    with pytest.raises(ValueError, match=r"\(5, 29\).*\(128, 32\)"):
        layout.unswizzle(torch.zeros(5, 29, dtype=torch.uint8), 5, 29)


# --- views ---------------------------------------------------------------------------------------


def test_int32_and_e4m3_views_share_memory_both_ways():
    bytes_ = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
    e4m3 = bytes_.view(torch.float8_e4m3fn)
    words = layout.as_int32(e4m3)
    assert words.dtype == torch.int32 and tuple(words.shape) == (32, 2)
    again = layout.as_e4m3(words)
    assert again.dtype == torch.float8_e4m3fn and tuple(again.shape) == (32, 8)
    for view in (words, again):
        assert view.data_ptr() == e4m3.data_ptr()
        assert view.untyped_storage().data_ptr() == e4m3.untyped_storage().data_ptr()
    assert int(words[0, 1]) == 4 | 5 << 8 | 6 << 16 | 7 << 24  # little-endian: column 4 is the low byte
    words[3, 1] = 0x0A0B0C0D
    assert bytes_[3, 4:].tolist() == [0x0D, 0x0C, 0x0B, 0x0A]
    assert again.view(torch.uint8)[3, 4:].tolist() == [0x0D, 0x0C, 0x0B, 0x0A]
    bytes_[5, 0] = 99
    assert int(words[5, 0]) & 0xFF == 99
    again[7] = 448.0
    assert words[7].tolist() == [0x7E7E7E7E, 0x7E7E7E7E]


def test_views_of_row_and_word_slices_are_allowed():
    e4m3 = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn)
    part = e4m3[4:9, 4:12]
    words = layout.as_int32(part)
    assert words.data_ptr() == part.data_ptr() and tuple(words.shape) == (5, 2)
    assert torch.equal(layout.as_e4m3(words).view(torch.uint8), part.view(torch.uint8))
    assert tuple(layout.as_int32(e4m3[:0]).shape) == (0, 4)
    assert tuple(layout.as_e4m3(torch.empty(0, 4, dtype=torch.int32)).shape) == (0, 16)


def test_views_refuse_what_would_need_a_copy():
    e4m3 = torch.zeros(16, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8_e4m3fn scales only"):
        layout.as_int32(e4m3.view(torch.uint8))
    with pytest.raises(ValueError, match="last dim must be contiguous"):
        layout.as_int32(e4m3.t())
    with pytest.raises(ValueError, match="last dim of 6; it must be a multiple of 4"):
        layout.as_int32(e4m3[:, :6])
    with pytest.raises(ValueError, match="offset 1"):
        layout.as_int32(e4m3[:, 1:5])
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        layout.as_int32(e4m3.flatten()[:70].unfold(0, 4, 6))
    with pytest.raises(ValueError, match="int32 words"):
        layout.as_e4m3(e4m3)
    with pytest.raises(ValueError, match="last dim must be contiguous"):
        layout.as_e4m3(torch.zeros(4, 4, dtype=torch.int32).t())


# --- group scales --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "dtype", "scale_layout", "strides"),
    [
        (5, "float32", "row_major", (7, 1)),
        (5, "float32", "column_major", (1, 5)),
        (5, "float32", "tma_aligned", (1, 8)),
        (8, "float32", "tma_aligned", (1, 8)),
        (1, "ue8m0_float32", "tma_aligned", (1, 4)),
        (5, "ue8m0", "tma_aligned", (1, 16)),
        (16, "ue8m0", "tma_aligned", (1, 16)),
        (17, "ue8m0", "tma_aligned", (1, 32)),
        (0, "float32", "tma_aligned", (1, 0)),
    ],
)
def test_group_scale_geometry(tokens, dtype, scale_layout, strides):
    assert layout.group_scale_geometry(tokens, 7, dtype, scale_layout) == ((tokens, 7), strides)
    for made in (
        layout.empty_group_scales(tokens, 7, dtype, scale_layout),
        layout.lay_out_group_scales(torch.ones(tokens, 7).to(layout.GROUP_SCALE_DTYPES[dtype]), dtype, scale_layout),
    ):
        assert tuple(made.shape) == (tokens, 7) and made.stride() == strides
        assert made.dtype == layout.GROUP_SCALE_DTYPES[dtype]


#: Every dtype with the layouts that hold one scale an element.
STRIDED = [(d, n) for d, names in layout.GROUP_SCALE_LAYOUTS.items() for n in names if n != layout.PACKED]


@pytest.mark.parametrize(("dtype", "scale_layout"), STRIDED)
@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_lay_out_keeps_every_scale(dtype, scale_layout, lead):
    stored = layout.GROUP_SCALE_DTYPES[dtype]
    scales = torch.pow(2.0, torch.arange(7 * max(1, torch.Size(lead).numel())) - 20.0).to(stored)
    scales = scales.reshape(*lead, 7)
    out = layout.lay_out_group_scales(scales, dtype, scale_layout)
    tokens = torch.Size(lead).numel()
    assert tuple(out.shape) == ((*lead, 7) if scale_layout == "row_major" else (tokens, 7))
    assert torch.equal(out.float().reshape(tokens, 7), scales.float().reshape(tokens, 7))


@pytest.mark.parametrize(("dtype", "aligned"), [("float32", 8), ("ue8m0_float32", 8), ("ue8m0", 16)])
def test_tma_padding_is_zero_bytes_to_the_end_of_the_last_column(dtype, aligned):
    stored = layout.GROUP_SCALE_DTYPES[dtype]
    out = layout.lay_out_group_scales(torch.ones(5, 3).to(stored), dtype, "tma_aligned")
    assert out.untyped_storage().nbytes() == 3 * aligned * stored.itemsize
    whole = out.as_strided((3, aligned), (aligned, 1)).view(torch.uint8)
    assert bool((whole[:, 5 * stored.itemsize :] == 0).all())
    assert bool((out.float() == 1).all())


def test_group_scales_refuse_unknown_names():
    with pytest.raises(ValueError, match="'float16'; allowed: 'float32', 'ue8m0', 'ue8m0_float32'"):
        layout.group_scale_geometry(1, 1, "float16", "row_major")
    with pytest.raises(ValueError, match="'swizzled'; allowed: 'row_major'"):
        layout.group_scale_geometry(1, 1, "float32", "swizzled")
    with pytest.raises(ValueError, match="of ue8m0_float32 scales is 'tma_aligned_packed'; allowed: 'row_major'"):
        layout.group_scale_geometry(1, 1, "ue8m0_float32", layout.PACKED)
    with pytest.raises(ValueError, match=r"stored as torch\.float8_e8m0fnu"):
        layout.lay_out_group_scales(torch.ones(2, 2), "ue8m0", "row_major")


# --- packed: four bytes a word -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "groups", "shape", "strides"),
    [
        (1, 1, (1, 1), (1, 4)),
        (4, 4, (4, 1), (1, 4)),
        (5, 5, (5, 2), (1, 8)),
        (3, 7, (3, 2), (1, 4)),
        (8, 8, (8, 2), (1, 8)),
        (129, 56, (129, 14), (1, 132)),
        (0, 5, (0, 2), (1, 0)),
    ],
)
def test_packed_geometry_is_that_of_vllm_and_flashinfer(tokens, groups, shape, strides):
    """k_num_packed = (groups + 3) // 4 and tma_aligned_mn = (tokens + 3) // 4 * 4, in both."""
    assert layout.group_scale_geometry(tokens, groups, "ue8m0", layout.PACKED) == (shape, strides)
    made = layout.empty_group_scales(tokens, groups, "ue8m0", layout.PACKED)
    assert (tuple(made.shape), made.stride(), made.dtype) == (shape, strides, torch.int32)
    assert made.untyped_storage().nbytes() == 4 * shape[1] * strides[1]


@given(tokens=st.integers(0, 9), groups=st.integers(1, 13), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_packed_bytes_lie_where_the_kernels_of_the_field_put_them(tokens, groups, seed):
    """As vLLM and FlashInfer index them: byte k % 4 of the word at (k // 4) * tma_aligned_mn + token; 0 elsewhere."""
    codes = torch.randint(0, 256, (tokens, groups), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = layout.lay_out_group_scales(codes.view(torch.float8_e8m0fnu), "ue8m0", layout.PACKED)
    aligned = (tokens + 3) // 4 * 4
    expected = torch.zeros((groups + 3) // 4 * aligned * 4, dtype=torch.uint8)
    for token, k in itertools.product(range(tokens), range(groups)):
        expected[(k // 4 * aligned + token) * 4 + k % 4] = codes[token, k]
    every = torch.empty(0, dtype=torch.uint8).set_(packed.untyped_storage())
    assert torch.equal(every, expected)
    back = layout.unpack_group_scales(packed, groups)
    assert back.is_contiguous() and torch.equal(back.view(torch.uint8), codes)


def test_the_first_group_of_a_word_is_its_lowest_byte():
    codes = torch.tensor([[1, 2, 3, 4, 254]], dtype=torch.uint8)
    packed = layout.lay_out_group_scales(codes.view(torch.float8_e8m0fnu), "ue8m0", layout.PACKED)
    assert packed.tolist() == [[0x04030201, 254]]


def test_other_tensors_are_not_unpacked():
    for packed, groups in (
        (torch.zeros(2, 2, dtype=torch.int32), 9),
        (torch.zeros(2, 2, dtype=torch.int32), 4),
        (torch.zeros(2, dtype=torch.int32), 5),
        (torch.zeros(2, 2), 5),
    ):
        with pytest.raises(ValueError, match=r"groups a row are int32 \[T, "):
            layout.unpack_group_scales(packed, groups)


@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (4, 5), (5, 5), (7, 9), (0, 3)])
def test_what_flashinfer_leaves_of_packed_scales_is_zeroed(tokens, groups):
    packed = layout.empty_group_scales(tokens, groups, "ue8m0", layout.PACKED)
    every = torch.empty(0, dtype=torch.int32).set_(packed.untyped_storage())
    every.fill_(0x7F7F7F7F)
    layout.zero_past_last_word(packed)
    words = tokens + ((groups + 3) // 4 - 1) * packed.stride(1)  # all that the kernel writes
    assert not every[max(words, 0) :].any() and (every[: max(words, 0)] == 0x7F7F7F7F).all()


def test_geometry_takes_symbolic_sizes():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.zeros(5, 8), symbolic_context=context)
    tokens = x.shape[0]
    assert isinstance(tokens, torch.SymInt)
    with mode:
        for dtype, names in layout.GROUP_SCALE_LAYOUTS.items():
            for name in names:
                made = layout.empty_group_scales(tokens, 8, dtype, name, "cpu")
                assert isinstance(made.shape[0], torch.SymInt)
        swizzled = layout.swizzle(x.to(torch.float8_e4m3fn))
        assert isinstance(swizzled.shape[0], torch.SymInt)
        assert layout.as_int32(swizzled).shape[1] == 2
    # No size was burnt into the graph: T is still free.
    assert not mode.shape_env.replacements


@pytest.mark.parametrize(("tokens", "columns"), [(1, 4), (127, 8), (128, 8), (129, 8), (128, 5), (300, 29)])
def test_padding_is_zeroed_where_there_is_some(tokens, columns):
    scales = torch.full(layout.swizzled_shape(tokens, columns), 0x7F, dtype=torch.uint8)
    layout.zero_padding(scales, tokens, columns)
    padding = layout.swizzle(torch.ones(tokens, columns, dtype=torch.uint8)) == 0
    assert not scales[padding].any()
    if not padding.any():
        assert (scales == 0x7F).all(), "nothing is written where there is no padding"
