"""`torchseam::seam_`: what it overwrites, what it leaves, and that the values are those of `torchseam::seam`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cases
from blocks import same_bits
from pretend_group import pretend_group
from torchseam import ops
from torchseam.backends import collective, select
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

pytestmark = pytest.mark.usefixtures("one_rank")

NORM, HIDDEN = Norm(1e-6), 256
TOKEN, STATIC = Quant("fp8_token"), Quant("fp8_static")
RANKS = 3


def call(seam: Seam, given: dict, overwrite: tuple[str, ...]) -> list[Tensor]:
    return ops.seam(seam, **given, overwrite=overwrite)


def case_of(kind: str, **changes) -> tuple[Seam, dict]:
    case = cases.Case(NORM, kind, torch.bfloat16, torch.float32)
    seam = case.seam(**{"quants": (STATIC, TOKEN), "reduce": Reduce(pretend_group(RANKS)), **changes})
    return seam, cases.arguments(seam, (2, 3), HIDDEN, case.dtype, case.weight_dtype, seed=0)


def expected(seam: Seam, given: dict, overwrite: tuple[str, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What the functional operator returns, split into what is still returned and what is found in arguments."""
    results = ops.seam(seam, **given)
    named = dict(zip(seam.outputs, results, strict=False))
    found = {name: named[output] for name, output in (("x", "reduced"), ("residual", "residual")) if output in named}
    found = {name: value for name, value in found.items() if name in overwrite}
    return [r for r in results if not any(r is f for f in found.values())], found


@pytest.mark.parametrize("overwrite", ops.OVERWRITES, ids="+".join)
@pytest.mark.parametrize("outputs", [("reduced", "residual", "norm"), ("residual",)], ids="+".join)
@pytest.mark.parametrize("kind", ["residual", "sandwich"])
def test_values_and_memory(kind, outputs, overwrite):
    seam, given = case_of(kind, outputs=outputs)
    want, found = expected(seam, given, overwrite)
    before = {name: t.clone() for name, t in given.items() if isinstance(t, Tensor)}
    got = call(seam, given, overwrite)
    assert len(got) == len(want) and all(map(same_bits, got, want))
    for name, value in found.items():
        assert same_bits(given[name], value)
    for name in set(before) - set(overwrite):
        assert same_bits(given[name], before[name]), f"{name} was overwritten"
    owners = [t.untyped_storage().data_ptr() for t in (*got, given["x"], given["residual"])]
    assert len(set(owners)) == len(owners)


def test_the_sum_over_the_ranks_is_made_where_x_is(monkeypatch):
    """The `collective` backend hands x itself to torch.distributed."""
    seam, given = case_of("residual")
    summed = []
    real = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda t, **kw: (summed.append(t.data_ptr()), real(t, **kw)))
    call(seam, given, ("x", "residual"))
    call(seam, given, ("residual",))
    assert summed[0] == given["x"].data_ptr() != summed[1]


@pytest.mark.parametrize("overwrite", ops.OVERWRITES, ids="+".join)
def test_a_backend_that_makes_no_use_of_the_memory_is_right_too(overwrite, monkeypatch):
    seam, given = case_of("residual")
    want, found = expected(seam, given, overwrite)
    results = [t.clone() for t in ops.seam(seam, **given)]
    monkeypatch.setattr(select, "run", lambda seam, operands: results)
    got = call(seam, given, overwrite)
    assert all(map(same_bits, got, want))
    for name, value in found.items():
        assert same_bits(given[name], value)


def test_a_seam_without_a_collective_overwrites_its_residual():
    seam, given = case_of("residual", reduce=None)
    want, found = expected(seam, given, ("residual",))
    x = given["x"].clone()
    got = call(seam, given, ("residual",))
    assert all(map(same_bits, got, want)) and same_bits(given["residual"], found["residual"])
    assert same_bits(given["x"], x)


