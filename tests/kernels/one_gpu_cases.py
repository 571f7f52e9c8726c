"""Calls that `one_gpu_check.py` runs with all ranks side by side on one GPU. Not a test module.

A program waits for those of other ranks, so all programs of all ranks must fit on the GPU at once: a rank's launch has
at most `programs_of_rank` of them, one a multiprocessor. Nothing may start beside them that waits for more (no early
launch of the next kernel).
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from collective_cases import Call, call_of, payloads, table
from kernel_cases import Case

from torchseam.kernels import one_shot, two_shot
from torchseam.kernels.launch import OneShot, TwoShot, choose_one_shot, choose_two_shot
from torchseam.seam import Norm, Quant, Seam

WORLD_SIZES = (2, 3, 4)
SLOT_BYTES = 2**23
#: Both kernels' launches for the short rows of the table: every program does all; tasks dealt to programs.
ONE_SHOTS = (OneShot(1, launch_pdl=False), OneShot(1, pushers=2, ahead=2, launch_pdl=False))
TWO_SHOTS = (TwoShot(1, launch_pdl=False), TwoShot(1, pushers=1, reducers=2, ahead=2, launch_pdl=False))
#: Rows as models have them.
HIDDENS = (8192, 4096, 5120)
#: Fewer than ranks, uneven, more than programs.
TOKENS = (1, 3, 2, 70)
QUANTS = (
    Quant("fp8_static"),
    Quant("fp8_token"),
    Quant("fp8_token", scale_rule="reciprocal", scale_rounding="activation"),
    Quant("fp8_group"),
    Quant("fp8_group", 64, "ue8m0", "tma_aligned"),
    Quant("fp8_group", 128, "float32", "column_major"),
    Quant("nvfp4"),
    Quant("nvfp4", scale_layout="linear"),
    Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed"),
)
#: (residual_in, residual_out) of the first seam of a chain, of those in the middle, of the last.
SHARDED = (("full", "sharded"), ("sharded", "sharded"), ("sharded", "full"))


def programs_of_rank(world_size: int, multiprocessors: int) -> int:
    """Programs of a launch, at most."""
    return multiprocessors // world_size


def calls(world_size: int, multiprocessors: int) -> list[Call]:
    """The table of short rows (each quantiser with one world size), payloads, and long rows."""
    programs = programs_of_rank(world_size, multiprocessors)
    at = world_size - WORLD_SIZES[0]
    short = table(one_shot.run, world_size, ONE_SHOTS)[(at + 1) % 3 :: 3]
    short += table(two_shot.run, world_size, TWO_SHOTS)[at::3]
    for run, launches in ((one_shot.run, ONE_SHOTS), (two_shot.run, TWO_SHOTS)):
        dealt = zip(payloads(run, world_size), itertools.cycle(launches), strict=False)
        short += [dataclasses.replace(call, launch=launch) for call, launch in dealt]
    found = short + long_rows(world_size, programs)
    return found + [sharded(call) for call in found if call.run is two_shot.run and call.seam.residual]


def long_rows(world_size: int, programs: int) -> list[Call]:
    """Every quantiser (half of them for more than two ranks), each launch that would be chosen for some T, every T that
    it takes."""
    found = []
    emitted = itertools.cycle((("residual",), ("residual", "norm"), ("residual",)))
    for index, quant in enumerate(QUANTS):
        if world_size > 2 and index % 2 != world_size % 2:
            continue
        hidden = HIDDENS[(index + world_size) % len(HIDDENS)]
        inner = Norm(1e-6, "before_cast", 1) if index % 4 == 1 else None
        seam = Seam(Norm(1e-6), None, inner, True, (quant,), next(emitted))
        case = Case(seam, None, hidden, torch.bfloat16, torch.bfloat16)
        for launch, tokens in itertools.product(launches(case, world_size, programs), TOKENS):
            if isinstance(launch, TwoShot):
                run = two_shot.run
            elif launch.parts > 1 and tokens * launch.parts > programs:
                continue
            else:
                run = one_shot.run
            reduced = index % 3 == 1
            found.append(call_of(run, case, world_size, tokens, reduced=reduced, launch=launch, seed=index))
    return found


def launches(case: Case, world_size: int, programs: int) -> list[OneShot | TwoShot]:
    """What would be chosen for some T, for a GPU of so many multiprocessors."""
    quant, itemsize = case.seam.quants[0], case.dtype.itemsize
    chosen: list[OneShot | TwoShot] = []
    for tokens in (1, 20, 10**6):
        chosen.append(choose_one_shot(tokens, case.hidden, itemsize, quant, programs))
        chosen.append(choose_two_shot(tokens, case.hidden, itemsize, world_size, programs))
    return list(dict.fromkeys(dataclasses.replace(launch, launch_pdl=False) for launch in chosen))


def kernel_of(call: Call) -> str:
    """What decides which kernel, compiled, the call launches on a rank; `residual_in` does not."""
    weight, x = call.operands.weight, call.terms[0]
    dtypes = (x.dtype, None if weight is None else weight.dtype)
    seam = dataclasses.replace(call.seam, reduce=dataclasses.replace(call.seam.reduce, residual_in="full"))
    return f"{call.run.__module__} {x.shape[1]} {dtypes} {call.launch} {seam.to_json()}"


def part(calls: list[Call], index: int, parts: int) -> list[Call]:
    """One of the parts into which the calls are split so that no kernel is in two of them."""
    kernels = {kernel: i for i, kernel in enumerate(dict.fromkeys(map(kernel_of, calls)))}
    return [call for call in calls if kernels[kernel_of(call)] % parts == index]


def sharded(call: Call) -> Call:
    """The call as the first, a middle or the last one of a chain with a sharded residual, by its T."""
    into, out = SHARDED[call.terms[0].shape[0] % len(SHARDED)]
    if "residual" not in call.seam.outputs:
        into, out = "sharded", "full"
    reduce = dataclasses.replace(call.seam.reduce, residual_in=into, residual_out=out)
    return dataclasses.replace(call, seam=dataclasses.replace(call.seam, reduce=reduce))


def reads_sharded(call: Call) -> bool:
    return call.seam.reduce.residual_in == "sharded"


def leaves_sharded(call: Call, index: int) -> bool:
    """Whether output number `index` is a residual whose rows stay with their owners."""
    is_residual = call.seam.outputs[index : index + 1] == ("residual",)
    return is_residual and call.seam.reduce.residual_out == "sharded"


def mixed(world_size: int, multiprocessors: int) -> list[Call]:
    """Calls of both kernels to be made in any order on one channel: several schemes, with several T each."""
    programs = programs_of_rank(world_size, multiprocessors)
    found = [call for call in long_rows(world_size, programs) if call.seam.inner_norm is None]
    return found + [sharded(call) for call in found[::2] if call.run is two_shot.run]
