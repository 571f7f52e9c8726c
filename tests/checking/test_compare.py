"""What `torchseam doctor --check` takes for wrong: each output spoiled in turn, and what the contract allows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from torchseam import reference
from torchseam.checking import cases as tables
from torchseam.checking.cases import Case, operands
from torchseam.checking.compare import differences, steps, storage
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

CPU = torch.device("cpu")
SIZES = (5, 129)  # of the table's numbers of rows: padding in every layout
CASES = [case for case in tables.cases(None) if case.tokens in SIZES]
EACH = pytest.mark.parametrize("case", CASES, ids=str)
OWN = pytest.mark.parametrize("own", [True, False])


def of_reference(case: Case) -> tuple[Operands, list[Tensor]]:
    given = operands(case, CPU, 0, 1)
    return given, reference.run(case.seam, given)


def found(case: Case, given: Operands, got: list[Tensor], own: bool = True) -> list[str]:
    return differences(case.seam, given, got, lambda x: x, exact_sum=own, own=own)


def flip(t: Tensor, mask: int, at: int = 0) -> None:
    """Flip bits of one element."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize]
    element = t.view(integer)[(at,) * t.dim()]
    element.copy_(element ^ mask)


@OWN
@EACH
def test_the_reference_is_right(case, own):
    assert found(case, *of_reference(case), own) == []


@OWN
@EACH
def test_each_output_spoiled_is_found(case, own):
    given, _ = of_reference(case)
    for index, output in enumerate(reference.run(case.seam, given)):
        got = reference.run(case.seam, given)
        name = case.seam.outputs[index] if index < len(case.seam.outputs) else "quantised"
        # A norm may be an ulp off, a code or a scale a step; the sum may not.
        flip(got[index], 1 if name == "residual" else 1 << (8 * output.itemsize - 2), at=-1)
        assert found(case, given, got, own), (name, index)


@OWN
@EACH
def test_padding_that_is_not_zero_is_found(case, own):
    given, got = of_reference(case)
    for scales in got[len(case.seam.outputs) :]:
        behind = storage(scales)
        filled = torch.zeros(behind.numel() // scales.itemsize, dtype=torch.bool)
        filled.as_strided(scales.shape, scales.stride()).fill_(True)
        if filled.all():
            continue
        at = int((~filled).nonzero()[0]) * scales.itemsize
        behind[at] = 1
        assert found(case, given, got, own)
        behind[at] = 0
    assert found(case, given, got, own) == []


def test_padding_of_swizzled_scales_is_found_too():
    quant = Quant("nvfp4")
    seam = Seam(Norm(1e-6), residual=True, quants=(quant,), outputs=("residual",))
    case = Case(seam, 5, 2048, torch.bfloat16, torch.bfloat16)
    given, got = of_reference(case)
    # Rows 5 to 127 are padding: row m is at byte 16 * m of the first tile.
    got[2].view(torch.uint8).view(-1)[16 * 7] = 1
    assert found(case, given, got) == ["nvfp4 scales: padding is not 0"]


@EACH
def test_another_shape_is_told(case):
    given, got = of_reference(case)
    for index in range(len(got)):
        longer = [torch.cat([t, t[:1]]) if i == index else t for i, t in enumerate(got)]
        (told,) = found(case, given, longer)
        assert ", not " in told


def test_a_norm_may_be_an_ulp_off_and_not_two():
    case = dataclasses.replace(CASES[0], tokens=3)
    given, got = of_reference(case)
    at = case.seam.outputs.index("norm")
    assert not case.seam.quants
    for moved, right in ((1, True), (2, False)):
        bits = got[at].view(torch.int16)
        changed = (bits + moved).view(got[at].dtype)
        assert (found(case, given, [*got[:at], changed, *got[at + 1 :]]) == []) == right


def test_codes_of_a_norm_that_is_no_output_may_be_a_step_off_here_and_there():  # one in a thousand
    seam = Seam(Norm(1e-6), residual=True, quants=(Quant("fp8_static"),), outputs=("residual",))
    given, got = of_reference(Case(seam, 5, 2048, torch.bfloat16, torch.bfloat16))
    codes = got[1].view(torch.uint8)
    small = (codes & 0x7F) < 0x7D  # below the largest: a step up is a number
    places = small.nonzero()[:11]

    def with_steps(count: int) -> list[Tensor]:
        changed = codes.clone()
        for row, column in places[:count].tolist():
            changed[row, column] += 1
        return [got[0], changed.view(got[1].dtype)]

    case = Case(seam, 5, 2048, torch.bfloat16, torch.bfloat16)
    assert found(case, given, with_steps(10)) == []
    assert found(case, given, with_steps(11)) == ["fp8_static codes: 11 of 10240 differ, by up to 1 steps"]


def test_a_sum_of_others_may_be_rounded_the_other_way_and_ours_not():
    seam = Seam(Norm(1e-6), Reduce("group"), residual=True, outputs=("residual", "norm"))
    case = Case(seam, 5, 2048, torch.bfloat16, torch.bfloat16)
    given = operands(case, CPU, 0, 1)
    total = given.x.float() * 3
    up = (total.bfloat16().view(torch.int16) + 1).view(torch.bfloat16)
    got = reference.run(seam, given, lambda x: up)

    def told(exact_sum: bool) -> list[str]:
        def all_reduce(x: Tensor) -> Tensor:
            return (x.float() * 3).bfloat16()

        return differences(seam, given, got, all_reduce, exact_sum=exact_sum, own=False)

    assert told(exact_sum=False) == []
    (wrong,) = told(exact_sum=True)
    assert wrong.startswith("residual: ")


def test_steps_count_numbers_between():
    a = torch.tensor([0.0, -0.0, 1.0, -1.0]).bfloat16()
    b = torch.tensor([-0.0, 2.0**-133, 1.0078125, -1.015625]).bfloat16()
    assert steps(a, b).tolist() == [0, 1, 1, 2]
