"""vLLM's operators for tests: the schemas of vLLM 0.33, computed by torchseam's formats and plain torch. vLLM is not
needed: its groups are those of a module that `vllm_groups` puts in the place of vLLM's."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from torchseam.formats import fp8, nvfp4

SCHEMAS = (
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    "per_token_group_fp8_quant_packed(Tensor input, Tensor! output_q, Tensor! output_s_packed, int group_size, "
    "float eps, float fp8_min, float fp8_max) -> ()",
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


def packed_buffer(input: Tensor, group_size: int) -> Tensor:
    """As vLLM's per_token_group_quant_fp8_packed_for_deepgemm makes it."""
    mn = input.numel() // input.shape[-1]
    k_num_packed = (input.shape[-1] // group_size + 3) // 4
    return torch.empty_strided((mn, k_num_packed), (1, (mn + 3) // 4 * 4), dtype=torch.int32, device=input.device)


def _per_group_packed(input, output_q, output_s_packed, group_size, eps, fp8_min, fp8_max) -> None:
    """As its kernel computes: the exponent by bits, and the group's reciprocal."""
    assert group_size == 128 and output_s_packed.shape[0] == input.numel() // input.shape[-1]
    groups = input.float().reshape(output_s_packed.shape[0], -1, group_size)
    scales = (groups.abs().amax(-1).clamp(min=eps) / torch.tensor(fp8_max)).clamp(min=1e-10)
    bits = scales.view(torch.int32)
    exponents = (bits >> 23 & 0xFF) + ((bits & 0x7FFFFF) != 0)
    inverses = 1.0 / (exponents << 23).view(torch.float32)
    codes = (groups * inverses.unsqueeze(-1)).clamp(fp8_min, fp8_max).to(output_q.dtype)
    output_q.copy_(codes.reshape(input.shape))
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[1] % 4)).unflatten(1, (-1, 4))
    output_s_packed.copy_(sum(padded[..., place] << 8 * place for place in range(4)))


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


_QUANTISERS = (_static, _per_token, _per_group, _per_group_packed, _fp4, _fp4_out)
IR_SCHEMAS = (
    "rms_norm(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor",
    "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, SymInt? variance_size=None)"
    " -> (Tensor, Tensor)",
)
LEGACY_SCHEMAS = (
    "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
)
_STATE = "vllm.distributed.parallel_state"
_ir_library = torch.library.Library("vllm_ir", "FRAGMENT")
_vllm_library = torch.library.Library("vllm", "FRAGMENT")


def _norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    wide = x.float()
    over = wide if variance_size is None else wide[..., :variance_size]
    n = wide * torch.rsqrt(over.pow(2).mean(-1, keepdim=True) + epsilon)
    return n.to(x.dtype) if weight is None else (n.to(weight.dtype) * weight).to(x.dtype)


def _add_norm(x, x_residual, weight, epsilon, variance_size=None):
    total = x + x_residual
    return _norm(total, weight, epsilon, variance_size).to(x.dtype), total


def _legacy_norm(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    result.copy_(_norm(input, weight, epsilon))


def _legacy_add_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    normed, total = _add_norm(input, residual, weight, epsilon)
    input.copy_(normed)
    residual.copy_(total)


def _all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    """Over a group that is not there it sums nothing, so that a graph of one can run."""
    summed = tensor.clone()
    group = sys.modules[_STATE]._groups.get(group_name, lambda: None)()
    if group is not None:
        dist.all_reduce(summed, group=group.device_group)
    return summed


@contextlib.contextmanager
def vllm_groups(**groups: dist.ProcessGroup) -> Iterator[None]:
    """As if vLLM had made these groups: `tp=group` is its "tp:0"."""
    state = types.ModuleType(_STATE)
    made = {f"{name}:0": types.SimpleNamespace(device_group=group) for name, group in groups.items()}
    state._groups = {name: lambda group=group: group for name, group in made.items()}
    state._groups["gone:0"] = lambda: None
    before = sys.modules.get(_STATE)
    sys.modules[_STATE] = state
    try:
        yield
    finally:
        if before is None:
            del sys.modules[_STATE]
        else:
            sys.modules[_STATE] = before


def _define(library: torch.library.Library, schema: str, function, fake) -> None:
    name = schema.split("(")[0]
    library.define(schema)
    library.impl(name, function, "CPU")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


def register() -> None:
    """Define the operators, once a process."""
    if hasattr(torch.ops._C, "static_scaled_fp8_quant"):
        return

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    for schema, function in zip(SCHEMAS, _QUANTISERS, strict=True):
        fake = (lambda input, scale, swizzled: fp4_buffers(input, swizzled)) if function is _fp4 else nothing
        _define(_library, schema, function, fake)
    for schema, function in zip(LEGACY_SCHEMAS, (_legacy_norm, _legacy_add_norm), strict=True):
        _define(_library, schema, function, nothing)
    _define(_ir_library, IR_SCHEMAS[0], _norm, lambda x, *rest, **how: torch.empty_like(x))
    pair = lambda x, r, *rest, **how: (torch.empty_like(x), torch.empty_like(r))  # noqa: E731
    _define(_ir_library, IR_SCHEMAS[1], _add_norm, pair)
    schema = "all_reduce(Tensor tensor, str group_name) -> Tensor"
    _define(_vllm_library, schema, _all_reduce, lambda tensor, group_name: torch.empty_like(tensor))
