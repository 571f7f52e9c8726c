"""The table of tuned launches as a value: which row a call gets, what is legal, what ranks compare."""

from __future__ import annotations

import itertools
import timeit

import pytest
import torch

from torchseam.kernels import tuned
from torchseam.kernels.launch import CHOICES, Launch, OneShot, block_of, choose_one_shot
from torchseam.kernels.tuned import LOCAL, ONE_SHOT, Row, Shape, Table, is_legal
from torchseam.seam import SCHEMES, Quant

MANY = 132
BF16 = torch.bfloat16


def one_shot_row(tokens: int, launch: OneShot | None, hidden: int = 8192, world_size: int = 2, us: float = 3.0) -> Row:
    return Row(Shape(ONE_SHOT, world_size, "fp8_static", "bfloat16", hidden, tokens), launch, us, 4.0)


TABLE = Table(
    (
        one_shot_row(4, OneShot(8, 4)),
        one_shot_row(16, OneShot(16, 2)),
        one_shot_row(64, None),
        one_shot_row(256, OneShot(32, pushers=4, ahead=2)),
        one_shot_row(4, OneShot(2, 2), hidden=4096),
        one_shot_row(4, OneShot(4, 8), world_size=4),
    )
)


@pytest.mark.parametrize(
    ("tokens", "launch"),
    [
        (1, OneShot(8, 4)),  # a quarter of 4
        (4, OneShot(8, 4)),
        (5, OneShot(16, 2)),
        (16, OneShot(16, 2)),
        (17, None),  # the row of 64 keeps the shipped choice
        (64, None),
        (65, OneShot(32, pushers=4, ahead=2)),
        (256, OneShot(32, pushers=4, ahead=2)),
        (257, None),  # beyond the table
    ],
)
def test_a_call_gets_the_row_with_the_least_t_at_or_above_its_own(tokens, launch):
    assert TABLE.chooser(ONE_SHOT, 2, MANY)(tokens, 8192, BF16, "fp8_static", 1) == launch


def test_a_row_does_not_reach_far_below_its_t():
    choose = Table((one_shot_row(256, OneShot(32)),)).chooser(ONE_SHOT, 2, MANY)
    assert choose(64, 8192, BF16, "fp8_static", 1) == OneShot(32)
    assert choose(63, 8192, BF16, "fp8_static", 1) is None


@pytest.mark.parametrize(
    ("hidden", "dtype", "scheme"),
    [(4096 + 8, BF16, "fp8_static"), (8192, torch.float16, "fp8_static"), (8192, BF16, "fp8_token")],
)
def test_what_was_not_timed_is_as_shipped(hidden, dtype, scheme):
    assert TABLE.chooser(ONE_SHOT, 2, MANY)(4, hidden, dtype, scheme, 1) is None


def test_kernels_and_world_sizes_are_kept_apart():
    assert TABLE.chooser(ONE_SHOT, 4, MANY)(4, 8192, BF16, "fp8_static", 1) == OneShot(4, 8)
    assert TABLE.chooser(ONE_SHOT, 3, MANY) is None and TABLE.chooser(LOCAL, 1, MANY) is None


def test_a_choice_that_would_cut_a_group_is_not_taken():
    shape = Shape(ONE_SHOT, 2, "fp8_group", "bfloat16", 8256, 4)
    choose = Table((Row(shape, OneShot(1, 3), 1.0, 2.0),)).chooser(ONE_SHOT, 2, MANY)
    assert choose(4, 8256, BF16, "fp8_group", 64) == OneShot(1, 3)
    assert choose(4, 8256, BF16, "fp8_group", 128) is None


def test_a_choice_is_not_taken_on_a_gpu_too_small_for_it():
    assert TABLE.chooser(ONE_SHOT, 2, 16)(4, 8192, BF16, "fp8_static", 1) == OneShot(8, 4)
    assert TABLE.chooser(ONE_SHOT, 2, 15)(4, 8192, BF16, "fp8_static", 1) is None


