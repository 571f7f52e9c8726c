"""FlashInfer's own Python, down to the launch: its checks of shapes, dtypes and sizes take what we pass. No GPU needed.

What it would launch is replaced by a note of the arguments. Runs where flashinfer can be imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchseam.backends import base, flashinfer_api, flashinfer_run
from torchseam.backends import flashinfer_patterns as patterns
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

pytestmark = pytest.mark.needs_flashinfer
LIMIT = 1 << 20
QUANTS = (None, Quant("fp8_static", rule="reciprocal"), Quant("nvfp4"), Quant("nvfp4", scale_layout="linear"))
PACKED = Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed", scale_floor=1e-10)
QUANTS += (Quant("fp8_token"), Quant("fp8_static"), PACKED)


class Launches:
    """Takes the place of a compiled module, and keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def trtllm_allreduce_fusion(self, **arguments: Any) -> None:
        self.given.append(arguments)

    def trtllm_mnnvl_allreduce_fusion(self, *arguments: Any) -> None:
        self.given.append(dict(enumerate(arguments)))


def workspace(backend: str) -> Any:
    """A workspace of FlashInfer's own class for 2 ranks and LIMIT bytes, without any memory."""
    if backend == "trtllm":
        from flashinfer.comm import TRTLLMAllReduceFusionWorkspace

        made = object.__new__(TRTLLMAllReduceFusionWorkspace)
        rows = LIMIT // (2 * flashinfer_run.SIZING_HIDDEN)
        made.metadata = {
            "tp_size": 2,
            "max_token_num": rows,
            "hidden_dim": flashinfer_run.SIZING_HIDDEN,
            "use_fp32_lamport": False,
        }
        made.workspace_tensor, made.mem_handles, made.ipc_handles = torch.zeros(7, dtype=torch.int64), [], [[0]]
    else:
        from flashinfer.comm import MNNVLAllReduceFusionWorkspace

        made = object.__new__(MNNVLAllReduceFusionWorkspace)
        made.tp_size, made.buffer_size_bytes = 2, 2 * LIMIT
        made.mc_ptr = made.uc_ptrs_dev = made.uc_ptr_local = 1
        made.buffer_flags, made.handle, made.ptrs = torch.zeros(9), SimpleNamespace(), []
    made.world_size, made.rank, made._destroyed = 2, 0, False
    return made


@pytest.fixture(params=("trtllm", "mnnvl"))
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    import flashinfer.comm.trtllm_ar as trtllm
    import flashinfer.comm.trtllm_mnnvl_ar as mnnvl

    launches = Launches()
    monkeypatch.setattr(trtllm, "get_trtllm_comm_module", lambda: launches)
    monkeypatch.setattr(mnnvl, "get_trtllm_mnnvl_comm_module", lambda: launches)
    flashinfer_api.load.cache_clear()
    group = base.Group("0", 0, 2, torch.device("cpu"))
    made = flashinfer_run.FlashInfer(request.param, group, flashinfer_api.load(), workspace(request.param), LIMIT)
    made._abilities = patterns.Abilities.of(flashinfer_api.load().installed, (10, 0))
    yield made, launches
    made.close()
    assert made._workspace._destroyed


@pytest.mark.parametrize("shape", ((1, 4096), (2, 3, 1024), (128, 4096)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("offset", (0, 1))
@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: f"{q.scheme}-{q.scale_layout}-{q.rule}" if q else "plain")
def test_what_we_pass_is_taken(opened, quant, offset, dtype, shape):
    backend, launches = opened
    x = torch.zeros(shape, dtype=dtype)
    weight = torch.zeros(shape[-1], dtype=dtype)
    scales = (torch.ones(()),) if quant and quant.takes_scale else ()
    for outputs in (("residual", "norm"), ("residual",) if quant else ("norm",)):
        seam = Seam(
            Norm(1e-6, offset=offset), Reduce("0"), residual=True, quants=(quant,) if quant else (), outputs=outputs
        )
        operands = Operands(x, x, weight=weight, scales=scales)
        assert backend.run(seam, operands) and len(launches.given) == 1
        given = launches.given.pop()
        if "pattern_code" in given:
            assert given["fp32_acc"] is True and given["use_oneshot"] is True
            assert given["weight_bias"] == offset and given["token_num"] * given["hidden_dim"] == x.numel()
            assert given["block_quant_group_size"] == (128 if quant == PACKED else None)


def test_capacity_is_what_the_workspace_says(opened, monkeypatch):
    backend, _ = opened
    monkeypatch.setattr(base, "agree", lambda group, answer: [answer, answer])
    backend.settle_capacity()
    seam = Seam(Norm(1e-6), Reduce("0"), residual=True, outputs=("norm",))
    for hidden in (1024, 2048, 4096, 8192):
        rows = LIMIT // (2 * hidden)
        fits, over = torch.zeros(rows, hidden).bfloat16(), torch.zeros(rows + 1, hidden).bfloat16()
        assert backend.refuses(seam, Operands(fits, fits, weight=fits[0])) is None
        assert f"{rows + 1} rows" in backend.refuses(seam, Operands(over, over, weight=over[0]))


def test_codes_are_read_from_the_package():
    import flashinfer.comm as comm

    installed = flashinfer_api.load().installed
    assert installed.patterns["kARResidualRMSNorm"] == comm.AllReduceFusionPattern.kARResidualRMSNorm
    assert installed.layouts["SWIZZLED_128x4"] == comm.QuantizationSFLayout.SWIZZLED_128x4
