"""A model whose residual stays with the owners of its rows, over three real gloo ranks, through Inductor.

Eager is the measure, bit for bit. Rows that a rank does not own hold NaN until they are gathered.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sharded_rows
import torchseam
from torchseam import Quant, SeamConfig, ops
from torchseam.backends import collective
from torchseam.cli.launch import launch
from torchseam.seam import Norm, Reduce, Seam, owned_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inductor_cache")]

WORLD_SIZE, HIDDEN, LAYERS = 3, 96, 4
#: Fewer than ranks, not a multiple of them, a multiple.
TOKENS = (5, 1, 2, 6)


def quantise(y: Tensor, scale: Tensor) -> Tensor:
    """Static FP8 as people write it."""
    return (y.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


class Model(torch.nn.Module):
    """A residual stream through layers that sum in place; what is returned besides the last norm depends on `taps`."""

    def __init__(self, taps: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.matrices = torch.randn(LAYERS, HIDDEN, HIDDEN, generator=generator).mul(HIDDEN**-0.5).bfloat16()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(LAYERS + 1))
        self.norms.bfloat16().requires_grad_(False)
        self.scale, self.taps = torch.tensor(0.02), taps

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        tapped = []
        for index, norm in enumerate(self.norms[:-1]):
            codes = quantise(norm(h), self.scale)
            partial = (codes.float() * self.scale).to(h.dtype) @ self.matrices[index]
            dist.all_reduce(partial)
            h = h + partial
            if self.taps and index == 1:
                tapped.append(h)
        return self.norms[-1](h), *tapped


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def compiled_facts(taps: bool) -> dict[str, Any]:
    model = Model(taps)
    compiled = torchseam.compile(model, config=SeamConfig(exact=True, shard_residual=True), fullgraph=True)
    same, digest, placements = [], hashlib.sha256(), []
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        want = model(x)
        with sharded_rows.poisoned() as ran:
            got = compiled(x)
        same.append([bits(a) == bits(b) for a, b in zip(got, want, strict=True)])
        placements.append([(s.reduce.residual_in, s.reduce.residual_out) for s in ran])
        for tensor in got:
            digest.update(bits(tensor))
    report = torchseam.report(compiled)
    told = [residual.full for residual in report.distinct[0].residuals]
    return {"same": same, "placements": placements, "digest": digest.hexdigest(), "told": told, "text": str(report)}


def operator_facts() -> dict[str, Any]:
    """A chain by the operator itself, each residual overwritten; and what is gathered, byte for byte."""
    world, rank = dist.group.WORLD, dist.get_rank()
    norm, quants = Norm(1e-6, "none"), (Quant("fp8_token"),)
    full = Seam(norm, Reduce(world.group_name), None, True, quants, ("residual",))
    reduces = [
        dataclasses.replace(full.reduce, residual_out="sharded"),
        dataclasses.replace(full.reduce, residual_in="sharded", residual_out="sharded"),
        dataclasses.replace(full.reduce, residual_in="sharded"),
    ]
    wrong = []
    for tokens in (0, 1, 2, 3, 5, 7):
        rows = torch.randn(3, tokens, HIDDEN, generator=torch.Generator().manual_seed(7 + rank))
        start = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(7))
        expected, residual = start.clone(), start.clone()
        for x, reduce in zip(rows, reduces, strict=True):
            want = ops.seam(full, x.clone(), residual=expected, overwrite=("residual",))
            with sharded_rows.poisoned():
                seam = dataclasses.replace(full, reduce=reduce)
                got = ops.seam(seam, x.clone(), residual=residual, overwrite=("x", "residual"))
            if any(bits(a) != bits(b) for a, b in zip(got, want, strict=True)):
                wrong.append(f"T={tokens} {reduce}")
            poison = residual.isnan().all(-1).sum().item() if reduce.residual_out == "sharded" else 0
            if reduce.residual_out == "sharded" and poison != tokens - len(owned_rows(tokens, rank, WORLD_SIZE)):
                wrong.append(f"T={tokens}: {poison} rows of others")
        if bits(expected) != bits(residual):
            wrong.append(f"T={tokens}: the residual at the end")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            noise = torch.randint(0, 256, (tokens, 2 * HIDDEN * dtype.itemsize), dtype=torch.uint8)
            dist.broadcast(noise, 0)
            whole = noise.view(dtype)[:, ::2].unflatten(0, (1, tokens)) if tokens else noise.view(dtype)[:, ::2]
            mine = torch.zeros_like(whole)
            owned = owned_rows(tokens, rank, WORLD_SIZE)
            mine[..., owned.start : owned.stop, :] = whole[..., owned.start : owned.stop, :]
            if tokens and bits(collective._gathered(mine, world)) != bits(whole):
                wrong.append(f"T={tokens} {dtype}: gathered")
    return {"wrong": wrong}


def run_rank() -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.no_grad():
        facts = {"chain": compiled_facts(False), "taps": compiled_facts(True), "operator": operator_facts()}
    each: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(each, facts)
    dist.destroy_process_group()
    return {name: [of[name] for of in each] for name in facts}


@functools.cache
def ranks() -> dict[str, list[dict[str, Any]]]:
    return launch(run_rank, WORLD_SIZE)


FULL, OUT, BOTH, IN = ("full", "full"), ("full", "sharded"), ("sharded", "sharded"), ("sharded", "full")


@pytest.mark.parametrize(
    ("name", "placements", "told"),
    [("chain", [OUT, BOTH, BOTH, IN], ["", "", ""]), ("taps", [OUT, IN, OUT, IN], ["", "it is returned", ""])],
)
def test_a_compiled_model_equals_eager_bit_for_bit(name, placements, told):
    found = ranks()[name]
    assert len(found) == WORLD_SIZE
    for facts in found:
        assert facts["same"] == [[True] * (1 + (name == "taps"))] * len(TOKENS)
        assert facts["placements"] == [placements] * len(TOKENS)
        assert facts["told"] == told
        assert f"{told.count('')} residuals between seams, each row with its owner" in facts["text"]
    assert len({facts["digest"] for facts in found}) == 1, "the ranks differ"


def test_the_operator_reads_and_leaves_rows_with_their_owners():
    assert [facts["wrong"] for facts in ranks()["operator"]] == [[]] * WORLD_SIZE