@pytest.mark.parametrize("overwrite", ops.OVERWRITES, ids="+".join)
@pytest.mark.parametrize("quants", [(), (TOKEN,), (STATIC, TOKEN)], ids=lambda q: f"{len(q)}_quants")
def test_opcheck(quants, overwrite):
    seam, given = case_of("sandwich", quants=quants)
    torch.library.opcheck(ops.in_place(seam, overwrite), cases.positional(seam, given))


def test_fake_results_are_those_of_the_functional_operator():
    seam, given = case_of("residual")
    with FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, given)
        want = [(t.dtype, t.shape, t.stride()) for t in ops.seam(seam, **fake)[2:]]
        assert [(t.dtype, t.shape, t.stride()) for t in call(seam, fake, ("x", "residual"))] == want


@pytest.mark.parametrize(
    ("changes", "overwrite", "words"),
    (
        ({"reduce": None}, ("x",), "x is to be overwritten with a sum"),
        ({"outputs": ("norm",)}, ("residual",), "the seam emits"),
        ({}, ("weight",), "allowed: a list or tuple of 'x', 'residual' or both"),
        ({}, "residual", "overwrite is 'residual'; allowed: a list or tuple"),
        ({"quants": (TOKEN,) * 5}, ("x",), "returns 12 tensors beside what it overwrites; allowed: 1 to 8"),
    ),
)
def test_what_cannot_be_overwritten_is_a_value_error(changes, overwrite, words):
    seam, given = case_of("residual", **changes)
    with pytest.raises(ValueError, match=words):
        call(seam, given, overwrite)


def test_a_residual_that_the_seam_does_not_have_cannot_be_overwritten():
    seam, given = case_of("none")
    with pytest.raises(ValueError, match="the seam emits"):
        call(seam, given, ("residual",))


@pytest.mark.parametrize("overwrite", ops.OVERWRITES, ids="+".join)
def test_what_lies_in_memory_that_is_overwritten_is_a_value_error(overwrite):
    seam, given = case_of("residual")
    rows = torch.cat([given["x"].flatten(), given["residual"].flatten()])
    shape, size = given["x"].shape, given["x"].numel()
    apart = {**given, "x": rows[:size].view(shape), "residual": rows[size:].view(shape)}
    want, _ = expected(seam, given, overwrite)
    for one in ({"x": given["x"], "residual": given["x"]}, {"x": rows[:size].view(shape), "residual": rows[1:][:size]}):
        one["residual"] = one["residual"].view(shape)
        with pytest.raises(ValueError, match="x and the residual lie in the same memory"):
            call(seam, {**given, **one}, overwrite)
    assert all(same_bits(a, b) for a, b in zip(want, call(seam, apart, overwrite), strict=True))


def test_only_contiguous_memory_is_overwritten():
    seam, given = case_of("residual")
    given["residual"] = given["residual"].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match=r"residual has strides .* must be contiguous"):
        call(seam, given, ("residual",))
    call(seam, given, ("x",))


def test_an_overload_for_another_number_of_tensors_is_refused():
    seam, given = case_of("residual")
    with pytest.raises(ValueError, match=r"returns 4 tensors beside what it overwrites; this overload 2"):
        torch.ops.torchseam.seam_.x_residual_2(*cases.positional(seam, given))


def test_only_collective_may_write_the_sum_into_x(monkeypatch):
    """The others may still be sending x when the sum of a row is there."""
    seam, given = case_of("residual")
    seen: list[Operands] = []

    class Recorder:
        name = "recorder"

        def refuses(self, seam, operands):
            return None

        def run(self, seam, operands):
            seen.append(operands)
            return collective.run(seam, operands)

    want, found = expected(seam, given, ("x", "residual"))
    key = (seam.reduce.group, seam.reduce.backend, given["x"].device)
    monkeypatch.setitem(select._choices, key, select._Choice(Recorder()))
    got = call(seam, given, ("x", "residual"))
    (operands,) = seen
    assert operands.reduced_out is None and operands.residual_out is given["residual"]
    assert all(map(same_bits, got, want))
    assert all(same_bits(given[name], value) for name, value in found.items())
