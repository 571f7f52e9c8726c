"""Quantised linear layers that call torchseam's operators, for models that bring none."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

from torchseam import ops
from torchseam.formats import fp8, nvfp4
from torchseam.seam import Quant

#: torch._scaled_mm multiplies e4m3 matrices from Ada on (compute capability 8.9).
_SCALED_MM_CAPABILITY = (8, 9)
#: What torch._scaled_mm wants both sizes of the weight to be a multiple of.
SCALED_MM_MULTIPLE = 16


def scaled_mm_available(device: torch.device) -> bool:
    """Whether torch._scaled_mm multiplies FP8 matrices on this device (row-wise scales)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _SCALED_MM_CAPABILITY


def _weight_recipe(quant: Quant) -> Quant:
    """How a weight [out, in] is quantised for activations quantised by `quant`.

    FP8 static and per-token activations: one scale for each output row. Groups: one for each group
    of the row. NVFP4: blocks of 16 under one encode factor.
    """
    if quant.scheme == "nvfp4":
        return Quant("nvfp4", scale_layout="linear")
    if quant.scheme == "fp8_group":
        return Quant("fp8_group", quant.group_size)
    return Quant("fp8_token", scale_floor=torch.finfo(torch.float32).tiny)


def _widen(results: list[Tensor], quant: Quant, scale: Tensor | None) -> Tensor:
    """The fp32 values of what `ops.quantize(_, quant, scale)` returned."""
    if quant.scheme == "nvfp4":
        assert scale is not None
        return ops.dequantize(results[0], scale, quant, results[1])
    given = results[1] if quant.emits_scale else scale
    assert given is not None
    return ops.dequantize(results[0], given, quant)


def encode_factor(amax: Tensor) -> Tensor:
    """NVFP4's global encode factor 448 * 6 / amax as fp32 (1 for an all-zero tensor)."""
    amax = amax.float()
    # number / tensor would be number * reciprocal(tensor), which is not the rounded quotient
    largest = torch.full_like(amax, fp8.E4M3_MAX * nvfp4.E2M1_MAX)
    return torch.where(amax > 0, largest / amax, torch.ones_like(amax))


class QuantLinear(torch.nn.Module):
    """A linear layer whose input is quantised by a torchseam operator, so that a seam can take the quantiser in.

    Args:
        weight: [out, in] bf16 or fp16, this rank's part; quantised here.
        bias: [out] or None; added after the sum over the ranks.
        quant: recipe of the input.
        input_scale: fp32 scalar: static FP8's scale, or NVFP4's encode factor; None for dynamic schemes.
        reduce_group: process group over which the output is summed (row-parallel), None for column-parallel.

    `gemm` says in words what multiplies: `torch._scaled_mm`, or "dequantise and multiply".
    Raises ValueError when the weight's columns do not fit the recipe.
    """

    bias: Tensor | None
    input_scale: Tensor | None
    weight: Tensor
    weight_codes: Tensor
    weight_scales: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        quant: Quant,
        input_scale: Tensor | None = None,
        reduce_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if weight.shape[1] % quant.multiple_of:
            raise ValueError(
                f"the layer has {weight.shape[1]} input features; "
                f"{quant.scheme} needs a multiple of {quant.multiple_of}"
            )
        self.out_features, self.in_features = weight.shape
        self.quant = quant
        self.dtype = weight.dtype
        self.reduce_group = reduce_group
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)
        recipe = _weight_recipe(quant)
        factor = encode_factor(weight.float().abs().amax()) if recipe.takes_scale else None
        results = ops.quantize(weight.contiguous(), recipe, factor)
        multiples = self.in_features % SCALED_MM_MULTIPLE == 0 and self.out_features % SCALED_MM_MULTIPLE == 0
        if recipe.scheme == "fp8_token" and multiples and scaled_mm_available(weight.device):
            self.gemm = "torch._scaled_mm"
            self.register_buffer("weight_codes", results[0])
            self.register_buffer("weight_scales", results[1].t().contiguous())
        else:
            self.gemm = "dequantise and multiply"
            self.register_buffer("weight", _widen(results, recipe, factor).to(weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in the weight's dtype, summed over the ranks if row-parallel."""
        results = ops.quantize(x, self.quant, self.input_scale)
        y = self._multiply(results)
        if self.reduce_group is not None:
            y = funcol.all_reduce(y, "sum", self.reduce_group)
        return y if self.bias is None else y + self.bias

    def _multiply(self, results: list[Tensor]) -> Tensor:
        if self.gemm != "torch._scaled_mm":
            return F.linear(_widen(results, self.quant, self.input_scale).to(self.dtype), self.weight)
        codes = results[0].reshape(-1, self.in_features)
        if self.quant.emits_scale:
            scales = results[1].reshape(-1, 1)
        else:
            assert self.input_scale is not None
            scale = self.input_scale.reciprocal() if self.quant.rule == "multiply" else self.input_scale
            scales = scale.reshape(1, 1).expand(codes.shape[0], 1).contiguous()
        y = torch._scaled_mm(codes, self.weight_codes.t(), scales, self.weight_scales, out_dtype=self.dtype)
        return y.reshape(*results[0].shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, {self.quant.scheme}, {self.gemm}"
