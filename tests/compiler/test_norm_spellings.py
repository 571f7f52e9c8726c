"""Every way to spell an RMSNorm, multiplied out: each is found, and gives the bits of eager."""

from __future__ import annotations

import itertools

import pytest
import torch

from blocks import EPS, HIDDEN, same_bits
from graphs import trace_fused
from quant_blocks import SHARED, Block, rows

pytestmark = pytest.mark.usefixtures("one_rank")

WEIGHT = torch.nn.Parameter((torch.rand(HIDDEN, generator=torch.Generator().manual_seed(7)) + 0.5), requires_grad=False)

MEANS = {
    "keepdim -1": lambda s: s.mean(-1, keepdim=True),
    "keepdim ndim-1": lambda s: s.mean(s.dim() - 1, keepdim=True),
    "unsqueeze": lambda s: s.mean(-1).unsqueeze(-1),
    "unsqueeze ndim-1": lambda s: s.mean(s.dim() - 1).unsqueeze(s.dim() - 1),
    "None": lambda s: s.mean([-1])[..., None],
}
SQUARES = {"pow": lambda x: x.pow(2), "product": lambda x: x * x, "square": torch.square}
EPSILONS = {
    "add.Scalar": lambda v: torch.ops.aten.add.Scalar(v, EPS),
    "add.Tensor": lambda v: v + EPS,
    "left": lambda v: EPS + v,
    "full": lambda v: v + torch.full((), EPS),
}
ROOTS = {
    "rsqrt": torch.rsqrt,
    "pow(-0.5)": lambda v: v.pow(-0.5),
    "1 / sqrt": lambda v: 1 / v.sqrt(),
    "1.0 / pow(0.5)": lambda v: 1.0 / v.pow(0.5),
    "sqrt.reciprocal": lambda v: v.sqrt().reciprocal(),
}
WEIGHTS = {
    "none": lambda n, w, dtype: n.to(dtype),
    "left, after the cast": lambda n, w, dtype: w.to(dtype) * n.to(dtype),
    "right, after the cast": lambda n, w, dtype: n.to(dtype) * w.to(dtype),
    "left, before the cast": lambda n, w, dtype: (w * n).to(dtype),
    "right, before the cast": lambda n, w, dtype: (n * w).to(dtype),
}


class Spelled(torch.nn.Module):
    def __init__(self, mean, square, epsilon, root, weigh, scaled_left) -> None:
        super().__init__()
        self.how = (mean, square, epsilon, root, weigh, scaled_left)
        self.weight = WEIGHT

    def forward(self, h):
        mean, square, epsilon, root, weigh, left = self.how
        wide = h.float()
        inverse = root(epsilon(mean(square(wide))))
        return weigh(inverse * wide if left else wide * inverse, self.weight, h.dtype)


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS.keys())
@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS.keys())
def test_each_spelling_is_found(mean, root):
    x, residual = rows(2, 3, HIDDEN), rows(2, 3, HIDDEN, seed=1)
    spellings = itertools.product(SQUARES.items(), EPSILONS.items(), WEIGHTS.items(), (False, True))
    for (square, by), (epsilon, add), (weight, weigh), left in spellings:
        block = Block(lambda y, h: (y,))
        block.norm = Spelled(mean, by, add, root, weigh, left)
        got = trace_fused(block, x, residual)
        what = f"{square}, {epsilon}, weight {weight}, {left}"
        assert got.kinds() == [SHARED], what
        assert got.report.fused[0].seam.norm.eps == EPS, what
        want = block(x, residual)
        assert all(same_bits(a, b) for a, b in zip(want, got.results, strict=True)), what


@pytest.mark.parametrize(
    "root", [lambda v: 2 / v.sqrt(), lambda v: v.pow(-0.25), torch.sqrt], ids=("2/", "-0.25", "sqrt")
)
def test_another_root_is_no_norm(root):
    x, residual = rows(2, 3, HIDDEN), rows(2, 3, HIDDEN, seed=1)
    block = Block(lambda y, h: (y,))
    block.norm = Spelled(MEANS["unsqueeze"], SQUARES["pow"], EPSILONS["left"], root, WEIGHTS["none"], False)
    got = trace_fused(block, x, residual)
    assert got.kinds() == []
    assert all(same_bits(a, b) for a, b in zip(block(x, residual), got.results, strict=True))
