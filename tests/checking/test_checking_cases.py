"""The table of `torchseam doctor --check`."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchseam.backends import local
from torchseam.checking.cases import HIDDENS, NORMS, QUANTS, TOKENS, cases, operands
from torchseam.outputs import empty_outputs
from torchseam.seam import SCHEMES, Reduce

REDUCE = Reduce("group", "symmetric")


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("reduce", [None, REDUCE])
def test_every_part_meets_every_number_of_rows(reduce, thorough):
    table = list(cases(reduce, thorough=thorough))
    assert len(set(map(str, table))) == len(table)
    assert {case.seam.reduce for case in table} == {reduce}
    met = {(case.seam.quants, case.tokens) for case in table}
    assert met == set(itertools.product(QUANTS, TOKENS))
    assert {(case.seam.norm, case.tokens) for case in table} >= {
        (n, t) for (n, _), t in itertools.product(NORMS, TOKENS)
    }
    assert {case.hidden for case in table} > set(HIDDENS)
    assert {case.dtype for case in table} == {torch.bfloat16, torch.float16}
    assert {"fp32" if case.weight_dtype != case.dtype else "same" for case in table} == {"fp32", "same"}
    assert {q.scheme for case in table for q in case.seam.quants} == set(SCHEMES)
    assert any("reduced" in case.seam.outputs for case in table) == (reduce is not None)
    if thorough:
        pairs = {(case.seam.norm, case.seam.quants) for case in table}
        assert pairs >= {(norm, quants) for (norm, _), quants in itertools.product(NORMS, QUANTS)}


def test_the_short_table_compiles_few_kernels():
    kernels = {(c.seam, c.hidden, c.dtype) for c in cases(REDUCE)}
    assert len(kernels) == len(QUANTS) + 2


@pytest.mark.parametrize("case", list(cases(None))[:: len(TOKENS)], ids=str)
def test_our_gpu_kernels_take_each_recipe(case):
    assert all(local.unsupported_recipe(quant) is None for quant in case.seam.quants)


def test_ranks_have_their_own_x_and_share_the_rest():
    case = next(c for c in cases(REDUCE) if c.seam.quants and c.seam.quants[0].takes_scale)
    device = torch.device("cpu")
    first, again, other = operands(case, device, 0, 1), operands(case, device, 0, 1), operands(case, device, 1, 1)
    assert torch.equal(first.x, again.x) and not torch.equal(first.x, other.x)
    assert torch.equal(first.residual, other.residual) and torch.equal(first.weight, other.weight)
    assert not torch.equal(first.residual, operands(case, device, 0, 2).residual)
    assert empty_outputs(case.seam, first)
