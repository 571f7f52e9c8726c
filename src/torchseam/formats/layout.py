"""Where scales lie in memory: shapes, strides, padding and byte views.

Not for their values (`fp8`, `nvfp4` compute those). Sizes may be ints or torch.SymInt; nothing here
looks at the data, so all of it runs under fake tensors and torch.compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: How a group scale is stored: fp32; a power of two in one byte; the same power of two in fp32.
GROUP_SCALE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "ue8m0": torch.float8_e8m0fnu,
    "ue8m0_float32": torch.float32,
}
#: Four ue8m0 bytes of neighbouring groups, the first lowest, in an int32; columns of words, TMA-aligned. What
#: DeepGEMM reads on Blackwell (`get_mn_major_tma_aligned_packed_ue8m0_tensor`); vLLM's op
#: `per_token_group_fp8_quant_packed` and FlashInfer's pattern `...PerTokenGroupFP8PackedQuant` have the same bytes.
PACKED = "tma_aligned_packed"
_STRIDED = ("row_major", "column_major", "tma_aligned")
#: The layouts that each dtype of group scales can have.
GROUP_SCALE_LAYOUTS: dict[str, tuple[str, ...]] = {
    "float32": _STRIDED,
    "ue8m0": (*_STRIDED, PACKED),
    "ue8m0_float32": _STRIDED,
}
_GROUPS_OF_WORD = torch.int32.itemsize
#: The strides of a tensor that the Tensor Memory Accelerator reads must be multiples of 16 bytes
#: (CUDA driver API, cuTensorMapEncodeTiled, globalStrides).
TMA_STRIDE_BYTES = 16

#: One tile of the swizzled NVFP4 scales: 128 rows by 4 scale columns, 512 bytes, in which rows m,
#: m+32, m+64, m+96 are neighbours (CUTLASS Sm1xxBlkScaledConfig, cuBLAS "128x4 layout").
SWIZZLE_ROWS = 128
SWIZZLE_COLUMNS = 4
_SWIZZLE_LANES = 32


def require_choice(what: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raises a ValueError that names the allowed values unless `value` is one of them."""
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


# --- scales of FP8 groups ------------------------------------------------------------------------


