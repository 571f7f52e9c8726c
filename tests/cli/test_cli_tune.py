"""`torchseam tune`: what it says, shows, writes and removes. With real kernels: kernels/test_kernel_tuning.py."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from torchseam.cli import app, doctor, preflight, tune
from torchseam.kernels import tuned_file
from torchseam.kernels.launch import Launch, OneShot
from torchseam.kernels.tuned import LOCAL, ONE_SHOT, Choice, Row, Shape
from torchseam.tuning.candidates import candidates
from torchseam.tuning.search import search

pytest.importorskip("triton")

MANY = 132
ROWS = (
    Row(Shape(LOCAL, 1, "fp8_token", "bfloat16", 4096, 16), Launch(16), 3.0, 4.0),
    Row(Shape(ONE_SHOT, 2, "nvfp4", "bfloat16", 8192, 1024), OneShot(32, pushers=12, ahead=8), 50.0, 60.0),
    Row(Shape(ONE_SHOT, 2, "nvfp4", "bfloat16", 8192, 8), None, 4.5, 4.5),
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of this test's own; a wide terminal; GPUs, where there are some, look like an H200."""
    monkeypatch.setenv("TORCHSEAM_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHSEAM_TUNED", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    h200 = types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=MANY, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: h200.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(preflight, "c_compiler", lambda: "/usr/bin/cc")
    tuned_file.forget()
    yield tmp_path
    tuned_file.forget()


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 and an L4."""
    gpus(monkeypatch, 2)
    kinds = [
        types.SimpleNamespace(name=f"NVIDIA {n}", multi_processor_count=m) for n, m in (("H200", MANY), ("L4", 58))
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", kinds.__getitem__)


def run(*options: object, code: int = 0) -> str:
    """What the command prints: with exit code 0 to standard output, else to standard error."""
    result = CliRunner().invoke(app.app, ["tune", *map(str, options)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    if code:
        assert result.stdout == ""
    return result.stderr if code else result.stdout


# -- What cannot be ----------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_what_is_needed(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    gpus(monkeypatch, 0)
    for options in ((), ("--ranks", 2)):
        told = run(*options, code=2)
        assert "needs" in told or "on a CUDA GPU" in told
        assert "torch finds none on this machine" in told and "a CUDA build of torch" in told
        assert "--show and --clear need no GPU" in told
    assert list(cache.iterdir()) == []


def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    assert "--ranks 4 needs 4 GPUs, torch finds 2 on this machine; use --ranks 2" in run("--ranks", 4, code=2)


def test_without_a_c_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    monkeypatch.setattr(preflight, "c_compiler", lambda: None)
    assert "apt-get install gcc" in run(code=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", 0), "--ranks is 0; it may be 1 (the local kernel) to 8"),
        (("--ranks", 9), "--ranks is 9; it may be"),
        (("--hidden", "4096,big"), "--hidden is '4096,big'; give positive whole numbers"),
        (("--hidden", "0"), "--hidden is '0'"),
        (("--hidden", "65536"), "at most 32768"),
        (("--hidden", "4100"), "--hidden is 4100; fp8_static needs a multiple of 8"),
        (("--hidden", "4104", "--scheme", "group"), "--hidden is 4104; fp8_group needs a multiple of 128"),
        (("--hidden", "4104", "--scheme", "nvfp4"), "--hidden is 4104; nvfp4 needs a multiple of 16"),
        (("--tokens", "1,,2"), "--tokens is '1,,2'"),
        (("--tokens", "-1"), "--tokens is '-1'"),
        (("--scheme", "static,int3"), "--scheme has 'int3'; allowed, with commas between them: fp8_static"),
        (("--dtype", "int8"), "--dtype is 'int8'; allowed: bf16, fp16, fp32 (or bfloat16, float16, float32)"),
        (("--show", "--clear"), "cannot go together"),
        (("--show", "--hidden", "abc"), "--hidden say what to time, and --show times nothing"),
        (("--clear", "--scheme", "token", "--ranks", 2), "--scheme and --ranks say what to time, and --clear times"),
    ],
)
def test_a_bad_option_is_answered_with_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], message: str
) -> None:
    gpus(monkeypatch, 8)
    assert message in " ".join(run(*options, code=2).split())


def test_schemes_may_leave_their_fp8_out() -> None:
    settings = tune.settings_of("8192,4096", "static, fp8_token,nvfp4", None, "fp16")
    assert settings == tune.Settings((4096, 8192), ("fp8_static", "fp8_token", "nvfp4"), None, "float16")


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bf16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp16", "float16"),
        ("float16", "float16"),
        ("float32", "float32"),
    ],
)
def test_a_dtype_has_two_names(given: str, dtype: str) -> None:
    assert tune.settings_of("4096", "static", None, given).dtype == dtype


def test_ranks_on_gpus_that_differ_are_refused_before_any_is_started(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """They would try other launches, and wait for each other."""
    two_kinds(monkeypatch)
    monkeypatch.setattr(tune, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    told = " ".join(run("--ranks", 2, code=2).split())
    assert "GPU 0 NVIDIA H200 (132 multiprocessors), GPU 1 NVIDIA L4 (58 multiprocessors)" in told
    assert "CUDA_VISIBLE_DEVICES" in told
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, one_gpu: None, cache: Path
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("TORCHSEAM_CACHE", str(cache / "file"))
    monkeypatch.setattr(Bench, "microseconds", lambda *_: pytest.fail("it was timed"))
    assert "cannot be written" in run(code=2)


def test_a_setting_that_says_neither_on_nor_off_is_answered_with_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, one_gpu: None
) -> None:
    monkeypatch.setenv("TORCHSEAM_TUNED", "maybe")
    assert "TORCHSEAM_TUNED is 'maybe'; allowed: 1, true, yes, on" in " ".join(run(code=2).split())
    tuned_file.write(tuned_file.machine_of(0), ROWS)
    shown = run("--show")
    assert "TORCHSEAM_TUNED is 'maybe'; allowed: 1" in shown and "(in use)" in shown


# -- A search ------------------------------------------------------------------------------------------------


class Bench:
    """In the place of LocalBench: the real candidates, and times by formula: 16 warps are fast where T is large."""

    def __init__(self, device: torch.device, multiprocessors: int) -> None:
        assert (device, multiprocessors) == (torch.device("cuda", 0), MANY)
        self.tokens = 0

    def candidates(self, shape: Shape) -> list[Choice]:
        return candidates(shape, MANY)

    def prepare(self, shape: Shape) -> None:
        self.tokens = shape.tokens

    def same_bits(self, choice: Choice, shipped: Choice) -> bool:
        return choice.num_warps != 32

    def microseconds(self, choice: Choice) -> float:
        return {4: 9.9, 8: 10.0, 16: 10.5 if self.tokens < 1024 else 7.25}[choice.num_warps]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchseam.tuning import benches

    gpus(monkeypatch, 1)
    monkeypatch.setattr(benches, "LocalBench", Bench)


def cells(output: str, first: str) -> list[str]:
    """The cells of the table's row that begins so."""
    (line,) = [line for line in output.splitlines() if re.match(rf"[│|]\s*{first}\s", line)]
    return [" ".join(cell.split()) for cell in line.strip("│|").split("│")]


def test_a_search_shows_every_time_and_writes_the_winners(one_gpu: None) -> None:
    output = run("--hidden", 4096, "--scheme", "token", "--tokens", "1024,16")
    assert "local, fp8_token, bfloat16, H=4096" in output and "NVIDIA H200, torch" in output
    assert re.search(r"T=16\s.*T=1024\s", output)
    assert cells(output, "4 warps") == ["4 warps", "9.90", "9.90"]
    assert cells(output, "8 warps") == ["8 warps", "10.00 *s", "10.00 s"]  # 9.9 is within the margin
    assert cells(output, "16 warps") == ["16 warps", "10.50", "7.25 *"]
    assert cells(output, "32 warps") == ["32 warps", "!", "!"]
    assert "* chosen, s shipped" in output
    assert "1 of 2 shapes get another launch than shipped" in output and "more than 3 % faster" in output
    (path,) = tuned_file.files()
    assert f"written to {path}" in output.replace("\n", "")
    rows = tuned_file.read(path)[1].rows
    assert [(row.shape.tokens, row.launch) for row in rows] == [(16, None), (1024, Launch(16))]
    assert tuned_file.local_launch(0, 1000, 4096, torch.bfloat16, "fp8_token") == Launch(16)
    assert tuned_file.local_launch(0, 16, 4096, torch.bfloat16, "fp8_token") == Launch(8)


@pytest.mark.parametrize(
    ("tokens", "summary"),
    [
        ("16", "0 of 1 shapes get another launch than shipped; all keep it: nothing was more than 3 % faster"),
        ("1024", "1 of 1 shapes get another launch than shipped: it was more than 3 % faster, twice in a row."),
        ("16,1024", "1 of 2 shapes get another launch than shipped; the others keep it: nothing was more than"),
    ],
)
def test_the_summary_is_of_what_there_is(one_gpu: None, tokens: str, summary: str) -> None:
    output = " ".join(run("--hidden", 4096, "--scheme", "token", "--tokens", tokens).split())
    assert summary in output and "the same bits" in output and "use it" in output


@pytest.mark.parametrize("value", ["0", "off"])
def test_a_table_that_is_switched_off_is_written_and_said(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TORCHSEAM_TUNED", value)
    output = run("--hidden", 4096, "--scheme", "token", "--tokens", 16)
    assert f"not used while TORCHSEAM_TUNED={value} is set" in output and "use it" not in output
    assert len(tuned_file.files()) == 1
    assert f"(not in use: TORCHSEAM_TUNED={value})" in run("--show")


def stops(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Timing a shape stops after so many timings."""
    made, real = [], Bench.microseconds

    def microseconds(self: Bench, choice: Choice) -> float:
        made.append(choice)
        if len(made) > after:
            raise error
        return real(self, choice)

    monkeypatch.setattr(Bench, "microseconds", microseconds)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), app.INTERRUPTED), (RuntimeError("an illegal memory access"), app.FAILED)]
)
def test_what_was_done_when_it_stops_is_kept(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    stops(monkeypatch, 7, error)  # 3 candidates have the right bits: in the middle of the third shape
    told = run("--hidden", 4096, "--scheme", "token", "--tokens", "4,16,64", code=code)
    (path,) = tuned_file.files()
    assert f"the shapes that were done are kept in {path}" in told
    assert [row.shape.tokens for row in tuned_file.read(path)[1].rows] == [4, 16]


def test_progress_goes_to_standard_error(one_gpu: None) -> None:
    result = CliRunner().invoke(app.app, ["tune", "--hidden", "4096", "--scheme", "static", "--tokens", "1"])
    assert "Timing the local kernel on NVIDIA H200" in result.stderr and "4/4" in result.stderr
    assert "Timing" not in result.stdout


def test_the_defaults_cover_every_t_up_to_the_largest(one_gpu: None) -> None:
    run("--scheme", "static")
    measured = {row.shape.tokens for row in tuned_file.load(0).rows}
    assert measured == set(tune.LOCAL_TOKENS)
    for default in (tune.LOCAL_TOKENS, tune.ONE_SHOT_TOKENS):
        table = [Row(Shape(LOCAL, 1, "fp8_static", "bfloat16", 4096, t), Launch(32), 1.0, 2.0) for t in default]
        choose = tuned_file.Table(tuple(table)).chooser(LOCAL, 1, MANY)
        assert choose is not None
        assert all(choose(t, 4096, torch.bfloat16, "fp8_static", 1) for t in range(1, max(default) + 1))


def test_the_documentation_says_how_much_a_run_is() -> None:
    told = " ".join((Path(__file__).parents[2] / "docs" / "tuning.md").read_text().split())
    settings = tune.settings_of(tune.DEFAULT_HIDDEN, tune.DEFAULT_SCHEMES, None, "bf16")
    for kernel, ranks, tokens in ((LOCAL, 1, tune.LOCAL_TOKENS), (ONE_SHOT, 2, (*tune.ONE_SHOT_TOKENS, MANY))):
        shapes = settings.shapes(kernel, ranks, tokens)
        timings = sum(len(candidates(shape, MANY)) for shape in shapes)
        assert f"{len(shapes)} shapes and {timings} timings" in told


def test_a_narrow_terminal_gets_several_tables_and_loses_nothing(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = run("--hidden", 4096, "--scheme", "token")
    for tokens in tune.LOCAL_TOKENS:
        assert f"T={tokens} " in output
    assert output.count("10.00 *s") + output.count("10.00 s") == len(tune.LOCAL_TOKENS)
    assert "…" not in output


def test_ranks_are_started_as_many_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's result is what people see; tests/tuning has the search between ranks."""
    gpus(monkeypatch, 2)
    shape = Shape(ONE_SHOT, 2, "fp8_static", "bfloat16", 8192, 1024)

    class Ranks(Bench):
        def __init__(self) -> None: ...

        def microseconds(self, choice: Choice) -> float:
            assert isinstance(choice, OneShot)
            return 40.0 if (choice.pushers, choice.ahead) == (12, 8) else 50.0

        def same_bits(self, choice: Choice, shipped: Choice) -> bool:
            return True

    def started(function: object, ranks: int, settings: tune.Settings, show_output: bool) -> tuple[Any, ...]:
        assert (function, ranks, show_output) == (tune.tune_rank, 2, False)
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1" and os.environ["NCCL_NVLS_ENABLE"] == "0"
        assert settings == tune.Settings((8192,), ("fp8_static",), (1024,), "bfloat16")
        found = search([shape], Ranks(), lambda _: None)
        path = tuned_file.write(tuned_file.machine_of(0), [timed.row for timed in found])
        return tuned_file.machine_of(0), found, path, [dataclasses.replace(shape, tokens=9999)]

    for name in (*tune.LOG_VARIABLES, *tune.NO_MULTICAST):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(tune, "launch", started)
    output = run("--ranks", 2, "--hidden", 8192, "--scheme", "static", "--tokens", 1024)
    assert "one_shot, 2 ranks, fp8_static, bfloat16, H=8192" in output
    assert cells(output, "32 warps, 12 pushers, 8 ahead")[1] == "40.00 *"
    assert cells(output, "32 warps, 8 pushers, 4 ahead")[1] == "50.00 s"
    assert "T=9999: more than the group's workspace takes; not timed" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_keeps_each_shape_when_it_is_done(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """What a rank does, without GPUs: it stops in the second of two shapes."""
    import torch.distributed as dist

    from torchseam.backends import symmetric
    from torchseam.tuning import benches

    class Ranks(Bench):
        def __init__(self, name: str, cpu_group: object, channel: object, device: torch.device) -> None:
            assert (name, cpu_group, channel, device) == ("g", "cpu", "channel", torch.device("cuda", rank))

        def takes(self, shape: Shape) -> bool:
            return True

        def same_bits(self, choice: Choice, shipped: Choice) -> bool:
            return True

        def microseconds(self, choice: Choice) -> float:
            if self.tokens > 1:
                raise KeyboardInterrupt
            return 5.0

    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, device_id: None)
    monkeypatch.setattr(dist, "new_group", lambda backend: "cpu")
    default = types.SimpleNamespace(group_name="g")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
    monkeypatch.setattr(symmetric, "open_on", lambda group: types.SimpleNamespace(channel="channel"))
    monkeypatch.setattr(benches, "OneShotBench", Ranks)
    with pytest.raises(KeyboardInterrupt):
        tune.tune_rank(tune.settings_of("8192", "static", "1,2", "bf16"))
    kept = [row.shape for row in tuned_file.read_for(tuned_file.machine_of(0)).rows]
    assert kept == ([Shape(ONE_SHOT, 2, "fp8_static", "bfloat16", 8192, 1)] if rank == 0 else [])


# -- What was found before -----------------------------------------------------------------------------------


def test_show_and_clear_need_no_gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    gpus(monkeypatch, 0)
    shown = run("--show")
    assert f"no tuned launches for this machine in {cache / 'tuned'}" in shown and "as shipped" in shown
    path = tuned_file.write(tuned_file.machine_of(0), ROWS)
    shown = run("--show")
    assert str(path) in shown and "another machine's" in shown and "32 warps, 12 pushers, 8 ahead" in shown
    assert f"removed {path}" in run("--clear")
    assert not path.exists()
    assert "nothing to remove" in run("--clear")


def test_show_tells_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    path = tuned_file.write(tuned_file.machine_of(0), ROWS)
    shown = run("--show")
    assert f"{path} (in use)" in shown and "no tuned launches" not in shown
    assert cells(shown, "local, fp8_token, bfloat16, H=4096")[1:] == ["16", "16 warps", "3.00", "4.00"]
    assert any("as shipped" in line and "4.50" in line for line in shown.splitlines())
    monkeypatch.setenv("TORCHSEAM_TUNED", "0")
    assert "(not in use: TORCHSEAM_TUNED=0)" in run("--show")


def test_show_knows_the_files_of_every_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    two_kinds(monkeypatch)
    h200, l4 = (tuned_file.machine_of(device) for device in (0, 1))
    second = tuned_file.write(l4, ROWS[:1])
    shown = run("--show")
    assert f"{second} (in use)" in shown and "no tuned launches for NVIDIA H200 in" in shown
    first = tuned_file.write(h200, ROWS[:1])
    shown = run("--show")
    assert f"{first} (in use)" in shown and f"{second} (in use)" in shown and "no tuned launches" not in shown


def test_show_says_of_a_broken_and_of_a_foreign_file_that_it_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    path = tuned_file.write(tuned_file.machine_of(0), ROWS)
    path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA H100"))
    assert "ignored: it was made for" in run("--show")
    path.write_text("{")
    assert "ignored: it is not JSON" in run("--show")


def findings() -> dict[str, Any]:
    result = CliRunner().invoke(app.app, ["doctor", "--json"])
    return json.loads(result.stdout)["findings"]["tuned launches"]


def test_doctor_has_a_line_for_it(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    gpus(monkeypatch, 0)
    assert findings()["value"] is None and "needs a CUDA GPU" in findings()["note"]
    gpus(monkeypatch, 1)
    monkeypatch.setattr(doctor, "BACKENDS", ())  # these would ask the GPU
    assert findings() == {"value": None, "note": f"torchseam tune; nothing for this machine in {cache / 'tuned'}"}
    tuned_file.write(tuned_file.Machine("another", 1, "2", "3", "k"), ())
    assert "of other versions or GPUs" in findings()["note"]
    path = tuned_file.write(tuned_file.machine_of(0), ROWS)
    assert findings() == {"value": "in use, 3 shapes", "note": str(path)}
    path.write_text("{")
    assert findings()["value"] is None and "not JSON" in findings()["note"]
    monkeypatch.setenv("TORCHSEAM_TUNED", "0")
    assert findings() == {"value": None, "note": "launches are as shipped: TORCHSEAM_TUNED=0"}
