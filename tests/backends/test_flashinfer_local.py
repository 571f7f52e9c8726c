"""FlashInfer's local add + norm + NVFP4 kernel: asked for only, as an operator, and never where it cannot run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from flashinfer_double import poisoned_outputs
from flashinfer_signatures import recorded, signature
from torch import Tensor

from torchseam import reference
from torchseam.backends import base, flashinfer_api, flashinfer_local, local
from torchseam.formats import layout
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Seam

BF16 = torch.bfloat16


class Kernel:
    """The real one's signature and effects, computed by the reference; it leaves the padding as it was."""

    def __init__(self, version: str) -> None:
        self.__signature__ = signature(recorded()[version]["functions"]["add_rmsnorm_fp4quant"])
        self.calls, self.wrong = 0, False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        given = self.__signature__.bind(*args, **kwargs).arguments
        self.calls += 1
        x, residual, scales = given["input"], given["residual"], given["block_scale"]
        assert x.dim() == residual.dim() == 2 and all(t.is_contiguous() for t in (residual, scales, given["y_fp4"]))
        swizzled = given["is_sf_swizzled_layout"]
        quant = Quant("nvfp4", scale_layout="swizzled" if swizzled else "linear")
        seam = Seam(Norm(given["eps"]), residual=True, quants=(quant,), outputs=("residual", "norm"))
        operands = Operands(x, residual.clone(), weight=given["weight"], scales=(given["global_scale"],))
        total, norm, codes, block_scales = reference.run(seam, operands)
        residual.copy_(total)
        given["y_fp4"].copy_(codes ^ 0xFF if self.wrong else codes)
        written = torch.ones(x.shape[0], x.shape[1] // 16, dtype=torch.uint8)
        mask = (layout.swizzle(written) if swizzled else written).view(-1).bool()
        scales.view(torch.uint8).view(-1)[mask] = block_scales.view(torch.uint8).view(-1)[mask]
        if given.get("y_out") is not None:
            given["y_out"].copy_(norm)


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    version = getattr(request, "param", "0.7.4")
    double = Kernel(version)
    monkeypatch.setattr(flashinfer_local, "_function", lambda: double)
    monkeypatch.setattr(flashinfer_local, "empty_outputs", poisoned_outputs)
    monkeypatch.setattr(flashinfer_api, "missing", lambda: None)
    monkeypatch.setattr(base, "capability", lambda device: (10, 0))
    monkeypatch.setenv(flashinfer_local.VARIABLE, "1")
    flashinfer_local._trust.clear()
    flashinfer_local._import_failure.cache_clear()
    yield double
    flashinfer_local._trust.clear()
    flashinfer_local._import_failure.cache_clear()


def case(shape: tuple[int, ...] = (3, 5, 464), norm_out: bool = False, **changes: Any) -> tuple[Seam, Operands]:
    generator = torch.Generator().manual_seed(1)

    def rows(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    outputs = ("residual", "norm") if norm_out else ("residual",)
    parts: dict[str, Any] = {"norm": Norm(1e-5), "residual": True, "quants": (Quant("nvfp4"),), "outputs": outputs}
    operands = Operands(rows(*shape), rows(*shape), weight=rows(shape[-1]), scales=(torch.tensor([250.0]),))
    return Seam(**{**parts, **changes}), operands


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scale_layout", ("swizzled", "linear"))
@pytest.mark.parametrize("norm_out", (False, True))
@pytest.mark.parametrize("shape", ((3, 5, 464), (1, 1024), (128, 64), (129, 1040)))
def test_a_seam_goes_there_and_comes_out_whole(kernel, shape, norm_out, scale_layout):
    seam, operands = case(shape, norm_out, quants=(Quant("nvfp4", scale_layout=scale_layout),))
    before = operands.residual.clone()
    got = local.run(seam, operands)
    assert kernel.calls == 2, "one, and the trial"
    assert same(got, reference.run(seam, operands))
    assert torch.equal(operands.residual, before), "the operator changes a copy"


def test_nothing_goes_there_unasked(kernel, monkeypatch):
    monkeypatch.delenv(flashinfer_local.VARIABLE)
    local.run(*case())
    assert kernel.calls == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quants": (Quant("fp8_token"),)}, "it is for residual"),
        ({"quants": (Quant("nvfp4"), Quant("fp8_token"))}, "it is for residual"),
        ({"quants": (Quant("nvfp4", global_scale="decode"),)}, "encode factor"),
        ({"residual": False, "outputs": ()}, "it is for residual"),
        ({"norm": Norm(1e-6, "after_cast")}, "before the rounding"),
        ({"norm": Norm(1e-6, offset=1)}, "without offset"),
    ],
)
def test_another_seam_stays_ours(kernel, changes, why):
    seam, operands = case(**changes)
    assert why in flashinfer_local.refuses(seam, operands)
    assert not flashinfer_local.takes(seam, operands)


@pytest.mark.parametrize("kernel", ["0.6.12"], indirect=True)
def test_an_older_version_does_not_emit_the_norm(kernel):
    assert "cannot emit the norm" in flashinfer_local.refuses(*case(norm_out=True))
    assert flashinfer_local.refuses(*case()) is None


def test_an_older_gpu_is_refused(kernel, monkeypatch):
    monkeypatch.setattr(base, "capability", lambda device: (9, 0))
    assert "10.0" in flashinfer_local.refuses(*case())


def test_a_kernel_that_is_wrong_is_not_used(kernel, caplog):
    kernel.wrong = True
    with caplog.at_level(logging.ERROR, logger="torchseam"):
        seam, operands = case()
        assert same(local.run(seam, operands), reference.run(seam, operands))
        local.run(seam, operands)
    assert kernel.calls == 1 and len(caplog.records) == 1


def test_the_operator_declares_what_it_changes(kernel):
    seam, operands = case((5, 1024), norm_out=True)
    outputs = poisoned_outputs(seam, operands)
    codes, block_scales = outputs[2:]
    inputs = (operands.x, operands.residual, operands.weight, operands.scales[0])
    given = (*inputs, codes, block_scales.view(torch.uint8), outputs[1], 1e-5, True)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.torchseam.flashinfer_add_rms_norm_nvfp4.default, given, test_utils=checks)
