"""Groups that one view cuts and flattens: [B, S, H] -> [B * S * H / 128, 128]."""

from __future__ import annotations

import pytest
import torch

from blocks import LlamaNorm, same_bits
from graphs import run_fused
from quant_blocks import SHARED, Block, rows

pytestmark = pytest.mark.usefixtures("one_rank")

WIDE = 512


def block(tail):
    made = Block(tail)
    made.norm = LlamaNorm((torch.rand(WIDE, generator=torch.Generator().manual_seed(7)) + 0.5).bfloat16())
    return made


def flat_groups(size, scales="column", back="y"):
    """`scales` as a column, squeezed, or by rows; codes `back` in y's shape or as a matrix."""

    def tail(y, h):
        groups = y.reshape(-1, size).float()
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        shapes = {"column": lambda: scale, "squeezed": lambda: scale.squeeze(-1)}
        shapes["rows"] = lambda: scale.view(*y.shape[:-1], -1)
        return codes.view(y.shape if back == "y" else (-1, y.shape[-1])), shapes[scales]()

    return tail


@pytest.mark.parametrize("dynamic", [False, True], ids=("static", "symbolic"))
@pytest.mark.parametrize("back", ["y", "matrix"])
@pytest.mark.parametrize("scales", ["column", "squeezed", "rows"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("shape", [(2, 3), (6,)], ids=str)
def test_groups_of_a_flattened_tensor(shape, size, scales, back, dynamic):
    module = block(flat_groups(size, scales, back))
    x, residual = rows(*shape, WIDE), rows(*shape, WIDE, seed=1)
    got = run_fused(module, x, residual, dynamic=dynamic)
    assert got.kinds() == [f"{SHARED} + fp8_group"]
    assert got.report.fused[0].seam.quants[0].group_size == size
    assert got.report.refused == ()
    assert all(same_bits(a, b) for a, b in zip(module(x, residual), got.results, strict=True))


def test_groups_of_all_columns_are_not_taken_for_groups_of_a_row():
    def tail(y, h):
        groups = y.transpose(0, 1).reshape(-1, 128).float()
        scale = groups.abs().amax(-1, keepdim=True) / 448.0
        return (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(y.shape), scale

    module, x, residual = block(tail), rows(128, WIDE), rows(128, WIDE, seed=1)
    got = run_fused(module, x, residual)
    assert got.kinds() == [SHARED]
    assert all(same_bits(a, b) for a, b in zip(module(x, residual), got.results, strict=True))
