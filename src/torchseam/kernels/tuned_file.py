"""The file that keeps the tuned launches of a machine (tuned.py): where it is, what it must hold, who reads it.

One file a machine, GPU, torch, Triton and version of the kernels, in `cache_dir()/tuned`. A process reads it once.
What cannot be read counts as no table, with one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchseam.config import CACHE_VARIABLE, TUNED_VARIABLE, cache_dir
from torchseam.kernels.launch import Launch, OneShot, choose
from torchseam.kernels.tuned import DTYPES, LOCAL, ONE_SHOT, Choice, Chooser, Row, Shape, Table, is_legal
from torchseam.seam import SCHEMES

_log = logging.getLogger(__name__)

#: Goes up when what is in a file changes; files of another number are not read.
SCHEMA = 1
_LAUNCHES: dict[str, type[Launch] | type[OneShot]] = {LOCAL: Launch, ONE_SHOT: OneShot}
#: How the name of a file ends that held no table when it was to be written.
_ASIDE = ".json.bad"
#: Of the device that tensors on the CPU have.
_NO_DEVICE = -1


class Unreadable(ValueError):
    """A file that holds no table for whom it is asked, and why."""


@dataclass(frozen=True)
class Machine:
    """What a table is valid for. kernels: `kernels_digest()`."""

    gpu: str
    multiprocessors: int
    torch: str
    triton: str
    kernels: str


def machine_of(device: int) -> Machine:
    """That of a CUDA device."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return Machine(
        properties.name, properties.multi_processor_count, torch.__version__, triton.__version__, kernels_digest()
    )


@functools.cache
def kernels_digest() -> str:
    """Of the sources of the kernels and of the shipped launch choices: all of this folder."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def folder() -> Path:
    """Where the files are. Raises ValueError where that cannot be told: no variable, no HOME, no such user."""
    try:
        return cache_dir() / "tuned"
    except RuntimeError as error:  # of pathlib, which found no home
        raise ValueError(f"there is no cache folder ({error}); name one in {CACHE_VARIABLE}") from error


def path_of(machine: Machine) -> Path:
    """The file of a machine."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", machine.gpu).strip("-")[:50]
    digest = hashlib.sha256(json.dumps(asdict(machine), sort_keys=True).encode()).hexdigest()[:12]
    return folder() / f"{name}-{digest}.json"


def files() -> list[Path]:
    """Every file in the folder, of this machine and of others."""
    return sorted(folder().glob("*.json"))


def clear() -> list[Path]:
    """Remove every file, and those that were put aside, and return which there were.

    Raises ValueError where one cannot be removed.
    """
    removed = [*files(), *sorted(folder().glob(f"*{_ASIDE}"))]
    for path in removed:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"{path} cannot be removed: {error}") from error
    return removed


#: What TORCHSEAM_TUNED may be, in any case; unset is on.
_OFF, _ON = ("0", "false", "no", "off"), ("1", "true", "yes", "on")


def in_use() -> bool:
    """Whether tables are looked at: not with TORCHSEAM_TUNED=0. Never raises, because calls of kernels ask: what
    `check_setting` would not take counts as on, with one warning."""
    value = os.environ.get(TUNED_VARIABLE, "")
    try:
        check_setting()
    except ValueError as error:
        _warn_once(f"{error}; it counts as on")
    return value.strip().lower() not in _OFF


