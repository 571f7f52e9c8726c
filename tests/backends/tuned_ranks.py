"""Scenarios for test_tuned_ranks.py: three gloo ranks, each with a cache folder of its own, agree on tuned launches.

A module of its own, because ranks import it by name.
"""

from __future__ import annotations

import json
import logging
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from torchseam.backends.base import Group
from torchseam.backends.tuned import agreed_table
from torchseam.kernels import tuned_file
from torchseam.kernels.launch import Launch, OneShot
from torchseam.kernels.tuned import LOCAL, ONE_SHOT, Row, Shape

WORLD_SIZE = 3
MANY = 132
WHERE = (16, 8192, torch.bfloat16, "fp8_static", 1)


def row(launch: OneShot | None, world_size: int = WORLD_SIZE, us: float = 3.0) -> Row:
    return Row(Shape(ONE_SHOT, world_size, "fp8_static", "bfloat16", 8192, 16), launch, us, 4.0)


LOCAL_ROW = Row(Shape(LOCAL, 1, "fp8_static", "bfloat16", 8192, 16), Launch(16), 3.0, 4.0)


@dataclass(frozen=True)
class Scenario:
    """What each rank does with its file, the launch that every rank must then have, and rank 0's warnings about it."""

    what: str
    prepare: Callable[[int], object]
    launch: OneShot | None
    warnings: int


def write(*rows: Row) -> Path:
    return tuned_file.write(tuned_file.machine_of(0), rows)


def corrupt(rank: int) -> None:
    path = write(row(OneShot(8, 4)))
    if rank == 2:
        path.write_text("{")


def turned_off(rank: int) -> None:
    write(row(OneShot(8, 4)))
    if rank == 1:
        os.environ["TORCHSEAM_TUNED"] = "0"


def no_home(rank: int) -> None:
    write(row(OneShot(8, 4)))
    if rank == 1:
        os.environ["TORCHSEAM_CACHE"] = "~nobody-of-this-name/cache"


def broken_driver(rank: int) -> None:
    """Asked once for the table and again for the answer; the second fails on rank 1."""
    write(row(OneShot(8, 4)))
    if rank == 1:
        tuned_file.load(0)

        def broken(device: object) -> None:
            raise RuntimeError("driver gone")

        torch.cuda.get_device_properties = broken  # type: ignore[assignment]


def smaller_gpu(rank: int) -> None:
    if rank == 0:
        properties(16)
    write(row(OneShot(4, 1)))


SCENARIOS = (
    Scenario("no file anywhere", lambda rank: None, None, 0),
    Scenario("the same file", lambda rank: write(row(OneShot(8, 4))), OneShot(8, 4), 0),
    Scenario("the same launches, other times", lambda rank: write(row(OneShot(8, 4), us=2.0 + rank)), OneShot(8, 4), 0),
    Scenario("other launches on rank 1", lambda rank: write(row(OneShot(8, 4 if rank != 1 else 2))), None, 1),
    Scenario("a file on rank 0 alone", lambda rank: rank or write(row(OneShot(8, 4))), None, 1),
    Scenario("a file on ranks 1 and 2 alone", lambda rank: rank and write(row(OneShot(8, 4))), None, 1),
    Scenario("kept as shipped on rank 2", lambda rank: write(row(OneShot(8, 4) if rank != 2 else None)), None, 1),
    Scenario("a corrupt file on rank 2", corrupt, None, 1),
    Scenario("turned off on rank 1", turned_off, None, 1),
    Scenario("no HOME on rank 1", no_home, None, 1),
    Scenario("a driver that fails on rank 1", broken_driver, None, 1),
    Scenario("a GPU with fewer multiprocessors on rank 0", smaller_gpu, None, 1),
    Scenario(
        "what differs is for other world sizes and kernels",
        lambda rank: write(row(OneShot(8, 4)), row(OneShot(8, 4), world_size=4 + rank), *[LOCAL_ROW][:rank]),
        OneShot(8, 4),
        0,
    ),
)


def properties(multiprocessors: int) -> None:
    gpu = types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=multiprocessors)
    torch.cuda.get_device_properties = lambda device: gpu


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def worker(rank: int, folder: str) -> None:
    """Every scenario; one line of JSON for each in FOLDER/rank: the launch in words, and the warnings."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    heard = Warnings()
    logging.getLogger("torchseam").addHandler(heard)
    group = Group(dist.group.WORLD.group_name, rank, WORLD_SIZE, torch.device("cuda", 0))
    with Path(folder, str(rank)).open("w") as lines:
        for index, scenario in enumerate(SCENARIOS):
            os.environ["TORCHSEAM_CACHE"] = f"{folder}/cache{rank}/{index}"
            os.environ.pop("TORCHSEAM_TUNED", None)
            properties(MANY)
            tuned_file.forget()
            heard.told.clear()
            scenario.prepare(rank)
            table = agreed_table(group)
            choose = table.chooser(ONE_SHOT, WORLD_SIZE, MANY)
            launch = choose(*WHERE) if choose else None
            print(json.dumps([index, repr(launch), heard.told]), file=lines, flush=True)
    dist.barrier()
    dist.destroy_process_group()
