"""A seam without a collective, and a quantiser alone: one program per row, one pass over memory.

    h = round(x + residual); y = rms_norm(h) * weight; codes, scales = quantise(y)

Inputs were validated by `ops`; what this kernel cannot do, `unsupported` says, and the caller runs
`reference` instead.
"""

# Triton reads annotations of kernels as its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torchseam.formats import fp8, layout
from torchseam.kernels import launch as launches
from torchseam.kernels import tuned_file
from torchseam.kernels.calls import Call, run_seam
from torchseam.kernels.epilogue import ABSENT, epilogue
from torchseam.kernels.launch import MAX_HIDDEN, Launch
from torchseam.kernels.stores import store_padding_row, store_quantized
from torchseam.operands import Operands
from torchseam.outputs import empty_quantized
from torchseam.seam import Norm, Quant, Seam

#: Rows are programs of the grid's first dimension.
_MAX_ROWS = 2**31 - 1
#: Triton supports NVIDIA GPUs from compute capability 8.0 on.
_LEAST_CAPABILITY = (8, 0)
_PDL_CAPABILITY = (9, 0)  # programmatic dependent launch
#: From which compute capability on the kernel may take which level of NATIVE (`casts`).
_NATIVE_LEVELS = (((10, 0), 2), ((8, 9), 1))
_NO_NORM = Norm(eps=0.0, weight="none")


# Not specialised: what changes from call to call, or each new T could mean a new compilation.
@triton.jit(do_not_specialize=["tokens", "column_stride"])
def local_kernel(
    x_ptr,
    residual_ptr,
    inner_weight_ptr,
    weight_ptr,
    scale_ptr,
    residual_out_ptr,
    norm_out_ptr,
    codes_ptr,
    scales_ptr,
    tokens,
    x_stride,
    residual_stride,
    column_stride,
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
    HAS_RESIDUAL_OUT: tl.constexpr,
    HAS_NORM_OUT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row `program_id(0)`: see `epilogue`. Programs past the last token zero the scales' padding rows.

    PDL: the rule of docs/protocol.md: the next kernel may be launched at once, and nothing is read or written before
    those before this one are complete.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    # Two conditions: the first is decided when the kernel is compiled.
    if LAYOUT == "swizzled" or LAYOUT == "tma_aligned" or LAYOUT == "tma_aligned_packed":  # noqa: SIM102
        if row >= tokens:
            store_padding_row(scales_ptr, row, column_stride, HIDDEN, BLOCK, GROUP, LAYOUT)
            return

    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    residual = None
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
    inner_weight = None
    if INNER_WEIGHT == "before_cast" or INNER_WEIGHT == "after_cast":
        inner_weight = tl.load(inner_weight_ptr + columns, mask=inside, other=0.0)
    weight = None
    if WEIGHT == "before_cast" or WEIGHT == "after_cast":
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    scale = None
    if HAS_SCALE:
        scale = tl.load(scale_ptr)

    h, y, codes, scales = epilogue(
        x,
        residual,
        inner_weight,
        weight,
        scale,
        None,
        0,
        0,
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
        False,
    )

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
            0,
            column_stride,
            HIDDEN,
            HIDDEN,
            BLOCK,
            SCHEME,
            GROUP,
            LAYOUT,
        )


# ---- host -------------------------------------------------------------------------------------


def unsupported(x: Tensor) -> str | None:
    """Why the kernel cannot take rows like those of x [..., H], or None."""
    hidden = x.shape[-1]
    if hidden > MAX_HIDDEN:
        return f"the hidden size is {hidden}; the Triton kernel holds rows of at most {MAX_HIDDEN}"
    tokens = x.numel() // hidden
    if tokens > _MAX_ROWS - layout.SWIZZLE_ROWS:
        return f"there are {tokens} rows; a CUDA grid has at most {_MAX_ROWS}"
    if x.device.type == "cuda" and torch.version.hip is None:
        has = capability(x.device.index)
        if has < _LEAST_CAPABILITY:
            return f"the GPU's compute capability is {has}; Triton needs {_LEAST_CAPABILITY}"
    return None


def run(seam: Seam, operands: Operands, *, launch: Launch | None = None) -> list[Tensor]:
    """`reference.run` of a seam that reduces nothing, by one launch, in the bits that DESIGN section 4 says.

    Operands as `torchseam.ops.seam` validated them: any leading dims and strides. A seam with several
    quantisers takes one launch more for each after the first. `launch` overrides the tuned choice, or else
    that by H.
    """

    def launch_first(call: Call) -> None:
        _launch(
            launch,
            seam.inner_norm,
            seam.norm,
            call.quant,
            operands,
            call.scale,
            call.residual_out,
            call.norm_out,
            call.quantized,
        )

    return run_seam(seam, operands, launch_first, functools.partial(launch_quantizer, launch=launch))


def quantize(y: Tensor, quant: Quant, scale: Tensor | None, *, launch: Launch | None = None) -> list[Tensor]:
    """`reference.quantize` by one launch, the same bits. Arguments as `torchseam.ops.quantize` validated them."""
    outputs = empty_quantized(y, quant)
    launch_quantizer(y, quant, scale, outputs, launch)
    return outputs


