"""When the local backend runs the kernel, and when the reference: no GPU and no Triton needed."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from torchseam import reference
from torchseam.backends import local
from torchseam.operands import Operands
from torchseam.seam import GLOBAL_SCALES, SCALE_ROUNDINGS, SCALE_RULES, SCHEMES, Norm, Quant, Seam

SEAM = Seam(norm=Norm(1e-6), outputs=("norm",))


class CudaLooking:
    """All that the choice reads of a tensor."""

    is_cuda = True


def kernel(reason: str | None):
    return types.SimpleNamespace(
        unsupported=lambda x: reason, run=lambda *args: ["kernel"], quantize=lambda *args: ["kernel"]
    )


@pytest.fixture
def reference_is_named(monkeypatch):
    monkeypatch.setattr(reference, "run", lambda *args: ["reference"])
    monkeypatch.setattr(reference, "quantize", lambda *args: ["reference"])


def both(x) -> set[str]:
    ran = local.run(SEAM, Operands(x)) + local.quantize(x, Quant("fp8_token"), None)
    return set(ran)


def test_a_cuda_tensor_goes_to_the_kernel(monkeypatch, reference_is_named):
    monkeypatch.setattr(local, "_triton_kernel", lambda: kernel(None))
    assert both(CudaLooking()) == {"kernel"}


def test_a_cpu_tensor_goes_to_the_reference_and_triton_is_not_imported(monkeypatch, reference_is_named):
    monkeypatch.setattr(local, "_triton_kernel", lambda: pytest.fail("Triton was asked for"))
    assert both(torch.randn(2, 8)) == {"reference"}


def test_without_triton_the_reference_runs(monkeypatch, reference_is_named):
    monkeypatch.setattr(local, "_triton_kernel", lambda: None)
    assert both(CudaLooking()) == {"reference"}


def test_what_the_kernel_cannot_do_goes_to_the_reference_with_one_warning(monkeypatch, reference_is_named, caplog):
    local._warn_once.cache_clear()
    monkeypatch.setattr(local, "_triton_kernel", lambda: kernel("the hidden size is 40000"))
    assert both(CudaLooking()) == {"reference"}
    assert [r.getMessage() for r in caplog.records if "40000" in r.getMessage()] == [
        "the hidden size is 40000: seams run unfused, as plain torch operators"
    ]


@dataclasses.dataclass(frozen=True)
class Stranger(Quant):
    """A recipe with an attribute that no kernel knows."""

    twist: str = "none"


def test_a_recipe_that_the_kernel_lacks_goes_to_the_reference(monkeypatch, reference_is_named):
    monkeypatch.setattr(local, "_triton_kernel", lambda: kernel(None))
    assert local.quantize(CudaLooking(), Stranger("fp8_token"), None) == ["kernel"]
    assert local.quantize(CudaLooking(), Stranger("fp8_token", twist="left"), None) == ["reference"]
    assert local.unsupported_recipe(Stranger("nvfp4", twist="left")) == "the GPU kernel has no twist 'left'"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernel_has_every_attribute_of_every_scheme(scheme):
    assert local.unsupported_recipe(Quant(scheme)) is None


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_the_kernel_makes_scales_in_every_way(rule, rounding):
    for scheme in ("fp8_token", "fp8_group"):
        assert local.unsupported_recipe(Quant(scheme, scale_rule=rule, scale_rounding=rounding)) is None


@pytest.mark.parametrize("kind", GLOBAL_SCALES)
def test_the_kernel_takes_every_global_scale(kind):
    assert local.unsupported_recipe(Quant("nvfp4", global_scale=kind)) is None


def test_a_triton_that_cannot_be_imported_is_remembered(monkeypatch, caplog):
    import sys

    local._triton_kernel.cache_clear()
    local._warn_once.cache_clear()
    monkeypatch.setitem(sys.modules, "torchseam.kernels.local", None)
    monkeypatch.delattr("torchseam.kernels.local", raising=False)
    try:
        assert local._triton_kernel() is None and local._triton_kernel() is None
        assert len(caplog.records) == 1
    finally:
        local._triton_kernel.cache_clear()
        local._warn_once.cache_clear()