def check_setting() -> None:
    """ValueError for a TORCHSEAM_TUNED that says neither on nor off."""
    value = os.environ.get(TUNED_VARIABLE, "")
    if value.strip() and value.strip().lower() not in (*_OFF, *_ON):
        raise ValueError(
            f"{TUNED_VARIABLE} is {value!r}; allowed: {', '.join(_ON)} (tuned launches are used, as when it is not "
            f"set) or {', '.join(_OFF)} (launches are as shipped)"
        )


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def read(path: Path) -> tuple[Machine, Table]:
    """What a file holds. Raises `Unreadable` with the reason, or OSError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not JSON ({error})") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise Unreadable(f"its schema is {schema!r}; this version reads {SCHEMA}")
    try:
        machine = Machine(**content["machine"])
        rows = tuple(_row(row, machine) for row in content["rows"])
    except Unreadable:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # of a number that is no float
        raise Unreadable(f"what is in it is not as it should be ({type(error).__name__}: {error})") from error
    return machine, Table().with_rows(rows)


def _row(content: dict[str, Any], machine: Machine) -> Row:
    shape = Shape(**{field.name: content[field.name] for field in dataclasses.fields(Shape)})
    numbers = (shape.world_size, shape.hidden, shape.tokens)
    if any(type(number) is not int or number < 1 for number in numbers):
        raise Unreadable(f"world_size, hidden and tokens are {numbers}; they must be positive integers")
    if shape.kernel not in _LAUNCHES or shape.scheme not in SCHEMES or shape.dtype not in DTYPES:
        raise Unreadable(f"it has a row for {shape.kernel!r}, {shape.scheme!r}, {shape.dtype!r}, which are not known")
    times = float(content["microseconds"]), float(content["shipped_microseconds"])
    given = content["launch"]
    launch: Choice | None = None
    if given is not None:
        launch = _LAUNCHES[shape.kernel](**given)
        for field in dataclasses.fields(launch):
            if type(getattr(launch, field.name)) is not (bool if field.name == "launch_pdl" else int):
                raise Unreadable(f"{field.name} of a launch is {getattr(launch, field.name)!r}")
        if not is_legal(
            launch, shape.tokens, shape.hidden, shape.itemsize, shape.quant.multiple_of, machine.multiprocessors
        ):
            raise Unreadable(f"{launch} cannot be launched for {shape}")
    return Row(shape, launch, *times)


def read_for(machine: Machine) -> Table:
    """The table of a machine, without rows where it has no file. Raises `Unreadable` or OSError."""
    try:
        owner, table = read(path_of(machine))
    except FileNotFoundError:
        return Table()
    if owner != machine:
        raise Unreadable(f"it was made for {owner}")
    return table


def make_ready(machine: Machine) -> Path:
    """Whether `write` will be able to: to be asked before hours of timing. Returns the file.

    Raises ValueError where the folder cannot be written, or a file that is there cannot be read and would be lost. A
    file that holds no table is put aside.
    """
    path = path_of(machine)
    with _writing(path):
        _rows_before(machine, path)
        _draft(path, "").unlink()
    return path


def write(machine: Machine, rows: Iterable[Row]) -> Path:
    """Add rows to a machine's file, or replace those of the same shapes; at once, so that nobody reads half of it,
    and one process after the other, so that no rows are lost.

    Raises ValueError as `make_ready`.
    """
    path = path_of(machine)
    with _writing(path):
        content = {
            "schema": SCHEMA,
            "machine": asdict(machine),
            "rows": [
                {
                    **asdict(row.shape),
                    "launch": None if row.launch is None else asdict(row.launch),
                    "microseconds": row.microseconds,
                    "shipped_microseconds": row.shipped_microseconds,
                }
                for row in _rows_before(machine, path).with_rows(rows).rows
            ],
        }
        draft = _draft(path, json.dumps(content, indent=1))
        try:
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    return path


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Alone, among the processes that write this file; OSError as the ValueError that says what to do."""
    import fcntl  # not on Windows, where nothing is tuned

    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _open_lock(path.with_suffix(".lock"))
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                _log.debug("%s cannot be locked (%s): written without", path, error)
            yield
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error}); name another folder in {CACHE_VARIABLE}") from error


def _open_lock(path: Path) -> int:
    """The file stays when it is given back: another process may already wait for it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's: enough to lock it, but on NFS
        return os.open(path, os.O_RDONLY)


def _draft(path: Path, text: str) -> Path:
    """A new file beside `path`, with the permissions that the umask leaves, as any file has (tempfile's are 0600)."""
    draft = path.parent / f".{uuid.uuid4().hex}.draft"
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _rows_before(machine: Machine, path: Path) -> Table:
    """What is kept of the file that is there. One that holds no table is renamed: somebody may want its rows."""
    try:
        return read_for(machine)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error}), and its rows would be lost; make it readable, remove it, or name "
            f"another folder in {CACHE_VARIABLE}"
        ) from error
    except Unreadable as error:
        aside = path.with_suffix(_ASIDE)
        os.replace(path, aside)
        _log.warning("%s: %s; none of its rows are used, it is kept as %s", path, error, aside)
        return Table()


# ---- what runs ask ----------------------------------------------------------------------------


@functools.cache
def load(device: int) -> Table:
    """The table that this process uses on a CUDA device: read once, whatever the file becomes."""
    if device == _NO_DEVICE or not in_use():
        return Table()
    try:
        path = folder()
        if not path.is_dir():
            return Table()
    except Exception as error:  # no HOME, or one that may not be looked into: nobody asked for tuned launches
        _log.info("launches are as shipped: the cache cannot be looked at (%s: %s)", type(error).__name__, error)
        return Table()
    try:
        machine = machine_of(device)
        path = path_of(machine)
        return read_for(machine)
    except Exception as error:  # launches as shipped are right everywhere: no reason to fail
        why = str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
        _log.warning("%s is ignored: %s; launches are as shipped until `torchseam tune` writes it anew", path, why)
        return Table()


@functools.cache
def _local_chooser(device: int) -> Chooser | None:
    table = load(device)
    return (
        table.chooser(LOCAL, 1, torch.cuda.get_device_properties(device).multi_processor_count) if table.rows else None
    )


@functools.lru_cache(maxsize=4096)
def local_launch(device: int, tokens: int, hidden: int, dtype: torch.dtype, scheme: str | None) -> Launch:
    """The launch of the local kernel for T rows of H elements on a device: tuned, else `launch.choose`.

    `scheme` None: no quantiser, never tuned. `device` -1: not a GPU.
    """
    chooser = _local_chooser(device)
    found = chooser(tokens, hidden, dtype, scheme, 1) if chooser and scheme else None
    return found if isinstance(found, Launch) else choose(hidden)


def forget() -> None:
    """Read the file again when it is next asked for."""
    for remembered in (load, _local_chooser, local_launch, _warn_once):
        remembered.cache_clear()
