"""Launch choices are few, known, and enough for every row that the kernel takes."""

from __future__ import annotations

import pytest

from torchseam.kernels import launch


@pytest.mark.parametrize("hidden", [1, 8, 16, 127, 128, 129, 640, 2880, 4096, 8192, 12288, 32767, 32768])
def test_a_block_holds_its_row_and_is_a_power_of_two(hidden):
    block = launch.block_of(hidden)
    assert block >= hidden and block & (block - 1) == 0


def test_every_choice_is_listed_and_every_listed_choice_is_made():
    made = {launch.choose(hidden) for hidden in range(1, launch.MAX_HIDDEN + 1)}
    assert made == set(launch.CHOICES)


def test_multiply_adds_are_not_contracted():
    assert all(choice.options()["enable_fp_fusion"] is False for choice in launch.CHOICES)
