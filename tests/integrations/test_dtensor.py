"""Plain PyTorch models, tensor-parallel by DTensor or by hand, over 2, 3 and 4 real gloo ranks.

Every rank runs eager and compiled forms of a model and reports plain facts; the tests judge them. Eager
is the measure, by DESIGN section 4: residual_out bitwise, norms within 1 ulp of the activation dtype,
codes that are those of the norm. With `exact`, everything bitwise.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchseam
from torchseam import SeamConfig
from torchseam.cli.launch import launch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inductor_cache")]

#: 12 heads and these widths can be shared by 2, 3 and 4 ranks.
HIDDEN, HEADS, WIDE = 96, 12, 192
TOKENS, LAYERS = 5, 2
WORLD_SIZES = (2, 3, 4)

# The first norm has nothing but its quantiser. Then each layer sums twice, after attention and after the
# MLP; the next norm and its quantiser follow each sum, but the last, whose norm nothing quantises.
COUNTED = {
    "rms_norm + fp8_static": 1,
    "all_reduce + residual + rms_norm + fp8_static": 2 * LAYERS - 1,
    "all_reduce + residual + rms_norm": 1,
}


def quantise(y: Tensor, scale: Tensor) -> Tensor:
    """Static FP8 as people write it."""
    return (y.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def widen(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale).to(dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(0, 1) for f in (self.q, self.k, self.v))
        return self.o((torch.softmax((q @ k.mT).float(), -1).to(x.dtype) @ v).transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Returns the last norm and, with `taps`, every residual and every norm's codes on the way there."""

    def __init__(self, weight_dtype: torch.dtype, taps: bool) -> None:
        super().__init__()
        parts = [part() for _ in range(LAYERS) for part in (Attention, Mlp)]
        self.parts = nn.ModuleList(parts).bfloat16()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, eps=1e-6, dtype=weight_dtype) for _ in range(len(parts) + 1))
        self.register_buffer("scale", torch.tensor(0.02))
        self.taps = taps
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(values * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + values / 4)
        self.requires_grad_(False)

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        residuals, all_codes = [], []
        for part, norm in zip(self.parts, self.norms, strict=False):
            codes = quantise(norm(h), self.scale)
            h = h + part(widen(codes, self.scale, h.dtype))
            residuals.append(h)
            all_codes.append(codes)
        last = self.norms[-1](h)
        return (last, *residuals, *all_codes) if self.taps else (last,)


class InPlaceModel(Model):
    """The same, each rank holding its part by hand and summing in place."""

    def __init__(self, weight_dtype: torch.dtype, taps: bool, group: dist.ProcessGroup) -> None:
        super().__init__(weight_dtype, taps)
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                dim = 1 if name.endswith((".o", ".down")) else 0
                module.weight = nn.Parameter(module.weight.chunk(size, dim)[rank].contiguous(), requires_grad=False)

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        residuals, all_codes = [], []
        for part, norm in zip(self.parts, self.norms, strict=False):
            codes = quantise(norm(h), self.scale)
            partial = part(widen(codes, self.scale, h.dtype))
            dist.all_reduce(partial, group=self.group)
            h = h + partial
            residuals.append(h)
            all_codes.append(codes)
        last = self.norms[-1](h)
        return (last, *residuals, *all_codes) if self.taps else (last,)


def sharded_model(mesh: DeviceMesh, weight_dtype: torch.dtype, taps: bool) -> Model:
    model = Model(weight_dtype, taps)
    plan = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            plan[name] = RowwiseParallel() if name.endswith((".o", ".down")) else ColwiseParallel()
    parallelize_module(model, mesh, plan)
    return model


def rows(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8 if x.itemsize == 1 else torch.int16)


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance of two bf16 tensors in steps of bf16."""
    ordered = [torch.where(i < 0, -32768 - i, i) for i in (bits(x).int() for x in (a, b))]
    return int((ordered[0] - ordered[1]).abs().max())


def codes_off(model: Model, h: Tensor, codes: Tensor, norm: nn.Module) -> int:
    """How many codes are not those of a norm within 1 ulp of eager's norm of h."""
    y = norm(h)
    near = [torch.nextafter(y, torch.full_like(y, end)) for end in (-torch.inf, torch.inf)]
    allowed = [bits(quantise(n, model.scale)) == bits(codes) for n in (y, *near)]
    return int((~torch.stack(allowed).any(0)).sum())


def facts(model: Model, x: Tensor, config: SeamConfig, ranks: dist.ProcessGroup) -> dict[str, Any]:
    """Run eager and compiled; what the tests ask about, as plain values."""
    torch._dynamo.reset()
    want = model(x.clone())
    compiled = torchseam.compile(model, config=config, fullgraph=True, dynamic=False)
    got = compiled(x.clone())
    report = torchseam.report(compiled)
    digest = hashlib.sha256(b"".join(bits(t).numpy().tobytes() for t in got)).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size(ranks)
    dist.all_gather_object(digests, digest, group=ranks)
    residuals, codes = got[1 : 1 + 2 * LAYERS], got[1 + 2 * LAYERS :]
    read = [x, *want[1 : 2 * LAYERS]]  # what each quantised norm reads
    return {
        "seams": dict(report.kinds()),
        "refused": [f"{r.part}: {r.reason.value}: {r.detail}" for r in report.refusals],
        "graphs": len(report.graphs),
        "outputs": len(got),
        "like_eager": [(a.dtype, a.shape, a.stride()) for a in got] == [(b.dtype, b.shape, b.stride()) for b in want],
        "bitwise": all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True)),
        "residuals_bitwise": all(map(torch.equal, map(bits, residuals), map(bits, want[1:]))),
        "norm_ulps": ulps(got[0], want[0]),
        "codes_off": [codes_off(model, h, c, n) for h, c, n in zip(read, codes, model.norms)],  # noqa: B905
        "different_codes": len(set(bits(want[-1]).flatten().tolist())),
        "digests": digests,
    }