@pytest.mark.parametrize(
    ("launch", "tokens", "hidden"),
    [
        (OneShot(32), 1, 4096),  # 1024 threads, 512 packets: two threads would push the same one
        (OneShot(8, 8), 1, 8192),
        (OneShot(1, 16), 1, 2048),  # 16 packets for the 32 threads of a warp
        (OneShot(3), 1, 8192),
        (OneShot(64), 1, 32768),
        (OneShot(0), 1, 8192),
        (OneShot(4, 8), 17, 8192),  # 136 programs that wait for each other on 132 multiprocessors
        (OneShot(4, 0), 1, 8192),
        (OneShot(4, 3), 1, 8192),  # not in three
        (OneShot(16, 2, pushers=8), 1, 8192),
        (OneShot(32, pushers=MANY), 200, 8192),  # nobody left to reduce
        (OneShot(32, pushers=-1), 200, 8192),
        (OneShot(32, pushers=8, ahead=0), 200, 8192),
        (OneShot(32, pushers=8, ahead=33), 200, 8192),  # 33 rows in registers
        (Launch(64), 1, 8192),
        (Launch(5), 1, 8192),
    ],
)
def test_what_would_hang_or_push_twice_is_not_legal(launch, tokens, hidden):
    assert not is_legal(launch, tokens, hidden, 2, 1, MANY)


@pytest.mark.parametrize(("hidden", "parts", "legal"), [(2048, 16, True), (4096, 32, False), (1024, 8, True)])
def test_no_part_is_without_a_lane_in_the_exchange(hidden, parts, legal):
    """128 elements of fp32 are 32 packets, a warp's; 16 lanes look at what the parts exchange."""
    assert is_legal(OneShot(1, parts), 1, hidden, 4, 1, MANY) == legal


def test_legal_parts_all_have_a_lane():
    choices = itertools.product((2, 4), (1024, 5120, 8192, 32768), (2, 3, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32))
    for itemsize, hidden, parts, warps in choices:
        if is_legal(OneShot(warps, parts), 1, hidden, itemsize, 1, MANY):
            assert parts <= block_of(hidden // parts) // 8, (itemsize, hidden, parts, warps)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_shipped_choice_is_legal(scheme):
    quant = Quant(scheme)
    for hidden in (512, 640, 1024, 2880, 4096, 5120, 7168, 8192, 16384, 32768):
        if hidden % quant.multiple_of:
            continue
        for itemsize in (2, 4):
            for tokens in (1, 16, 17, MANY, MANY + 1, 4096):
                choice = choose_one_shot(tokens, hidden, itemsize, quant, MANY)
                assert is_legal(choice, tokens, hidden, itemsize, quant.multiple_of, MANY), (hidden, tokens, choice)
    assert all(is_legal(choice, 1, 8192, 2, 1, MANY) for choice in CHOICES)


def test_digests_are_equal_where_the_launches_are():
    digest = TABLE.digest(ONE_SHOT, 2)
    slower = Table(tuple(Row(r.shape, r.launch, 9.0, 10.0) for r in TABLE.rows))
    assert slower.digest(ONE_SHOT, 2) == digest != TABLE.digest(ONE_SHOT, 4)
    assert TABLE.with_rows([one_shot_row(4, OneShot(4, 4))]).digest(ONE_SHOT, 2) != digest
    assert TABLE.with_rows([one_shot_row(32, None)]).digest(ONE_SHOT, 2) != digest, "T = 17 no longer gets 64's"
    assert TABLE.with_rows([one_shot_row(32, OneShot(8), world_size=8)]).digest(ONE_SHOT, 2) == digest
    assert Table((one_shot_row(4, None),)).digest(ONE_SHOT, 2) == Table().digest(ONE_SHOT, 2) == ""


def test_a_new_row_takes_the_place_of_the_old_one():
    table = TABLE.with_rows([one_shot_row(4, None, us=2.5)])
    assert len(table.rows) == len(TABLE.rows)
    assert [r.launch for r in table.rows if r.shape == one_shot_row(4, None).shape] == [None]


def test_a_look_up_takes_less_than_a_microsecond():
    choose = TABLE.chooser(ONE_SHOT, 2, MANY)
    call = lambda: choose(4, 8192, BF16, "fp8_static", 1)  # noqa: E731
    best = min(timeit.repeat(call, number=10_000, repeat=20)) / 10_000
    assert best < 1e-6, f"{best * 1e6:.2f} us"


def test_every_dtype_has_its_own_name():
    assert all(str(dtype) == f"torch.{name}" for name, dtype in tuned.DTYPES.items())
