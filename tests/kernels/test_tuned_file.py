"""The file of tuned launches: what is written is read, and what cannot be read costs one warning and nothing else."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from torchseam.kernels import launch, tuned_file
from torchseam.kernels.launch import Launch, OneShot
from torchseam.kernels.tuned import LOCAL, ONE_SHOT, Row, Shape, Table
from torchseam.kernels.tuned_file import Machine

pytest.importorskip("triton")

ROWS = (
    Row(Shape(LOCAL, 1, "fp8_token", "bfloat16", 4096, 16), Launch(16), 3.0, 4.0),
    Row(Shape(LOCAL, 1, "fp8_token", "bfloat16", 4096, 64), None, 3.5, 3.5),
    Row(Shape(ONE_SHOT, 2, "nvfp4", "float16", 8192, 1024), OneShot(32, pushers=12, ahead=8), 50.0, 60.0),
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    """A cache of this test's own, and GPUs that look like an H200."""
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHSEAM_TUNED", raising=False)
    h200 = types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    tuned_file.forget()
    yield tmp_path
    tuned_file.forget()


def here() -> Machine:
    return tuned_file.machine_of(0)


def written(change=lambda content: None) -> Path:
    """This machine's file, changed."""
    path = tuned_file.write(here(), ROWS)
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))
    return path


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_what_is_written_is_read(cache, caplog):
    path = tuned_file.write(here(), ROWS)
    assert path.parent == cache / "tuned" and path.name.startswith("NVIDIA-H200-")
    assert tuned_file.read(path) == (here(), Table(ROWS))
    assert tuned_file.load(0) == Table(ROWS)
    assert not caplog.records


def test_calls_get_what_was_found_and_else_what_is_shipped(caplog):
    tuned_file.write(here(), ROWS)
    bf16 = torch.bfloat16
    assert tuned_file.local_launch(0, 16, 4096, bf16, "fp8_token") == Launch(16)
    shipped = launch.choose(4096)
    assert shipped != Launch(16)
    for tokens, scheme in ((17, "fp8_token"), (16, "nvfp4"), (16, None)):
        assert tuned_file.local_launch(0, tokens, 4096, bf16, scheme) == shipped
    assert tuned_file.local_launch(-1, 16, 4096, bf16, "fp8_token") == shipped, "a CPU is not tuned"


def test_a_machine_without_a_file_has_no_table_and_no_warning(cache, caplog):
    assert tuned_file.load(0) == Table()
    tuned_file.write(Machine("another", 80, "2", "3", "k"), ROWS[:1])
    tuned_file.forget()
    assert tuned_file.load(0) == Table()
    assert not caplog.records


@pytest.mark.parametrize("part", ["gpu", "multiprocessors", "torch", "triton", "kernels"])
def test_another_gpu_or_version_has_a_file_of_its_own(part, caplog):
    import dataclasses

    value: Any = 78 if part == "multiprocessors" else "another"
    other = dataclasses.replace(here(), **{part: value})
    assert tuned_file.path_of(other) != tuned_file.path_of(here())
    tuned_file.write(other, ROWS[:1])
    assert tuned_file.load(0) == Table()


def test_a_file_under_another_machine_s_name_is_foreign(caplog):
    other = tuned_file.write(Machine("NVIDIA B200", 148, "2", "3", "k"), ROWS)
    os.replace(other, tuned_file.path_of(here()))
    assert tuned_file.load(0) == Table()
    assert "made for" in warnings(caplog)[0] and "B200" in warnings(caplog)[0]