def run_rank() -> dict[str, list[dict[str, Any]]]:
    """case -> the facts of each rank that took part in it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    mesh = DeviceMesh("cpu", list(range(size)))
    exact, fast = SeamConfig(exact=True), SeamConfig()
    bf16, f32 = torch.bfloat16, torch.float32
    cases: dict[str, dict[str, Any] | None] = {}
    with torch.no_grad():
        for name, dtype in (("bf16", bf16), ("fp32", f32)):
            cases[f"{name} weight"] = facts(sharded_model(mesh, dtype, True), rows(), fast, world)
            cases[f"{name} weight, exact"] = facts(sharded_model(mesh, dtype, True), rows(), exact, world)
        cases["no taps"] = facts(sharded_model(mesh, f32, False), rows(), fast, world)
        cases["in place"] = facts(InPlaceModel(f32, True, world), rows(), exact, world)
        if size == 4:
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            mine = pairs[rank // 2]
            cases["pairs, in place"] = facts(InPlaceModel(f32, True, mine), rows(rank // 2), exact, mine)
            square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replica", "tensor"))
            model = sharded_model(square["tensor"], f32, True)
            cases["pairs, DTensor"] = facts(model, rows(rank // 2), exact, square.get_group("tensor"))
            odd = dist.new_group([1, 3])
            odd_mesh = DeviceMesh.from_group(odd, "cpu") if rank % 2 else None
            cases["ranks 1 and 3, in place"] = cases["ranks 1 and 3, DTensor"] = None
            if odd_mesh is not None:
                cases["ranks 1 and 3, in place"] = facts(InPlaceModel(f32, True, odd), rows(), exact, odd)
                cases["ranks 1 and 3, DTensor"] = facts(sharded_model(odd_mesh, f32, True), rows(), exact, odd)
    each: list[Any] = [None] * size
    dist.all_gather_object(each, cases)
    dist.destroy_process_group()
    return {name: [c[name] for c in each if c[name] is not None] for name in cases}


@functools.cache
def ranks(world_size: int) -> dict[str, list[dict[str, Any]]]:
    """One launch for each world size, whichever test asks first."""
    return launch(run_rank, world_size)


def check_counts(case: list[dict[str, Any]]) -> None:
    for found in case:
        assert found["seams"] == COUNTED, Counter(found["seams"])
        assert found["refused"] == []
        assert found["graphs"] == 1
        assert found["like_eager"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ["bf16 weight", "fp32 weight"])
def test_fused_by_the_contract(name, world_size):
    case = ranks(world_size)[name]
    assert len(case) == world_size
    check_counts(case)
    for found in case:
        assert found["outputs"] == 1 + 4 * LAYERS
        assert found["different_codes"] > 16, "codes that are all alike prove nothing"
        assert found["residuals_bitwise"]
        assert found["norm_ulps"] <= 1
        assert found["codes_off"] == [0] * 2 * LAYERS


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ["bf16 weight, exact", "fp32 weight, exact", "in place"])
def test_exact_is_bitwise(name, world_size):
    case = ranks(world_size)[name]
    check_counts(case)
    assert [found["bitwise"] for found in case] == [True] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_values_that_nobody_reads_change_no_count(world_size):
    case = ranks(world_size)["no taps"]
    check_counts(case)
    assert [found["outputs"] for found in case] == [1] * world_size
    assert [found["norm_ulps"] <= 1 for found in case] == [True] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_agree_bitwise(world_size):
    digests = {name: found["digests"] for name, case in ranks(world_size).items() for found in case[:1]}
    whole = {name: each for name, each in digests.items() if len(each) == world_size}
    assert len(whole) == 6
    assert [name for name, each in whole.items() if len(set(each)) != 1] == []


@pytest.mark.parametrize("how", ["in place", "DTensor"])
def test_two_groups_at_once_do_not_mix(how):
    case = ranks(4)[f"pairs, {how}"]
    check_counts(case)
    assert [found["bitwise"] for found in case] == [True] * 4
    digests = [found["digests"] for found in case]
    assert digests[0] == digests[1] and len(set(digests[0])) == 1
    assert digests[2] == digests[3] and len(set(digests[2])) == 1
    assert digests[0] != digests[2], "the groups had different inputs"


@pytest.mark.parametrize("how", ["in place", "DTensor"])
def test_a_group_with_holes(how):
    case = ranks(4)[f"ranks 1 and 3, {how}"]
    check_counts(case)
    assert [found["bitwise"] for found in case] == [True] * 2
    assert len(set(case[0]["digests"])) == 1
    # the same two parts as in a world of two ranks, so the same sums
    assert case[0]["digests"][0] == ranks(2)["fp32 weight, exact" if how == "DTensor" else "in place"][0]["digests"][0]
