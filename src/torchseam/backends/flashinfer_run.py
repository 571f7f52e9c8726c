"""A FlashInfer workspace that is open on one group, and how seams run in it (see `flashinfer`)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchseam import reference
from torchseam.backends import base, flashinfer_api, local
from torchseam.backends import flashinfer_patterns as patterns
from torchseam.formats import layout
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs
from torchseam.seam import Norm, Quant, Reduce, Seam

ACTIVATIONS = (torch.bfloat16, torch.float16)
#: The hidden size for which capacity is asked; any other fits if it has no more values.
SIZING_HIDDEN = 4096
_SELF_TEST_HIDDEN, _SELF_TEST_SECONDS = 1024, 20.0


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """FlashInfer asks for the current device: make it the group's."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def destroy(api: flashinfer_api.Api, workspace: Any) -> None:
    """Give a workspace back, and what FlashInfer keeps alive beside it."""
    handles = getattr(workspace, "ipc_handles", None)
    if handles is not None:
        api.destroy_ipc(handles)
    workspace.destroy()


class FlashInfer:
    """One of the two backends, open on one group."""

    def __init__(
        self, backend: str, group: base.Group, api: flashinfer_api.Api, workspace: Any, max_bytes: int
    ) -> None:
        self.name = f"flashinfer-{backend}"
        self._backend, self._group, self._api, self._workspace = backend, group, api, workspace
        capability = base.capability(group.device) or (0, 0)
        self._abilities = patterns.Abilities.of(api.installed, capability)
        self._dependent = api.installed.version >= flashinfer_api.DEPENDENT_LAUNCH
        self._max_bytes = max_bytes
        self._limits: dict[int, int] = {}
        self._ones: dict[tuple[int, torch.dtype], Tensor] = {}
        #: What it did not do in one kernel, and why; for reports.
        self.remarks: dict[str, None] = {}

    # -- what it takes

    def refuses(self, seam: Seam, operands: Operands) -> str | None:
        x = operands.x
        if x.dtype not in ACTIVATIONS:
            return f"activations are {x.dtype}; its workspace is for 16-bit ones"
        if seam.reduce is not None and seam.reduce.residual_in == "sharded":
            return "the rows of the residual are with their owners; it needs all of them on every rank"
        hidden = x.shape[-1]
        limit = self._limits.get(hidden)
        if limit is None:
            why = patterns.row_refused(hidden)
            limit = self._limits[hidden] = 0 if why else self._agree_on_limit(hidden)
        if x.numel() <= limit * hidden:
            return None
        return patterns.row_refused(hidden) or f"{x.numel() // hidden} rows of {hidden}; its workspace holds {limit}"

    def explain(self, seam: Seam, operands: Operands) -> patterns.Plan:
        """How much of a seam runs in one of FlashInfer's kernels, and why not more."""
        weight = None if operands.weight is None else operands.weight.dtype
        return patterns.plan(seam, operands.x.dtype, weight, self._backend, self._abilities)

    def settle_capacity(self) -> None:
        """Ask the workspace whether it holds what was asked for."""
        rows = self._max_bytes // (SIZING_HIDDEN * ACTIVATIONS[0].itemsize)
        if self._rows_held(SIZING_HIDDEN) < rows:
            raise RuntimeError(f"a workspace for {rows} rows of {SIZING_HIDDEN} holds {self._rows_held(SIZING_HIDDEN)}")

    def _agree_on_limit(self, hidden: int) -> int:
        """The most rows of a call: what the workspace with the least room holds. Collective, once a hidden size."""
        return min(base.agree(self._group, self._rows_held(hidden)))

    def _rows_held(self, hidden: int) -> int:
        """The most rows that the workspace says it holds, and never more than it was made for."""

        def holds(rows: int) -> bool:
            answer = self._workspace.is_buffer_size_sufficient(self._group.world_size, rows, hidden, ACTIVATIONS[0])
            return bool(answer)

        most = self._max_bytes // (hidden * ACTIVATIONS[0].itemsize)
        if most == 0 or holds(most):
            return most
        least = 0
        while least + 1 < most:
            middle = (least + most) // 2
            least, most = (middle, most) if holds(middle) else (least, middle)
        return least

    # -- running

    def run(self, seam: Seam, operands: Operands) -> list[Tensor]:
        how = self.explain(seam, operands)
        if how.why is not None:
            self.remarks.setdefault(how.remark)
        if how.left == "seam":
            reduced = torch.empty_like(operands.x, memory_format=torch.contiguous_format)
            self._launch(patterns.ALL_REDUCE, operands.x, output=_rows(reduced))
            outputs = local.run(seam.local(), dataclasses.replace(operands, x=reduced))
            return [reduced, *outputs] if "reduced" in seam.outputs else outputs
        if how.left == "quantisers":
            wanted = dataclasses.replace(seam, outputs=_with_norm(seam), quants=())
            outputs = self._fused(how.pattern, wanted, operands)
            norm = outputs[-1] if "norm" in seam.outputs else outputs.pop()
            given = iter(operands.scales)
            for quant in seam.quants:
                outputs += local.quantize(norm, quant, next(given) if quant.takes_scale else None)
            return outputs
        return self._fused(how.pattern, seam, operands)

    def _fused(self, pattern: str, seam: Seam, operands: Operands) -> list[Tensor]:
        """A seam that one kernel takes whole."""
        x, residual = operands.x, operands.residual
        assert residual is not None
        outputs = empty_outputs(seam, operands)
        named = dict(zip(seam.outputs, outputs, strict=False))
        residual_out = named.get("residual")
        if residual_out is None:
            residual_out = torch.empty_like(x, memory_format=torch.contiguous_format)
        arguments: dict[str, Any] = {
            "residual_in": _rows(residual),
            "residual_out": _rows(residual_out),
            # Not written by these patterns; without it FlashInfer allocates one every time.
            "output": _rows(residual_out),
            "rms_gamma": self._weight(operands),
            "rms_eps": seam.norm.eps,
            "weight_bias": float(seam.norm.offset),
        }
        if "norm" in named:
            arguments["norm_out"] = _rows(named["norm"])
        if seam.quants:
            arguments |= _quantiser_arguments(
                seam.quants[0], outputs[len(seam.outputs) :], operands.scales, self._api.installed.layouts
            )
        self._launch(pattern, x, **arguments)
        return outputs

    def _launch(self, pattern: str, x: Tensor, **arguments: Any) -> None:
        with on(self._group.device):
            self._api.allreduce_fusion(
                input=_rows(x),
                workspace=self._workspace,
                pattern=self._api.installed.patterns[pattern],
                launch_with_pdl=self._dependent,
                fp32_acc=True,
                **arguments,
            )

    def _weight(self, operands: Operands) -> Tensor:
        if operands.weight is not None:
            return operands.weight.contiguous()
        if operands.x.is_cuda and torch.cuda.is_current_stream_capturing():
            # Made now, they would be the graph's: ones only once it has replayed, and gone with it.
            return operands.x.new_ones(operands.x.shape[-1])
        key = (operands.x.shape[-1], operands.x.dtype)
        if key not in self._ones:
            self._ones[key] = operands.x.new_ones(key[0])
        return self._ones[key]

    # -- its life

    def self_test(self) -> None:
        """One fused call against torch.distributed and the reference; RuntimeError if they differ. Collective."""
        tokens, hidden, group = 2 * self._group.world_size + 1, _SELF_TEST_HIDDEN, self._group
        values = torch.arange(tokens * hidden, device=group.device).remainder(251).view(tokens, hidden)
        x = ((values + 17 * group.rank).remainder(97) / 16 - 3).bfloat16()
        weight = (torch.arange(hidden, device=group.device).remainder(7) / 4 + 0.5).bfloat16()
        seam = Seam(Norm(1e-6), Reduce(group.name), residual=True, outputs=("residual", "norm"))
        operands = Operands(x, (values / 64 - 2).bfloat16(), weight=weight)

        def all_reduce(summand: Tensor) -> Tensor:
            total = summand.float()
            dist.all_reduce(total, group=group.process_group)
            return total.to(summand.dtype)

        expected = reference.run(seam, operands, all_reduce)
        got = self.run(seam, operands)
        _wait(group.device)
        # One rounding of the sum apart, in bf16 (8 bits), and one of the norm.
        for name, ours, theirs in zip(seam.outputs, got, expected, strict=True):
            difference = (ours.float() - theirs.float()).abs()
            wrong = ~(difference <= theirs.float().abs() * 2**-7 + 2**-7)
            if bool(wrong.any()):
                raise RuntimeError(f"{int(wrong.sum())} of {wrong.numel()} values of {name} are wrong")

    def memory(self) -> int:
        metadata = getattr(self._workspace, "metadata", None) or {}
        parts = [metadata.get(f"{name}_size", 0) for name in ("buffer", "flag", "lamport_buffer")]
        return sum(parts) or int(getattr(self._workspace, "workspace_size_bytes", 0))

    def checkpoint_prepare(self) -> None:
        """Let go of the physical memory (FlashInfer's hook, 0.7 and newer). On all ranks."""
        self._workspace.checkpoint_prepare()

    def checkpoint_restore(self) -> None:
        """Get it back, at the same addresses. On all ranks."""
        self._workspace.checkpoint_restore(flashinfer_api.Talk(self._group))

    def close(self) -> None:
        destroy(self._api, self._workspace)
        self._ones.clear()


