"""Launch choices are few, known, and enough for every row that the kernel takes."""

from __future__ import annotations

import itertools

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


@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("rows", [1, 7, 132, 133, 4096])
def test_a_two_shot_launch_has_all_three_tasks_and_a_thread_for_each_packet(rows, world_size):
    choice = launch.choose_two_shot(rows, 4096, 2, world_size, 132)
    roles = choice.roles(rows, 132)
    assert choice.num_warps * 32 == 4096 * 2 // launch.PACKET
    assert roles.pushers > 0 and roles.reducers > 0 and roles.first_gatherer < roles.programs <= 132
    assert roles.first_reducer + roles.reducers <= roles.programs


def test_a_two_shot_launch_without_gatherers_is_refused():
    with pytest.raises(ValueError, match=r"8 pushers and 8 reducers; .* the 16 programs"):
        launch.TwoShot(4, pushers=8, reducers=8).roles(100, 16)


def test_no_chosen_launch_of_a_collective_kernel_is_refused():
    for hidden, itemsize, tokens in itertools.product(range(64, launch.MAX_HIDDEN, 1016), (2, 4), (1, 16, 10**6)):
        if launch.block_of(hidden) * itemsize // launch.PACKET >= launch.WARP:
            choice = launch.choose_one_shot(tokens, hidden, itemsize, None, 132)
            launch.check_threads(choice.num_warps, hidden // choice.parts, itemsize)
            launch.check_threads(launch.choose_two_shot(tokens, hidden, itemsize, 4, 132).num_warps, hidden, itemsize)
    with pytest.raises(ValueError, match=r"32 warps have 1024 threads; 4096 elements .* 512 packets .* at most 16"):
        launch.check_threads(32, 4096, 2)
