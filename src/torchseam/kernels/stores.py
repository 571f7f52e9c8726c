"""Where a row's codes and scales go: rows of codes, and scales in every layout of `formats.layout`, padding too."""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def _scale_offsets(row, columns, column_stride, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """Where the scales of `row` (int64) at `columns` lie (`formats.layout`), in elements; packed ones, in bytes."""
    if LAYOUT == "swizzled":
        tile = (row // 128) * ((COUNT + 3) // 4) + columns // 4
        offsets = tile * 512 + (row % 32) * 16 + ((row // 32) % 4) * 4 + columns % 4
    elif LAYOUT == "column_major" or LAYOUT == "tma_aligned":
        offsets = columns.to(tl.int64) * column_stride + row
    elif LAYOUT == "tma_aligned_packed":
        offsets = ((columns // 4).to(tl.int64) * column_stride + row) * 4 + columns % 4
    else:
        offsets = row * COUNT + columns
    return offsets


@triton.jit
def store_scale_row(
    scales_ptr,
    scales,
    row,
    part,
    column_stride,
    COUNT: tl.constexpr,
    PART: tl.constexpr,
    LANES: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Store the scales [LANES] of a part of `row`, PART of the row's COUNT, and zeros in padding columns.

    `scales_ptr` and `column_stride`: as `store_quantized` has them.
    """
    lanes = tl.arange(0, LANES)
    columns = part * PART + lanes
    written = lanes < PART
    if LAYOUT == "tma_aligned_packed":
        # Bytes, as they come: the groups of a word may be of several parts.
        scales_ptr = scales_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        if COUNT % 4 != 0:  # noqa: SIM102  # decided when the kernel is compiled
            if part == COUNT // PART - 1:
                past = COUNT + tl.arange(0, 4)
                rest = _scale_offsets(row, past, column_stride, COUNT, LAYOUT)
                tl.store(scales_ptr + rest, tl.zeros((4,), tl.uint8), mask=past < (COUNT + 3) // 4 * 4)
    if LAYOUT == "swizzled":
        written = written | ((columns >= COUNT) & (columns < (COUNT + 3) // 4 * 4))
    offsets = _scale_offsets(row, columns, column_stride, COUNT, LAYOUT)
    tl.store(scales_ptr + offsets, scales.to(scales_ptr.dtype.element_ty), mask=written)


@triton.jit
def store_quantized(
    codes_ptr,
    scales_ptr,
    codes,
    scales,
    row,
    part,
    column_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Store what `quantize_row` returned for a part of `row` (int64): codes as bytes, scales in their layout.

    `codes_ptr` is uint8, contiguous rows, on an 8-byte boundary; `scales_ptr` fp32, or uint8 for one-byte
    scales, or int32 for packed ones, or None. `column_stride` is that of scales in columns, in elements.
    """
    PACKED: tl.constexpr = 2 if SCHEME == "nvfp4" else 1
    # Said to be aligned less than they are where they are more: so that a thread stores the codes of the eight
    # neighbours that it loaded, and not sixteen bytes, for which rows and codes would go through shared memory.
    ALIGNED: tl.constexpr = 8 // PACKED if WIDTH % 8 == 0 and HIDDEN % 8 == 0 else 1
    columns = tl.arange(0, BLOCK // PACKED)
    first = codes_ptr + (row * (HIDDEN // PACKED) + part * (WIDTH // PACKED))
    if ALIGNED > 1:
        first = tl.multiple_of(first, ALIGNED)
    tl.store(first + columns, codes.to(tl.uint8), mask=columns < WIDTH // PACKED)
    if SCHEME == "fp8_token":
        if part == 0:
            tl.store(scales_ptr + row, scales)
    elif SCHEME != "fp8_static":
        store_scale_row(
            scales_ptr, scales, row, part, column_stride, HIDDEN // GROUP, WIDTH // GROUP, BLOCK // GROUP, LAYOUT
        )


@triton.jit
def store_padding_row(
    scales_ptr,
    row,
    column_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Zero the scales of a `row` (int64) past the last token, in a layout that has such rows."""
    zeros = tl.zeros((BLOCK // GROUP,), dtype=scales_ptr.dtype.element_ty)
    store_scale_row(scales_ptr, zeros, row, 0, column_stride, HIDDEN // GROUP, HIDDEN // GROUP, BLOCK // GROUP, LAYOUT)
