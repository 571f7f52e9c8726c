"""FlashInfer as it is installed: its version, what it can do, and how its ranks talk while a workspace is made.

Nothing of FlashInfer is imported before a backend that needs it is opened, or its abilities are asked for.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import pickle
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import _get_process_group_store

from torchseam.backends import base

DISTRIBUTION = "flashinfer-python"
#: The first with one interface to both backends and with `weight_bias` in both.
OLDEST = (0, 6, 12)
#: Since when its kernels wait for the kernel before them ahead of their first load, so that a programmatic dependent
#: launch is safe. In 0.6.12 residual and weight are loaded first (FusedOp is made above
#: cudaGridDependencySynchronize in trtllm_allreduce_fusion.cuh); versions between the two were not read.
DEPENDENT_LAUNCH = (0, 7, 4)
#: What its all-reduce needs at import, beside torch: module -> distribution.
_DEPENDENCIES = {"tvm_ffi": "apache-tvm-ffi", "pynvml": "nvidia-ml-py", "cuda": "cuda-python"}
#: How long one rank waits for another inside the making of a workspace.
TALK_TIMEOUT = datetime.timedelta(seconds=20)


def version() -> tuple[int, ...] | None:
    """The installed version, its numbers only; None if there is none. Imports nothing of it."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        text = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def missing() -> str | None:
    """Why no FlashInfer backend can be had from this installation, or None."""
    found = version()
    if found is None:
        return f"flashinfer is not installed (pip install {DISTRIBUTION})"
    if found < OLDEST:
        return f"flashinfer {_dotted(found)} is too old; {_dotted(OLDEST)} or newer is needed"
    return _lacks_dependencies()


def _lacks_dependencies() -> str | None:
    lacks = [name for module, name in _DEPENDENCIES.items() if importlib.util.find_spec(module) is None]
    return f"flashinfer is installed without what it needs: {', '.join(lacks)}" if lacks else None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


@dataclass(frozen=True)
class Installed:
    """What decides which seams one FlashInfer can take.

    patterns: the names in its AllReduceFusionPattern, with their codes.
    mnnvl_quants: the quantisers that its mnnvl kernels have.
    layouts: the names in its QuantizationSFLayout, with their codes.
    """

    version: tuple[int, ...]
    patterns: dict[str, int]
    mnnvl_quants: frozenset[str]
    layouts: dict[str, int]


@dataclass(frozen=True)
class Api:
    """The functions of FlashInfer that are called."""

    create_workspace: Callable[..., Any]
    allreduce_fusion: Callable[..., Any]
    destroy_ipc: Callable[..., Any]
    installed: Installed


@functools.lru_cache(maxsize=1)
def load() -> Api:
    """Import FlashInfer. What it raises (it compiles, it looks for CUDA), this raises."""
    comm = importlib.import_module("flashinfer.comm")
    mnnvl = importlib.import_module("flashinfer.comm.trtllm_mnnvl_ar")
    return Api(
        comm.create_allreduce_fusion_workspace,
        comm.allreduce_fusion,
        comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
        Installed(
            version() or (0,),
            codes(comm.AllReduceFusionPattern),
            frozenset(codes(getattr(mnnvl, "MNNVLQuantType", None))),
            codes(comm.QuantizationSFLayout),
        ),
    )


def codes(numbers: Any) -> dict[str, int]:
    """FlashInfer's enumerations are classes of plain integers."""
    return {name: value for name, value in vars(numbers).items() if type(value) is int} if numbers else {}


def compile_kernels(backend: str) -> None:
    """Have FlashInfer build (nvcc, minutes, once a machine) what `backend` launches, before ranks wait for it."""
    module, builder = {
        "trtllm": ("flashinfer.comm.trtllm_ar", "get_trtllm_comm_module"),
        "mnnvl": ("flashinfer.comm.trtllm_mnnvl_ar", "get_trtllm_mnnvl_comm_module"),
    }[backend]
    build = getattr(importlib.import_module(module), builder, None)
    if build is not None:
        build()


def live_ipc_workspaces() -> set[int]:
    """The keys under which FlashInfer keeps shared memory alive, beyond what a workspace object holds."""
    return set(_ipc_references())


def drop_ipc_workspaces(keys: set[int]) -> None:
    """Let go of shared memory that a workspace left behind when it failed to be made."""
    for key in keys:
        _ipc_references().pop(key, None)


def _ipc_references() -> dict[int, Any]:
    module = importlib.import_module("flashinfer.comm.trtllm_ar")
    return getattr(module, "_symm_workspace_refs", {})


class Talk:
    """FlashInfer's `CommBackend`, over the store of a group: host only, and no wait longer than TALK_TIMEOUT.

    With torch.distributed's collectives instead, one rank that fails would leave the others waiting for as long
    as the group's time-out says, half an hour or so. Made by all ranks of the group, equally often.
    """

    def __init__(self, group: base.Group) -> None:
        self._group = group
        self._store = _get_process_group_store(group.process_group)
        self._prefix = base.next_prefix(group)
        self._rounds = itertools.count()

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.world_size

    def allgather(self, data: Any) -> list[Any]:
        prefix = f"{self._prefix}/{next(self._rounds)}"
        self._store.set(f"{prefix}/{self._group.rank}", pickle.dumps(data))  # type: ignore[arg-type]  # bytes are fine
        keys = [f"{prefix}/{rank}" for rank in range(self._group.world_size)]
        started = time.monotonic()
        try:
            self._store.wait(keys, TALK_TIMEOUT)
        except RuntimeError as error:
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            waited = time.monotonic() - started
            raise TimeoutError(f"ranks {silent} were silent for {waited:.0f} s while a workspace was made") from error
        return [pickle.loads(self._store.get(key)) for key in keys]

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data if self._group.rank == root else None)[root]

    def barrier(self) -> None:
        self.allgather(None)

    def Split(self, color: int, key: int) -> Talk:
        if len(set(self.allgather(color))) > 1:
            raise NotImplementedError("a workspace spans its whole group")
        return self
