"""Which of FlashInfer's kernels takes which seam: only one that computes what the seam says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from flashinfer_signatures import recorded

from torchseam.backends.flashinfer_api import Installed
from torchseam.backends.flashinfer_patterns import Abilities, compatibility, plan, row_refused
from torchseam.seam import Norm, Quant, Reduce, Seam

BF16 = torch.bfloat16
SEAM = Seam(Norm(1e-5), Reduce("0"), residual=True, outputs=("residual", "norm"))
STATIC = Quant("fp8_static", rule="reciprocal")
PACKED = Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed", scale_floor=1e-10)


def installed(version: str) -> Installed:
    codes = recorded()[version]["codes"]
    numbers = tuple(map(int, version.split(".")))
    quants = frozenset(codes["MNNVLQuantType"])
    return Installed(numbers, codes["AllReduceFusionPattern"], quants, codes["QuantizationSFLayout"])


def abilities(version: str = "0.7.4", capability: tuple[int, int] = (10, 0)) -> Abilities:
    return Abilities.of(installed(version), capability)


def seam(*quants: Quant, norm_out: bool = False, **changes) -> Seam:
    outputs = ("residual", "norm") if norm_out or not quants else ("residual",)
    return dataclasses.replace(SEAM, quants=quants, outputs=outputs, **changes)


@pytest.mark.parametrize("backend", ("trtllm", "mnnvl"))
@pytest.mark.parametrize(
    ("quant", "name"), [(STATIC, "FP8Quant"), (Quant("nvfp4"), "FP4Quant"), (Quant("fp8_token"), "DynamicFP8Quant")]
)
def test_a_seam_that_the_kernel_computes_goes_whole(quant, name, backend):
    for norm_out, spelling in ((False, f"kARResidualRMSNorm{name}"), (True, f"kARResidualRMSNormOut{name}")):
        decided = plan(seam(quant, norm_out=norm_out), BF16, BF16, backend, abilities())
        assert (decided.pattern, decided.left, decided.why) == (spelling, "nothing", None)
        assert spelling in recorded()["0.7.4"]["codes"]["AllReduceFusionPattern"]


@pytest.mark.parametrize("rule", ("divide", "reciprocal"))
@pytest.mark.parametrize("version", ("0.6.12", "0.7.4"))
def test_packed_groups_go_whole_to_trtllm_and_mnnvl_has_no_such_kernel(version, rule):
    quant = dataclasses.replace(PACKED, rule=rule)
    for norm_out in (False, True):
        decided = plan(seam(quant, norm_out=norm_out), BF16, BF16, "trtllm", abilities(version, (9, 0)))
        name = f"kARResidualRMSNorm{'Out' if norm_out else ''}PerTokenGroupFP8PackedQuant"
        assert (decided.pattern, decided.left) == (name, "nothing")
        assert name in recorded()[version]["codes"]["AllReduceFusionPattern"]
    decided = plan(seam(quant), BF16, BF16, "mnnvl", abilities(version))
    assert decided.left == "quantisers" and "not fused by flashinfer" in decided.remark


@pytest.mark.parametrize("offset", (0, 1))
def test_gemmas_offset_is_no_obstacle(offset):
    assert plan(seam(norm=Norm(1e-6, offset=offset)), BF16, BF16, "trtllm", abilities()).left == "nothing"


@pytest.mark.parametrize(
    ("changed", "weight", "why"),
    [
        ({"residual": False, "outputs": ("norm",)}, BF16, "no residual"),
        ({"inner_norm": Norm(1e-6)}, BF16, "a norm before the residual"),
        ({"outputs": ("reduced", "residual", "norm")}, BF16, "the sum itself"),
        ({"norm": Norm(1e-6, weight="after_cast")}, BF16, "rounds the norm before"),
        ({}, torch.float32, "the weight is torch.float32"),
    ],
)
def test_a_norm_that_the_kernel_computes_otherwise_leaves_it_the_sum(changed, weight, why):
    decided = plan(dataclasses.replace(SEAM, **changed), BF16, weight, "trtllm", abilities())
    assert (decided.pattern, decided.left) == ("kAllReduce", "seam")
    assert why in decided.remark and "only the sum" in decided.remark


@pytest.mark.parametrize(
    ("quants", "why"),
    [
        ((Quant("fp8_static"),), "'divide'"),
        ((Quant("fp8_static", rule="multiply"),), "'multiply'"),
        ((Quant("fp8_token", rule="reciprocal"),), "another recipe"),
        ((Quant("nvfp4", global_scale="decode"),), "multiplies by an encode factor"),
        ((Quant("nvfp4", global_scale="none"),), "multiplies by an encode factor"),
        ((Quant("fp8_token", scale_rule="reciprocal"),), "another recipe"),
        ((Quant("fp8_token", scale_rounding="activation"),), "another recipe"),
        ((Quant("fp8_token", scale_floor=1e-12),), "another recipe"),
        ((Quant("fp8_group", scale_dtype="ue8m0"),), "the seam's are ue8m0 row_major"),
        ((Quant("fp8_group", scale_layout="tma_aligned"),), "the seam's are float32 tma_aligned"),
        ((dataclasses.replace(PACKED, scale_floor=None),), "up, the seam another number"),
        ((dataclasses.replace(PACKED, scale_rule="reciprocal"),), "up, the seam another number"),
        ((dataclasses.replace(PACKED, scale_rounding="activation"),), "up, the seam another number"),
        ((STATIC, Quant("nvfp4")), "2 quantisers"),
    ],
)
def test_a_quantiser_that_the_kernel_computes_otherwise_stays_ours(quants, why):
    decided = plan(seam(*quants), BF16, BF16, "trtllm", abilities())
    assert (decided.pattern, decided.left) == ("kARResidualRMSNorm", "quantisers")
    assert why in decided.remark and "all but the quantiser" in decided.remark


def test_nvfp4_is_not_left_to_kernels_that_compile_to_nothing():
    decided = plan(seam(Quant("nvfp4")), BF16, BF16, "trtllm", abilities(capability=(9, 0)))
    assert decided.left == "quantisers" and "compute capability 10.0, this is 9.0" in decided.remark


@pytest.mark.parametrize(
    ("backend", "quant", "left"),
    [
        ("trtllm", STATIC, "nothing"),
        ("trtllm", Quant("nvfp4"), "nothing"),
        ("trtllm", Quant("fp8_token"), "quantisers"),
        ("mnnvl", STATIC, "quantisers"),
        ("mnnvl", Quant("nvfp4"), "quantisers"),
    ],
)
def test_an_older_version_does_what_it_can(backend, quant, left):
    assert plan(seam(quant), BF16, BF16, backend, abilities("0.6.12")).left == left


@pytest.mark.parametrize("hidden", (2048, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 24576, 32768))
def test_usual_rows_can_be_launched(hidden):
    assert row_refused(hidden) is None


@pytest.mark.parametrize(
    ("hidden", "why"),
    [
        *((hidden, "whole warps") for hidden in (8, 464, 640, 2880)),
        (4100, "no multiple of 8"),
        (8 * 8 * 32 * 33, "1024 is the most"),
    ],
)
def test_rows_that_cannot_be_launched_are_told(hidden, why):
    assert why in row_refused(hidden)


def test_the_page_shows_what_was_read():
    """The table between the marks in docs/backends.md; a change is copied from this failure."""
    rows = ["| FlashInfer | backend | and | compute capability | ranks |", "|---|---|---|---|---|"]
    for version in recorded():
        for backend, fused, capability, ranks in compatibility(installed(version)):
            rows.append(f"| {version} | `{backend}` | {fused} | {capability} | {ranks} |")
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    table = "\n".join(rows)
    assert page.partition("<!-- compatibility -->\n")[2].partition("\n<!-- end -->")[0] == table, table


def test_two_versions_can_do_this():
    old, new = (list(compatibility(installed(version))) for version in ("0.6.12", "0.7.4"))
    assert [row[:2] for row in old] == [
        ("trtllm", "nothing more"),
        ("trtllm", "fp8_static"),
        ("trtllm", "nvfp4"),
        ("trtllm", "fp8_group, `tma_aligned_packed`"),
        ("mnnvl", "nothing more"),
    ]
    schemes = ["nothing more", "fp8_static", "nvfp4", "fp8_token"]
    assert [row[:2] for row in new] == [
        *(("trtllm", scheme) for scheme in (*schemes, "fp8_group, `tma_aligned_packed`")),
        *(("mnnvl", scheme) for scheme in schemes),
    ]