def launch_quantizer(
    y: Tensor, quant: Quant, scale: Tensor | None, quantized: list[Tensor], launch: Launch | None = None
) -> None:
    """`quantize` into [codes] or [codes, scales]."""
    _launch(launch, None, None, quant, Operands(y), scale, None, None, quantized)


def _launch(
    launch: Launch | None,
    inner_norm: Norm | None,
    norm: Norm | None,
    quant: Quant | None,
    operands: Operands,
    scale: Tensor | None,
    residual_out: Tensor | None,
    norm_out: Tensor | None,
    quantized: list[Tensor],
) -> None:
    x, residual = operands.x, operands.residual
    rows = as_rows(x)
    tokens, hidden = rows.shape
    if tokens == 0:
        return
    if scale is not None:
        scale = fp8.one_float32("the scale", scale, x)
    residual_rows = None if residual is None else as_rows(residual)
    codes, scales = (*map(as_stored, quantized), None, None)[:2]
    choice = launch or tuned_file.local_launch(x.get_device(), tokens, hidden, x.dtype, quant.scheme if quant else None)
    pdl = has_pdl(x)
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        local_kernel[(grid(tokens, quant, scales),)](
            rows,
            residual_rows,
            None if operands.inner_weight is None else operands.inner_weight.contiguous(),
            None if operands.weight is None else operands.weight.contiguous(),
            scale,
            residual_out,
            norm_out,
            codes,
            scales,
            tokens,
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            scales.stride(1) if scales is not None and scales.dim() == 2 else 0,
            **attributes(hidden, inner_norm, norm, quant, residual is not None),
            HAS_RESIDUAL_OUT=residual_out is not None,
            HAS_NORM_OUT=norm_out is not None,
            NATIVE=native_level_of(x),
            PDL=pdl,
            **choice.options(pdl),
        )


def has_pdl(x: Tensor) -> bool:
    """Whether x is on a GPU with programmatic dependent launch."""
    return speaks_ptx(x) and capability(x.device.index) >= _PDL_CAPABILITY


def native_level_of(x: Tensor) -> int:
    """The constexpr NATIVE of a kernel for x: 0 as well where that is not compiled for an NVIDIA GPU."""
    return native_level(capability(x.device.index)) if speaks_ptx(x) else 0


def native_level(capability: tuple[int, int]) -> int:
    """The constexpr NATIVE for an NVIDIA GPU of a compute capability."""
    return next((level for least, level in _NATIVE_LEVELS if capability >= least), 0)


def speaks_ptx(x: Tensor) -> bool:
    """Whether a kernel for x is compiled for an NVIDIA GPU."""
    return x.is_cuda and torch.version.hip is None and not knobs.runtime.interpret


@functools.cache
def capability(device: int) -> tuple[int, int]:
    """The compute capability of a CUDA device; every call asks."""
    return torch.cuda.get_device_capability(device)


@functools.lru_cache(maxsize=4096)
def attributes(
    hidden: int, inner_norm: Norm | None, norm: Norm | None, quant: Quant | None, residual: bool
) -> dict[str, Any]:
    """The constexpr arguments of `local_kernel` for the parts of a seam, HAS_*_OUT left out."""
    inner, outer = inner_norm or _NO_NORM, norm or _NO_NORM
    block = launches.block_of(hidden)
    # A quotient that is not there needs no attributes; each one is fixed so that kernels are shared.
    group = (quant.group_size or block) if quant else block
    return {
        "HIDDEN": hidden,
        "BLOCK": block,
        "RESIDUAL": residual,
        "INNER_WEIGHT": inner.weight if inner_norm else ABSENT,
        "INNER_OFFSET": inner.offset,
        "INNER_EPS": inner.eps,
        "WEIGHT": outer.weight if norm else ABSENT,
        "OFFSET": outer.offset,
        "EPS": outer.eps,
        "SCHEME": quant.scheme if quant else ABSENT,
        "RULE": _rule_of(quant) if quant else ABSENT,
        "GROUP": group,
        "FLOOR": quant.scale_floor if quant else 0.0,
        "SCALE_RULE": quant.scale_rule if quant else ABSENT,
        "SCALE_ROUNDING": quant.scale_rounding if quant else ABSENT,
        "SCALE_DTYPE": quant.scale_dtype if quant else ABSENT,
        "LAYOUT": quant.scale_layout if quant else ABSENT,
        "HAS_SCALE": quant is not None and quant.takes_scale,
    }


def _rule_of(quant: Quant) -> str:
    return quant.global_scale if quant.scheme == "nvfp4" else quant.rule


def as_rows(x: Tensor) -> Tensor:
    """x [..., H] as [T, H] with a contiguous last dim: a view where strides allow one, else a copy."""
    rows = x.reshape(x.numel() // x.shape[-1], x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def as_stored(tensor: Tensor) -> Tensor:
    """One-byte floats as bytes: what the kernel stores are codes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def grid(tokens: int, quant: Quant | None, scales: Tensor | None) -> int:
    """Programs: one a token, and one for each padding row of the scales' layout."""
    if quant is None or scales is None:
        return tokens
    if quant.scale_layout == "swizzled":
        return scales.shape[0]
    if quant.scale_layout in ("tma_aligned", layout.PACKED):
        return scales.stride(1)
    return tokens