def group_scale_geometry(
    tokens: int, groups: int, scale_dtype: str, scale_layout: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape and strides (in elements) of the group scales of `tokens` rows, logically [T, G].

    Strides: `row_major` (G, 1); `column_major` (1, T); `tma_aligned` (1, T rounded up to 16 bytes:
    to 4 elements of fp32, 16 of ue8m0). `tma_aligned_packed`: int32 words [T, ceil(G/4)], strides (1, T rounded up
    to 4). ValueError for an unknown dtype, or a layout that it cannot have.
    """
    dtype = stored_dtype(scale_dtype, scale_layout)
    if scale_layout == PACKED:
        groups = -(-groups // _GROUPS_OF_WORD)
    if scale_layout == "row_major":
        return (tokens, groups), (groups, 1)
    if scale_layout == "column_major":
        return (tokens, groups), (1, tokens)
    return (tokens, groups), (1, _round_up(tokens, TMA_STRIDE_BYTES // dtype.itemsize))


def stored_dtype(scale_dtype: str, scale_layout: str) -> torch.dtype:
    """The dtype of the tensor that holds group scales; ValueError as `group_scale_geometry`."""
    require_choice("scale_dtype", scale_dtype, tuple(GROUP_SCALE_DTYPES))
    require_choice(f"scale_layout of {scale_dtype} scales", scale_layout, GROUP_SCALE_LAYOUTS[scale_dtype])
    return torch.int32 if scale_layout == PACKED else GROUP_SCALE_DTYPES[scale_dtype]


def empty_group_scales(
    tokens: int,
    groups: int,
    scale_dtype: str,
    scale_layout: str,
    device: torch.device | str | None = None,
) -> Tensor:
    """The scales of [T, G] groups in their layout, to be filled.

    The storage of the TMA-aligned layouts holds the padding of the last column too (TMA reads it) and starts
    as zero bytes; the two other layouts have no padding and are uninitialised.
    """
    shape, strides = group_scale_geometry(tokens, groups, scale_dtype, scale_layout)
    dtype = stored_dtype(scale_dtype, scale_layout)
    if scale_layout not in ("tma_aligned", PACKED):
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    storage = torch.zeros((shape[1], strides[1]), dtype=_storage_dtype(dtype), device=device)
    return storage.view(dtype).as_strided(shape, strides)


def _storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to zero and copy as: bytes for one-byte floats (e8m0 has no zero, so a 0 would be cast)."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def lay_out_group_scales(scales: Tensor, scale_dtype: str, scale_layout: str) -> Tensor:
    """Row-major group scales [..., G] of the dtype of `scale_dtype`, put in `scale_layout`.

    `row_major` keeps the leading dims, contiguous; the others are as `group_scale_geometry` says, with T the product
    of the leading dims, padding zero. ValueError for an unknown name or a dtype that isn't `scale_dtype`'s.
    """
    groups = scales.shape[-1]
    rows = scales.reshape(-1, groups)
    tokens = rows.shape[0]
    shape, strides = group_scale_geometry(tokens, groups, scale_dtype, scale_layout)
    dtype = GROUP_SCALE_DTYPES[scale_dtype]
    if scales.dtype != dtype:
        raise ValueError(f"scales are {scales.dtype}; scale_dtype {scale_dtype!r} is stored as {dtype}")
    if scale_layout == "row_major":
        return scales.contiguous()
    if scale_layout == PACKED:
        rows, dtype = _words(rows), torch.int32
    storage_dtype = _storage_dtype(dtype)
    storage = torch.zeros((shape[1], strides[1]), dtype=storage_dtype, device=scales.device)
    storage[:, :tokens] = rows.view(storage_dtype).t()
    # as_strided comes last: torch.compile bans writes through it. It fixes the strides of sizes 0 and 1.
    return storage.view(dtype).as_strided(shape, strides)


def _words(rows: Tensor) -> Tensor:
    """ue8m0 bytes [T, G] as int32 [T, ceil(G/4)], the first group of a word lowest; zeros after the last group."""
    tokens, groups = rows.shape
    padded = torch.zeros((tokens, _round_up(groups, _GROUPS_OF_WORD)), dtype=torch.uint8, device=rows.device)
    padded[:, :groups] = rows.view(torch.uint8)
    return padded.view(torch.int32)


def unpack_group_scales(packed: Tensor, groups: int) -> Tensor:
    """`tma_aligned_packed` scales, int32 [T, ceil(G/4)] -> float8_e8m0fnu [T, G], contiguous.

    ValueError unless int32 with as many words a row as G groups have.
    """
    words = -(-groups // _GROUPS_OF_WORD)
    if packed.dtype != torch.int32 or packed.ndim != 2 or packed.shape[1] != words:
        raise ValueError(
            f"packed scales are {packed.dtype} {tuple(packed.shape)}; {groups} groups a row are int32 [T, {words}]"
        )
    words_of_row = packed.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps the strides of no rows
    return words_of_row.view(torch.uint8)[:, :groups].contiguous().view(torch.float8_e8m0fnu)


def zero_past_last_word(packed: Tensor) -> None:
    """Zero what the storage of `tma_aligned_packed` scales [T, C] holds past the last token of the last column.

    For kernels that take the tensor to end there, as FlashInfer's does: it writes all other padding.
    """
    tokens, columns = packed.shape
    padding = packed.stride(1) - tokens
    if padding and columns:
        packed.as_strided((padding,), (1,), (columns - 1) * packed.stride(1) + tokens).zero_()


# --- NVFP4's swizzled block scales ---------------------------------------------------------------


def swizzled_shape(tokens: int, scale_columns: int) -> tuple[int, int]:
    """(T rounded up to 128, Kc rounded up to 4): the shape of swizzled [T, Kc] block scales."""
    return _round_up(tokens, SWIZZLE_ROWS), _round_up(scale_columns, SWIZZLE_COLUMNS)


def _one_byte_matrix(what: str, x: Tensor) -> None:
    if x.ndim != 2 or x.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(
            f"{what} is {x.dtype} with {x.ndim} dims; it must be float8_e4m3fn or uint8 with 2 dims "
            "(flatten the leading dims into rows first)"
        )


def swizzle(block_scales: Tensor) -> Tensor:
    """[T, Kc] one-byte block scales -> [ceil128(T), ceil4(Kc)], same dtype, contiguous.

    The scale of row m, column k lies at byte `((m//128)*ceil(Kc/4) + k//4)*512 + (m%32)*16 +
    ((m//32)%4)*4 + k%4` (DESIGN section 4); every other byte is 0. ValueError unless float8_e4m3fn
    or uint8 with 2 dims.
    """
    _one_byte_matrix("block_scales", block_scales)
    tokens, columns = block_scales.shape
    rows, padded_columns = swizzled_shape(tokens, columns)
    # Not F.pad: it fails under fake tensors when the padding itself is symbolic (torch 2.13).
    padded = torch.zeros((rows, padded_columns), dtype=torch.uint8, device=block_scales.device)
    padded[:tokens, :columns] = block_scales.view(torch.uint8)
    tiles = padded.reshape(
        rows // SWIZZLE_ROWS,
        SWIZZLE_ROWS // _SWIZZLE_LANES,
        _SWIZZLE_LANES,
        padded_columns // SWIZZLE_COLUMNS,
        SWIZZLE_COLUMNS,
    )
    swizzled = tiles.permute(0, 3, 2, 1, 4).reshape(rows, padded_columns)
    return swizzled.view(block_scales.dtype)


def zero_padding(swizzled: Tensor, tokens: int, scale_columns: int) -> None:
    """Zero the tiles of swizzled [T, Kc] block scales that hold padding, for kernels that write the scales only.

    To be called before them: what else such a tile holds is zeroed too.
    """
    if swizzled.shape[-1] != scale_columns:
        swizzled.view(torch.uint8).zero_()
    elif swizzled.shape[0] != tokens:
        swizzled.view(torch.uint8)[-SWIZZLE_ROWS:].zero_()


def unswizzle(swizzled: Tensor, tokens: int, scale_columns: int) -> Tensor:
    """The inverse of `swizzle`: [ceil128(T), ceil4(Kc)] -> [T, Kc], same dtype, contiguous.

    ValueError when the shape isn't that of `tokens` rows and `scale_columns` columns.
    """
    _one_byte_matrix("swizzled", swizzled)
    rows, padded_columns = expected = swizzled_shape(tokens, scale_columns)
    if tuple(swizzled.shape) != expected:
        raise ValueError(
            f"swizzled scales are {tuple(swizzled.shape)}; {tokens} rows of {scale_columns} scales "
            f"are {expected} (rows padded to {SWIZZLE_ROWS}, columns to {SWIZZLE_COLUMNS})"
        )
    tiles = swizzled.view(torch.uint8).reshape(
        rows // SWIZZLE_ROWS,
        padded_columns // SWIZZLE_COLUMNS,
        _SWIZZLE_LANES,
        SWIZZLE_ROWS // _SWIZZLE_LANES,
        SWIZZLE_COLUMNS,
    )
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(rows, padded_columns)
    return padded[:tokens, :scale_columns].contiguous().view(swizzled.dtype)


def as_int32(e4m3: Tensor) -> Tensor:
    """The same memory as int32, four scales a word: float8_e4m3fn [R, C] -> int32 [R, C//4].

    Never a copy. ValueError when the dtype is another, the last dim isn't contiguous or no multiple
    of 4, or a row doesn't start at a multiple of 4 bytes.
    """
    if e4m3.dtype != torch.float8_e4m3fn:
        raise ValueError(f"as_int32 got {e4m3.dtype}; it views float8_e4m3fn scales only")
    _contiguous_rows("as_int32", e4m3)
    word = torch.int32.itemsize
    if e4m3.shape[-1] % word:
        raise ValueError(f"as_int32 got a last dim of {e4m3.shape[-1]}; it must be a multiple of {word}")
    try:
        return e4m3.view(torch.int32)
    except RuntimeError as error:  # asked for, not checked first: torch.compile can't read storage_offset()
        raise ValueError(
            f"as_int32 got strides {tuple(e4m3.stride())} at offset {e4m3.storage_offset()}; every row "
            f"must start at a multiple of {word} bytes (slice whole words, or call .contiguous() first)"
        ) from error


def as_e4m3(int32: Tensor) -> Tensor:
    """The inverse view of `as_int32`: int32 [R, C4] -> float8_e4m3fn [R, 4*C4], never a copy.

    ValueError when the dtype is another or the last dim isn't contiguous.
    """
    if int32.dtype != torch.int32:
        raise ValueError(f"as_e4m3 got {int32.dtype}; it views int32 words of scales only")
    _contiguous_rows("as_e4m3", int32)
    return int32.view(torch.float8_e4m3fn)


def _contiguous_rows(what: str, x: Tensor) -> None:
    if x.ndim == 0 or x.stride(-1) != 1:
        raise ValueError(
            f"{what} got strides {tuple(x.stride())}; the last dim must be contiguous (stride 1) for a "
            "view: call .contiguous() first"
        )
