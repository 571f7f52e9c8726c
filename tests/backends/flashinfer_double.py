"""A FlashInfer that runs anywhere: it keeps to the real one's signatures, and computes with the reference.

It refuses what the real one refuses (an unknown argument, a wrong shape or dtype, a layout code where there is no
quantiser), leaves alone what the real one leaves alone (padding of scales), counts what is alive, and can be told to
fail in one of many ways.
"""

from __future__ import annotations

import gc
import sys
import time
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from flashinfer_signatures import EXPORTS, recorded, signature
from torch import Tensor

from torchseam import reference
from torchseam.backends import base, flashinfer, flashinfer_api, flashinfer_run
from torchseam.formats import layout
from torchseam.operands import Operands
from torchseam.outputs import empty_outputs
from torchseam.seam import Norm, Quant, Reduce, Seam

PACKED = Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed", scale_floor=1e-10)
CREATE, FUSED = "create_allreduce_fusion_workspace", "allreduce_fusion"
#: Pattern -> (the quantiser it computes, whether it emits the norm).
PATTERNS: dict[str, tuple[Quant | None, bool]] = {
    "kARResidualRMSNorm": (None, True),
    "kARResidualRMSNormFP8Quant": (Quant("fp8_static", rule="reciprocal"), False),
    "kARResidualRMSNormOutFP8Quant": (Quant("fp8_static", rule="reciprocal"), True),
    "kARResidualRMSNormFP4Quant": (Quant("nvfp4"), False),
    "kARResidualRMSNormOutFP4Quant": (Quant("nvfp4"), True),
    "kARResidualRMSNormDynamicFP8Quant": (Quant("fp8_token"), False),
    "kARResidualRMSNormOutDynamicFP8Quant": (Quant("fp8_token"), True),
    "kARResidualRMSNormPerTokenGroupFP8PackedQuant": (PACKED, False),
    "kARResidualRMSNormOutPerTokenGroupFP8PackedQuant": (PACKED, True),
}


@dataclass
class Faults:
    """How this rank's FlashInfer misbehaves."""

    raise_in_create: str = ""  # "early": before anything; "late": after allocating and talking
    stall: float = 0.0
    wrong_by: float = 0.0
    capacity: int | None = None  # rows that the workspace says it holds, whatever was asked for
    boast: bool = False  # says yes to any size


@dataclass
class Seen:
    """What was called, and what is alive."""

    created: int = 0
    destroyed: int = 0
    patterns: list[str] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    memory: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def live(self) -> int:
        gc.collect()
        return len(self.memory)


class Memory:
    """An allocation that can be counted."""

    def __init__(self) -> None:
        self.bytes = torch.empty(1 << 16)