def test_changed_kernels_need_a_new_table(monkeypatch, tmp_path):
    before = tuned_file.kernels_digest()
    sources = tmp_path / "kernels"
    sources.mkdir()
    for source in Path(tuned_file.__file__).parent.glob("*.py"):
        (sources / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(tuned_file, "__file__", str(sources / "tuned_file.py"))
    digests = []
    for change in ("", "# another launch table"):
        with (sources / "launch.py").open("a") as file:
            file.write(change)
        tuned_file.kernels_digest.cache_clear()
        digests.append(tuned_file.kernels_digest())
    tuned_file.kernels_digest.cache_clear()
    assert digests[0] == before != digests[1]


def _set(*path_and_value):
    """A change of a file's content: the value at a path of keys."""
    *path, last, value = path_and_value

    def change(content: Any) -> None:
        for key in path:
            content = content[key]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_set("schema", 2), "schema is 2"),
        (_set("schema", None), "schema is None"),
        (lambda content: [content], "schema is None"),
        (lambda content: content.pop("rows") and None, "KeyError: 'rows'"),
        (_set("rows", 7), "TypeError"),
        (_set("rows", [7]), "TypeError"),
        (_set("machine", {"gpu": "x"}), "TypeError"),
        (_set("rows", 0, "tokens", 0), "positive integers"),
        (_set("rows", 0, "hidden", 4096.5), "positive integers"),
        (_set("rows", 0, "world_size", True), "positive integers"),
        (_set("rows", 0, "scheme", "int3"), "'int3'"),
        (_set("rows", 0, "scheme", ["nvfp4"]), "not known"),
        (_set("rows", 0, "dtype", "int8"), "'int8'"),
        (_set("rows", 0, "kernel", "two_shot_and_a_half"), "not known"),
        (_set("rows", 0, "microseconds", "fast"), "ValueError"),
        (_set("rows", 0, "microseconds", None), "TypeError"),
        (_set("rows", 0, "microseconds", int("9" * 400)), "OverflowError"),
        (_set("rows", 0, "launch", {"num_warps": 8, "turbo": True}), "turbo"),
        (_set("rows", 0, "launch", {"num_warps": "8"}), "num_warps of a launch is '8'"),
        (_set("rows", 0, "launch", {"num_warps": 7}), "cannot be launched"),
        (_set("rows", 2, "launch", "launch_pdl", 1), "launch_pdl of a launch is 1"),
        (_set("rows", 2, "launch", "parts", 16), "cannot be launched"),
        (_set("rows", 2, "launch", "pushers", 132), "cannot be launched"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_ignored_with_one_warning(change, why, caplog):
    path = written(change)
    for _ in range(3):
        assert tuned_file.load(0) == Table()
        assert tuned_file.local_launch(0, 16, 4096, torch.bfloat16, "fp8_token") == launch.choose(4096)
    assert len(warnings(caplog)) == 1
    assert str(path) in warnings(caplog)[0] and why in warnings(caplog)[0]
    assert "torchseam tune" in warnings(caplog)[0]
    with pytest.raises(tuned_file.Unreadable, match=re.escape(why)):
        tuned_file.read(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"null"])
def test_bytes_that_are_no_table_are_ignored_with_one_warning(content, caplog):
    written().write_bytes(content)
    assert tuned_file.load(0) == tuned_file.load(1) == Table()
    assert len(set(warnings(caplog))) == 1
    with pytest.raises(tuned_file.Unreadable):
        tuned_file.read(tuned_file.path_of(here()))


def test_a_file_that_cannot_be_opened_is_ignored(caplog):
    path = written()
    path.unlink()
    path.mkdir()
    assert tuned_file.load(0) == Table()
    assert "IsADirectoryError" in warnings(caplog)[0]


def test_a_gpu_that_cannot_be_asked_is_no_reason_to_fail(monkeypatch, caplog):
    written()

    def broken(device: int) -> None:
        raise RuntimeError("driver gone")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert tuned_file.load(0) == Table()
    assert "driver gone" in warnings(caplog)[0]


