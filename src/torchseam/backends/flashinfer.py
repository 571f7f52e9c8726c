"""FlashInfer's two all-reduce backends: `trtllm` (peer-to-peer memory, one node) and `mnnvl` (NVLink multicast).

Both are driven through FlashInfer's one interface (allreduce_fusion). One workspace per group and backend serves
plain and quantised seams, of any hidden size, bf16 and fp16. Which seam goes into which kernel is decided in
`flashinfer_patterns`; FlashInfer itself is imported when the first group opens a backend.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from torchseam.backends import base, flashinfer_api
from torchseam.backends import flashinfer_patterns as patterns
from torchseam.backends.flashinfer_run import ACTIVATIONS, SIZING_HIDDEN, FlashInfer, destroy, on

_log = logging.getLogger("torchseam")

OLDEST_CAPABILITY = (9, 0)
#: Below, mnnvl is for one node (issue 6; FlashInfer's multi-node tests are on Blackwell).
SEVERAL_NODES_SINCE = (10, 0)
#: Bytes of activations a call may have, by (compute capability major, world size), in trtllm. The limits that vLLM
#: documents for the same kernels (PassConfig.fi_allreduce_fusion_max_size_mb); the one of (9, 2) agrees with what we
#: measured, the others are not ours. The workspace takes 4 * world size times as much.
TRTLLM_MAX_BYTES = {(9, 2): 64 << 20, (9, 4): 2 << 20, (10, 2): 64 << 20, (10, 4): 32 << 20}
OTHER_MAX_BYTES = 1 << 20
#: In mnnvl, whose workspace takes about 6 times as much.
MNNVL_MAX_BYTES = 64 << 20


# ---- can it run? ------------------------------------------------------------------------------


def _machine_objection(backend: str) -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    why = flashinfer_api.missing()
    if why is not None:
        return why
    device = torch.device("cuda", torch.cuda.current_device())
    why = _capability_objection(torch.cuda.get_device_capability(device))
    if why is None and backend == "mnnvl" and not has_multicast(device):
        why = "missing: NVLink multicast"
    return why


def _capability_objection(capability: tuple[int, int]) -> str | None:
    if capability < OLDEST_CAPABILITY:
        return f"compute capability 9.0 or newer is needed, this GPU has {capability[0]}.{capability[1]}"
    return None


def _probe(backend: str, group: base.Group) -> str | None:
    why = flashinfer_api.missing()
    if why is not None:
        return why
    capability = base.capability(group.device)
    if capability is None:
        return f"a CUDA GPU is needed, the seam is on {group.device}"
    why = _capability_objection(capability)
    if why is not None:
        return why
    if group.world_size not in patterns.WORLD_SIZES[backend]:
        sizes = ", ".join(map(str, patterns.WORLD_SIZES[backend]))
        return f"{group.world_size} ranks; its kernels are made for {sizes}"
    if backend == "trtllm" and group.nodes > 1:
        return f"it works within one node, and the group spans {group.nodes}; 'mnnvl' is the one that leaves a node"
    if backend == "mnnvl":
        lacks = [] if has_multicast(group.device) else ["NVLink multicast"]
        if group.nodes > 1 and capability < SEVERAL_NODES_SINCE:
            here = ".".join(map(str, capability))
            lacks.append(f"compute capability 10.0, for {group.nodes} nodes (this GPU has {here})")
        if lacks:
            return f"missing: {' and '.join(lacks)}"
    return None


def has_multicast(device: torch.device) -> bool:
    """Whether the GPU and its driver say they have NVLink multicast. Asks for an attribute; makes nothing."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0))


# ---- opening ----------------------------------------------------------------------------------


def max_bytes(backend: str, capability: tuple[int, int] | None, world_size: int) -> int:
    """The most bytes of activations that one call may have."""
    if backend == "mnnvl":
        return MNNVL_MAX_BYTES
    return TRTLLM_MAX_BYTES.get(((capability or (0, 0))[0], world_size), OTHER_MAX_BYTES)


def _open(backend: str, group: base.Group) -> base.Backend:
    """Collective: each step is done by all ranks or given up by all, with what it had made given back."""

    def prepare() -> flashinfer_api.Api:
        api = flashinfer_api.load()
        flashinfer_api.compile_kernels(backend)
        return api

    api = _together(group, prepare)
    before = flashinfer_api.live_ipc_workspaces()
    made: list[Any] = []
    try:
        _together(group, lambda: made.append(_create(api, backend, group)))
        limit = max_bytes(backend, base.capability(group.device), group.world_size)
        opened = FlashInfer(backend, group, api, made[0], limit)
        _together(group, opened.settle_capacity)
        try:
            _together(group, opened.self_test)
        except base.Unavailable as error:
            _log.error("%s: switched off, its self-test failed: %s", opened.name, error)
            raise
    except base.Unavailable:
        for workspace in made:
            destroy(api, workspace)
        made.clear()
        flashinfer_api.drop_ipc_workspaces(flashinfer_api.live_ipc_workspaces() - before)
        gc.collect()
        raise
    return opened


def _together(group: base.Group, step: Callable[[], Any]) -> Any:
    """What `step` returns here, if it succeeded on all ranks; else Unavailable on all."""
    why, result = None, None
    try:
        result = step()
    except Exception as error:  # and nothing of it is kept: its frames hold what was allocated
        why = f"{type(error).__name__}: {error}"
    outcome = base.verdict(group, why)
    if outcome is not None:
        raise base.Unavailable(outcome)
    return result


def _create(api: flashinfer_api.Api, backend: str, group: base.Group) -> Any:
    capability = base.capability(group.device)
    limit = max_bytes(backend, capability, group.world_size)
    with on(group.device):
        return api.create_workspace(
            backend=backend,
            world_size=group.world_size,
            rank=group.rank,
            max_token_num=limit // (SIZING_HIDDEN * ACTIVATIONS[0].itemsize),
            hidden_dim=SIZING_HIDDEN,
            dtype=ACTIVATIONS[0],
            gpus_per_node=group.world_size // group.nodes,
            comm_backend=flashinfer_api.Talk(group),
            group=group.process_group,
        )


def _kind(backend: str) -> base.Kind:
    return base.Kind(
        f"flashinfer-{backend}",
        functools.partial(_probe, backend),
        functools.partial(_open, backend),
        functools.partial(_machine_objection, backend),
    )


TRTLLM = _kind("trtllm")
MNNVL = _kind("mnnvl")