class Workspace:
    def __init__(self, double: Double, backend: str, given: dict[str, Any]) -> None:
        self.backend, self._double = backend, double
        self.group, self.world_size = given["group"], given["world_size"]
        self.values = given["max_token_num"] * given["hidden_dim"]
        self.memory = Memory()
        double.seen.memory.add(self.memory)
        self.prepared = 0
        if backend == "trtllm":
            # As in FlashInfer, whose workspaces leave this behind even when they are destroyed.
            self.ipc_handles: Any = [[id(self)]]
            double.references[id(self.ipc_handles)] = self.memory

    def _bind(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        known = self._double.record["methods"][self.backend]
        if method not in known:
            raise AttributeError(method)
        return dict(signature(known[method]).bind(self, *args, **kwargs).arguments)

    def is_buffer_size_sufficient(self, *args: Any, **kwargs: Any) -> bool:
        given = self._bind("is_buffer_size_sufficient", *args, **kwargs)
        assert all(type(given[name]) is int for name in ("tp_size", "num_tokens", "hidden_dim"))
        faults = self._double.faults
        if faults.boast:
            return True
        if faults.capacity is not None:
            return bool(given["num_tokens"] <= faults.capacity)
        return bool(given["num_tokens"] * given["hidden_dim"] <= self.values)

    def checkpoint_prepare(self) -> None:
        self._bind("checkpoint_prepare")
        self.prepared += 1

    def checkpoint_restore(self, *args: Any, **kwargs: Any) -> None:
        comm = self._bind("checkpoint_restore", *args, **kwargs)["comm_backend"]
        self.prepared -= 1
        comm.barrier()

    def destroy(self) -> None:
        assert self.memory is not None, "destroyed twice"
        self.memory = None
        self._double.seen.destroyed += 1


class Double:
    """Install it with `install`; `faults` may be changed at any time."""

    def __init__(self, version: str) -> None:
        self.version, self.record = version, recorded()[version]
        self.faults, self.seen = Faults(), Seen()
        self.references: dict[int, Any] = {}
        self.codes = self.record["codes"]
        self.names = {code: name for name, code in self.codes["AllReduceFusionPattern"].items()}

    def create(self, *args: Any, **kwargs: Any) -> Workspace:
        given = signature(self.record["functions"][CREATE]).bind(*args, **kwargs).arguments
        faults = self.faults
        if faults.raise_in_create == "early":
            raise RuntimeError("no memory to be had")
        if faults.stall:
            time.sleep(faults.stall)
        comm = given["comm_backend"]
        assert (comm.Get_rank(), comm.Get_size()) == (given["rank"], given["world_size"])
        assert dist.get_rank(given["group"]) == given["rank"], "the tensor-parallel group, not the world"
        assert type(given["max_token_num"]) is int
        made = Workspace(self, given["backend"], given)
        assert list(comm.allgather(comm.Get_rank())) == list(range(comm.Get_size()))
        assert comm.bcast(comm.Get_rank(), 1) == 1
        if faults.raise_in_create == "late":
            raise RuntimeError("the driver refused to map it")
        comm.barrier()
        self.seen.created += 1
        return made

    def destroy_ipc(self, *args: Any, **kwargs: Any) -> None:
        given = signature(self.record["functions"]["trtllm_destroy_ipc_workspace_for_all_reduce_fusion"])
        self.references.pop(id(given.bind(*args, **kwargs).arguments["workspace"]), None)

    def fused(self, *args: Any, **kwargs: Any) -> Tensor:
        given: dict[str, Any] = signature(self.record["functions"][FUSED]).bind(*args, **kwargs).arguments
        workspace, x, pattern = given["workspace"], given["input"], self.names[given["pattern"]]
        self.seen.patterns.append(pattern)
        self.seen.arguments.append(given)
        assert given["fp32_acc"] is True
        assert workspace.memory is not None, "used after it was destroyed"
        assert x.dim() == 2 and x.dtype in (torch.bfloat16, torch.float16)
        if x.numel() > workspace.values:
            raise ValueError("Workspace validation failed")
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        assert all(t.is_contiguous() for name, t in tensors.items() if name != "scale_out" or t.dtype != torch.int32)

        def all_reduce(summand: Tensor) -> Tensor:
            total = summand.float()
            dist.all_reduce(total, group=workspace.group)
            return (total + self.faults.wrong_by).to(summand.dtype)

        if pattern == "kAllReduce":
            given["output"].copy_(all_reduce(x))
            return given["output"]
        quant, with_norm = PATTERNS[pattern]
        if workspace.backend == "mnnvl":
            old = not self.codes["MNNVLQuantType"]
            assert not (old and (quant or given.get("layout_code") is not None)), "not in this version's mnnvl"
        assert given["rms_gamma"].dtype == x.dtype, "it would be read as the wrong dtype"
        assert (given.get("norm_out") is not None) == with_norm
        assert ("layout_code" in given) == (quant is not None and quant.scheme == "nvfp4")
        assert given.get("block_quant_group_size") == (128 if quant == PACKED else None)
        swizzled = given.get("layout_code") == self.codes["QuantizationSFLayout"]["SWIZZLED_128x4"]
        if quant is not None and quant.scheme == "nvfp4" and not swizzled:
            quant = Quant("nvfp4", scale_layout="linear")
        norm = Norm(given["rms_eps"], offset=int(given["weight_bias"]))  # type: ignore[arg-type]
        quants = (quant,) if quant else ()
        seam = Seam(norm, Reduce("it"), residual=True, quants=quants, outputs=("residual", "norm"))
        scales = (given["scale_factor"],) if quant and quant.takes_scale else ()
        operands = Operands(x, given["residual_in"], weight=given["rms_gamma"], scales=scales)
        residual, normed, *quantised = reference.run(seam, operands, all_reduce)
        given["residual_out"].copy_(residual)
        if with_norm:
            given["norm_out"].copy_(normed)
        if quant is not None:
            self._write(given, quant, quantised, x.shape[0])
        return given["residual_out"]

    def _write(self, given: dict[str, Any], quant: Quant, quantised: list[Tensor], tokens: int) -> None:
        codes = given["quant_out"]
        assert codes.shape == quantised[0].shape and codes.dtype == quantised[0].dtype
        codes.view(torch.uint8).copy_(quantised[0].view(torch.uint8))
        if quant.scheme == "fp8_token":
            assert given["scale_out"].shape == (tokens, 1) and given["scale_out"].dtype == torch.float32
            given["scale_out"].copy_(quantised[1])
        if quant == PACKED:
            out, words = given["scale_out"], (codes.shape[1] // 128 + 3) // 4
            assert (out.dtype, tuple(out.shape), out.stride()) == (
                torch.int32,
                (tokens, words),
                (1, -(-tokens // 4) * 4),
            )
            # The kernel takes the storage to end with the last token of the last column, and writes all before.
            written = tokens + (words - 1) * out.stride(1)
            out.as_strided((written,), (1,)).copy_(quantised[1].as_strided((written,), (1,)))
        if quant.scheme == "nvfp4":
            out, scales = given["scale_out"].view(torch.uint8).view(-1), quantised[1].view(torch.uint8).reshape(-1)
            assert given["scale_out"].dtype == torch.float8_e4m3fn and out.numel() == scales.numel()
            written = torch.ones(tokens, codes.shape[1] // 8, dtype=torch.uint8)
            mask = layout.swizzle(written) if quant.scale_layout == "swizzled" else written
            out[mask.reshape(-1).bool()] = scales[mask.reshape(-1).bool()]

    # -- installing

    def modules(self) -> dict[str, types.ModuleType]:
        """The modules that take the place of FlashInfer's."""

        def codes(name: str) -> type:
            return type(name, (), dict(self.codes[name]))

        comm = types.ModuleType("flashinfer.comm")
        parts = {
            CREATE: self.create,
            FUSED: self.fused,
            "trtllm_destroy_ipc_workspace_for_all_reduce_fusion": self.destroy_ipc,
            "AllReduceFusionPattern": codes("AllReduceFusionPattern"),
            "QuantizationSFLayout": codes("QuantizationSFLayout"),
        }
        assert set(parts) == set(EXPORTS)
        vars(comm).update(parts)
        trtllm, mnnvl = (types.ModuleType(f"flashinfer.comm.{n}") for n in ("trtllm_ar", "trtllm_mnnvl_ar"))
        trtllm._symm_workspace_refs = self.references  # type: ignore[attr-defined]
        trtllm.get_trtllm_comm_module = lambda: None  # type: ignore[attr-defined]
        mnnvl.get_trtllm_mnnvl_comm_module = lambda: None  # type: ignore[attr-defined]
        if self.codes["MNNVLQuantType"]:
            mnnvl.MNNVLQuantType = codes("MNNVLQuantType")  # type: ignore[attr-defined]
        root = types.ModuleType("flashinfer")
        return {m.__name__: m for m in (root, comm, trtllm, mnnvl)}


def install(version: str, capability: tuple[int, int] = (10, 0)) -> Double:
    """Put a double in FlashInfer's place, for the rest of this process, on a machine that seems to have such GPUs."""
    double = Double(version)
    sys.modules.update(double.modules())
    flashinfer_api.load.cache_clear()
    numbers = tuple(int(part) for part in version.split("."))
    flashinfer_api.version = lambda: numbers  # type: ignore[assignment]
    flashinfer_api._lacks_dependencies = lambda: None  # type: ignore[assignment]
    base.capability = lambda device: capability  # type: ignore[assignment]
    flashinfer.has_multicast = lambda device: True  # type: ignore[assignment]
    flashinfer_run.empty_outputs = poisoned_outputs  # type: ignore[assignment]
    return double


def poisoned_outputs(seam: Seam, operands: Operands) -> list[Tensor]:
    """Outputs that hold NaN (0x7F bytes), as memory may: what nobody writes shows."""
    outputs = empty_outputs(seam, operands)
    for output in outputs:
        all_bytes(output).fill_(0x7F)
    return outputs


def all_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor; with those of its padding where it has any."""
    if tensor.is_contiguous():
        return tensor.view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