@pytest.fixture(params=["HOME may not be looked into", "no HOME and no such user", "the variable names nobody"])
def no_folder(request, monkeypatch):
    """What a process meets in a container that runs as a number, or as another user."""
    monkeypatch.delenv("TORCHSEAM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if request.param == "HOME may not be looked into":

        def denied(self: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "is_dir", denied)
    elif request.param == "no HOME and no such user":

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", homeless)
    else:
        monkeypatch.setenv("TORCHSEAM_CACHE", "~nobody-of-this-name/cache")


def test_without_a_folder_that_can_be_looked_at_calls_are_as_shipped_and_nobody_is_warned(no_folder, caplog):
    caplog.set_level("INFO", logger="torchseam")
    for _ in range(3):
        assert tuned_file.local_launch(0, 16, 4096, torch.bfloat16, "fp8_token") == launch.choose(4096)
    assert not warnings(caplog) and "cannot be looked at" in caplog.text


def test_a_folder_that_cannot_be_told_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setenv("TORCHSEAM_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(ValueError, match=r"no folder for the cache.*set TORCHSEAM_CACHE to one"):
        tuned_file.write(here(), ROWS)


def test_the_environment_can_turn_the_table_off(monkeypatch):
    written()
    monkeypatch.setenv("TORCHSEAM_TUNED", "0")
    assert tuned_file.load(0) == Table()
    tuned_file.forget()
    monkeypatch.setenv("TORCHSEAM_TUNED", "1")
    assert tuned_file.load(0) == Table(ROWS)


@pytest.mark.parametrize(
    ("value", "used"),
    [
        *[(value, False) for value in ("0", " 0 ", "false", "False", "NO", "off")],
        *[(value, True) for value in ("", " ", "1", "true", "Yes", "ON")],
    ],
)
def test_on_and_off_can_be_said_in_several_words(monkeypatch, value, used, caplog):
    monkeypatch.setenv("TORCHSEAM_TUNED", value)
    tuned_file.check_setting()
    assert tuned_file.in_use() == used
    assert not caplog.records


def test_an_unknown_word_counts_as_on_and_is_told_once(monkeypatch, caplog):
    written()
    monkeypatch.setenv("TORCHSEAM_TUNED", "maybe")
    for device in (0, 1):
        assert tuned_file.load(device) == Table(ROWS)
        assert tuned_file.local_launch(device, 16, 4096, torch.bfloat16, "fp8_token") == Launch(16)
    (told,) = warnings(caplog)
    assert "TORCHSEAM_TUNED is 'maybe'; allowed: 1, true, yes, on" in told and told.endswith("it counts as on")
    with pytest.raises(ValueError, match=r"'maybe'; allowed: 1.*or 0, false, no, off"):
        tuned_file.check_setting()


def test_a_process_keeps_the_table_that_it_read_first():
    tuned_file.write(here(), ROWS[:1])
    assert tuned_file.load(0) == Table(ROWS[:1])
    tuned_file.write(here(), ROWS)
    assert tuned_file.load(0) == Table(ROWS[:1])
    tuned_file.forget()
    assert tuned_file.load(0) == Table(ROWS)


def test_rows_are_added_to_the_file_and_replaced_in_it():
    tuned_file.write(here(), ROWS[:2])
    again = Row(ROWS[0].shape, Launch(32), 2.0, 4.0)
    path = tuned_file.write(here(), [again, ROWS[2]])
    assert tuned_file.read(path)[1] == Table((again, *ROWS[1:]))


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_a_file_has_the_permissions_of_any_other(umask):
    before = os.umask(umask)
    try:
        path = tuned_file.write(here(), ROWS)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def write_many(first: int) -> None:
    for tokens in range(first, first + 10):
        tuned_file.write(
            Machine("another", 132, "2", "3", "k"),
            [Row(Shape(LOCAL, 1, "fp8_token", "bfloat16", 4096, tokens), Launch(4), 1.0, 2.0)],
        )


def test_processes_that_write_at_the_same_time_lose_no_rows():
    """`torchseam tune` on each GPU of a machine at once."""
    writers = [multiprocessing.get_context("fork").Process(target=write_many, args=(10 * i + 1,)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    rows = tuned_file.read_for(Machine("another", 132, "2", "3", "k")).rows
    assert [row.shape.tokens for row in rows] == list(range(1, 31))


@pytest.mark.parametrize(
    ("change", "why"),
    [(_set("rows", 0, "launch", {"num_warps": 7}), "cannot be launched"), (_set("schema", 2), "schema")],
)
def test_a_file_with_a_bad_row_is_kept_aside_and_said(change, why, caplog):
    path = written(change)
    before = path.read_bytes()
    tuned_file.write(here(), ROWS[:1])
    assert tuned_file.read(path)[1] == Table(ROWS[:1])
    aside = path.with_name(path.name + ".bad")
    assert aside.read_bytes() == before
    (told,) = warnings(caplog)
    assert str(aside) in told and why in told
    assert tuned_file.files() == [path]
    assert tuned_file.clear() == [path, aside] and not aside.exists()


def test_a_file_that_may_not_be_read_is_not_written_over(monkeypatch):
    path = tuned_file.write(here(), ROWS)
    before = path.read_bytes()

    def denied(self: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", denied)
        for change in (lambda: tuned_file.write(here(), ROWS[:1]), lambda: tuned_file.make_ready(here())):
            with pytest.raises(ValueError, match=r"cannot be read \(.*its rows would be lost; make it readable"):
                change()
    assert path.read_bytes() == before


def test_make_ready_leaves_the_file_and_nothing_else(cache):
    path = tuned_file.make_ready(here())
    assert path == tuned_file.path_of(here()) and not path.exists()
    assert list(path.parent.iterdir()) == [path.with_suffix(".lock")]
    tuned_file.write(here(), ROWS)
    before = path.read_bytes()
    tuned_file.make_ready(here())
    assert path.read_bytes() == before


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(monkeypatch):
    path = tuned_file.write(here(), ROWS[:1])

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"cannot be written \(no space left.*TORCHSEAM_CACHE"):
        tuned_file.write(here(), ROWS)
    assert tuned_file.read(path)[1] == Table(ROWS[:1])
    assert sorted(path.parent.iterdir()) == [path, path.with_suffix(".lock")]


def test_a_folder_that_cannot_be_made_is_said(cache, monkeypatch):
    (cache / "file").touch()
    monkeypatch.setenv("TORCHSEAM_CACHE", str(cache / "file"))
    for change in (lambda: tuned_file.write(here(), ROWS), lambda: tuned_file.make_ready(here())):
        with pytest.raises(ValueError, match="cannot be written"):
            change()


def test_clear_removes_every_file(cache):
    assert tuned_file.clear() == []
    paths = [tuned_file.write(here(), ROWS), tuned_file.write(Machine("another", 132, "2", "3", "k"), ROWS)]
    assert sorted(tuned_file.clear()) == sorted(paths)
    assert tuned_file.files() == []
