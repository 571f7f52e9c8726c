"""vLLM's quantisers for tests: the schemas of vLLM 0.33, computed by torchseam's formats. vLLM is not needed."""

from __future__ import annotations

import torch
from torch import Tensor

from torchseam.formats import fp8, nvfp4

SCHEMAS = (
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    "scaled_fp4_quant(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout) -> (Tensor, Tensor)",
    "scaled_fp4_quant.out(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, "
    "Tensor(a!) output, Tensor(b!) output_scale) -> ()",
)

_library = torch.library.Library("_C", "FRAGMENT")


def _static(result: Tensor, input: Tensor, scale: Tensor, group_shape: list[int] | None = None) -> None:
    result.copy_(fp8.quantize_static(input, scale, "reciprocal"))


def _per_token(result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None) -> None:
    codes, scales = fp8.quantize_token(input, 1 / (448 * 512))
    result.copy_(codes)
    scale.copy_(scales)


def _per_group(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0, transposed, aligned) -> None:
    groups = input.float().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=eps) / torch.tensor(fp8_max)
    if scale_ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales.clamp(min=1e-10))))
    output_q.copy_((groups / scales).clamp(fp8_min, fp8_max).to(output_q.dtype).flatten(-2))
    output_s.copy_(scales.squeeze(-1))


def fp4_buffers(input: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """As vLLM's create_fp4_output_tensors."""
    tokens, hidden = input.shape
    codes = input.new_empty((tokens, hidden // 2), dtype=torch.uint8)
    if not swizzled:
        return codes, input.new_empty((tokens, hidden // 16), dtype=torch.uint8)
    rows, columns = (tokens + 127) // 128 * 128, (hidden // 16 + 3) // 4 * 4
    return codes, input.new_zeros((rows, columns // 4), dtype=torch.int32)


def _fp4_out(input: Tensor, input_scale: Tensor, swizzled: bool, *, output: Tensor, output_scale: Tensor) -> None:
    codes, scales = nvfp4.quantize(input, input_scale, "swizzled" if swizzled else "linear")
    output.copy_(codes)
    output_scale.copy_(scales.view(output_scale.dtype))


def _fp4(input: Tensor, input_scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    output, output_scale = fp4_buffers(input, swizzled)
    _fp4_out(input, input_scale, swizzled, output=output, output_scale=output_scale)
    return output, output_scale


def register() -> None:
    """Define the operators, once a process."""
    if hasattr(torch.ops._C, "static_scaled_fp8_quant"):
        return
    for schema, function in zip(SCHEMAS, (_static, _per_token, _per_group, _fp4, _fp4_out), strict=True):
        name = schema.split("(")[0]
        _library.define(schema)
        _library.impl(name, function, "CPU")
        fake = (
            (lambda input, scale, swizzled: fp4_buffers(input, swizzled)) if function is _fp4 else lambda *a, **k: None
        )
        torch.library.register_fake(f"_C::{name}", fake, lib=_library)