def _with_norm(seam: Seam) -> Any:
    return seam.outputs if "norm" in seam.outputs else (*seam.outputs, "norm")


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _quantiser_arguments(
    quant: Quant, outputs: list[Tensor], scales: tuple[Tensor, ...], layouts: dict[str, int]
) -> dict[str, Any]:
    codes = _rows(outputs[0])
    if quant.scheme == "fp8_static":
        return {"quant_out": codes, "scale_factor": scales[0].reshape(1)}
    if quant.scheme == "fp8_token":
        return {"quant_out": codes, "scale_out": outputs[1].view(-1, 1)}
    if quant.scheme == "fp8_group":
        layout.zero_past_last_word(outputs[1])
        return {"quant_out": codes, "scale_out": outputs[1], "block_quant_group_size": quant.group_size}
    if quant.scale_layout == "swizzled":
        layout.zero_padding(outputs[1], codes.shape[0], codes.shape[1] // 8)
    return {
        "quant_out": codes,
        "scale_out": outputs[1].view(-1) if quant.scale_layout == "swizzled" else _rows(outputs[1]),
        "scale_factor": scales[0].reshape(1),
        "layout_code": layouts[patterns.LAYOUTS[quant.scale_layout]],
    }


def _wait(device: torch.device) -> None:
    """Wait for the device, but not for ever: a rank that launched alone would spin."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + _SELF_TEST_SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the kernel did not finish within {_SELF_TEST_SECONDS:g} s")
        time.sleep(0.001)
