"""Every combination that the pass can emit, generated, against eager: bit for bit on the CPU, where the
operator and eager run the same aten ops. A pass that fuses nothing would be equal too: the count is part
of the test, and so is what was fused."""

from __future__ import annotations

import itertools

import pytest
import torch

from blocks import (
    DTYPES,
    HIDDEN,
    NORMS,
    ORDERS,
    WEIGHT_DTYPES,
    Block,
    LlamaNorm,
    quantisers,
    same_bits,
)
from graphs import trace_fused


def expected_kinds(order, quantiser, norm, dtype, weight_dtype):
    """What a person would say is fused, from the words of the combination alone."""
    scheme = None if quantiser is None else quantiser.scheme
    tail = ["rms_norm", *([scheme] if scheme else [])]
    reduces = not order.startswith("no_reduce")
    # A weight wider than the activations, applied after the cast, makes the norm's output wider too:
    # the inner norm then changes the residual's dtype and the sandwich is two seams.
    widens = norm is LlamaNorm and torch.promote_types(dtype, weight_dtype) != dtype
    if order == "sandwich" and widens:
        return [["all_reduce", "rms_norm"], *([tail] if scheme else [])]
    if not reduces and scheme is None:
        return []
    parts = ["all_reduce"] if reduces else []
    parts += ["rms_norm"] if order == "sandwich" else []
    parts += ["residual"] if "residual" in order or order == "sandwich" else []
    return [parts + tail]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda n: n.__name__)
@pytest.mark.parametrize("order", ORDERS)
def test_every_combination_equals_eager(order, norm, dtype, one_rank):
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(2, 3, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    count = 0
    for quantiser, weight_dtype in itertools.product(quantisers(), WEIGHT_DTYPES):
        block = Block(norm, order, quantiser, weight_dtype)
        want = block(x, residual)
        got = trace_fused(block, x, residual)
        what = f"{quantiser} weight {weight_dtype}"
        assert [k.split(" + ") for k in got.kinds()] == expected_kinds(order, quantiser, norm, dtype, weight_dtype), (
            what
        )
        assert len(want) == len(got.results)
        for i, (a, b) in enumerate(zip(want, got.results, strict=True)):
            assert same_bits(a, b), f"{what}: output {i} differs"
        count += 1
    assert count == len(quantisers()) * len(WEIGHT_DTYPES)
