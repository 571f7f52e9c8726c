"""docs/performance.md and its figures are of the rows in benchmarks/results, and what is said of the rows is right."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import plot
import tables

ROOT = Path(__file__).parent.parent


def results(tmp_path: Path, *rows: tuple, world_size: int = 1, date: str = "2026-01-01") -> tables.Results:
    """Rows of (scheme, hidden, tokens, implementation, microseconds, limit[, date])."""
    names = ("scheme", "hidden", "tokens", "implementation", "microseconds", "limit_microseconds", "date")
    fixed = {"date": date, "gpu": "GPU", "world_size": world_size, "torch": "2", "triton": "3"}
    file = tmp_path / "some.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, [*fixed, "commit", *names[:-1]])
        writer.writeheader()
        for row in rows:
            given = {**fixed, **dict(zip(names, row, strict=False))}
            writer.writerow({**given, "commit": f"of {given['date']}"})
    return tables.Results(file)


def goal_line(found: tables.Results, begins: str) -> str:
    (line,) = [line for line in tables.section(found) if line.startswith(f"| {begins}")]
    return line


# ---- what is committed ------------------------------------------------------------------------


def test_the_page_and_the_figures_are_of_the_committed_rows():
    every = [tables.Results(file) for file in plot.files()]
    assert every
    assert plot.stale(ROOT / "docs", every) == [], "run python benchmarks/plot.py"


def test_every_picture_of_the_page_is_there_and_small():
    page = (ROOT / "docs" / "performance.md").read_text()
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', page)
    assert len(pictures) == 2 * len(plot.files())
    for picture in pictures:
        assert 0 < (ROOT / "docs" / picture).stat().st_size < 200_000, picture


def test_a_page_or_a_figure_of_other_rows_is_found(tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    every = [tables.Results(file) for file in plot.files()]
    key = next(key for key in every[0].rows if key[3] == tables.OURS)
    every[0].rows[key] = tables.Row(**{**vars(every[0].rows[key]), "microseconds": 0.5})
    figures = [f"docs/figures/{every[0].name}-{theme}.svg" for theme in plot.THEMES]
    assert plot.stale(docs, every) == ["docs/performance.md", *figures]


def test_the_script_draws_every_figure_the_same_way_each_time(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    pages = []
    for name in ("one", "two"):
        docs = tmp_path / name
        docs.mkdir()
        (docs / "performance.md").write_text(f"before\n{plot.BEGIN}\nold\n{plot.END}\nafter\n")
        done = subprocess.run(
            [sys.executable, plot.__file__, "--docs", str(docs)], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        pages.append({file.relative_to(docs): file.read_bytes() for file in sorted(docs.rglob("*.*"))})
    assert pages[0] == pages[1]
    figures = [name for name in pages[0] if name.suffix == ".svg"]
    assert len(figures) == len(plot.THEMES) * len(plot.files())
    text = pages[0][Path("performance.md")].decode()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text


# ---- what is said of rows ---------------------------------------------------------------------


def test_the_newest_row_counts(tmp_path):
    found = results(
        tmp_path,
        ("fp8_static", 4096, 1, "torchseam", 3.0, 0.1, "2026-02-02"),
        ("fp8_static", 4096, 1, "torchseam", 9.0, 0.1, "2026-02-01"),
        ("fp8_static", 4096, 16, "torchseam", 9.0, 0.1, "2026-02-02"),
        ("fp8_static", 4096, 16, "torchseam", 4.0, 0.1, "2026-02-02"),
    )
    assert [found.at(p).microseconds for p in found.points()] == [3.0, 4.0]


def test_a_missed_goal_is_named_and_never_rounded_into_a_met_one(tmp_path):
    found = results(
        tmp_path,
        ("fp8_static", 4096, 4096, "torchseam", 100.0, 95.0),
        ("fp8_token", 4096, 4096, "torchseam", 100.0, 94.99),
        ("nvfp4", 4096, 4096, "torchseam", 100.0, 91.0),
        ("fp8_static", 4096, 1024, "torchseam", 100.0, 1.0),
    )
    assert goal_line(found, "FP8, T >= 4096").endswith("| 1 of 2 | `fp8_token` H 4096 T 4096: 94.9 % |")
    assert goal_line(found, "NVFP4, T >= 4096").endswith("| 1 of 1 |  |")
    assert goal_line(found, "variants").endswith("| not measured | |")


def test_the_fastest_peer_counts_and_each_that_is_faster_is_named(tmp_path):
    found = results(
        tmp_path,
        ("nvfp4", 4096, 16, "torchseam", 4.0, 0.1),
        ("nvfp4", 4096, 16, "inductor", 5.0, 0.1),
        ("nvfp4", 4096, 16, "unfused", 3.2, 0.1),
    )
    assert goal_line(found, "T <= 128: no slower").endswith("| 0 of 1 | `nvfp4` H 4096 T 16: 0.80x |")
    assert tables.slower(found) == [
        "- `nvfp4` H 4096 T 16: 4.00 us, norm, then quantiser (Inductor) 3.20 us (25.0 % slower)"
    ]


def test_the_time_at_128_tokens_is_held_against_that_at_one(tmp_path):
    found = results(
        tmp_path,
        *(("fp8_static", 4096, t, "torchseam", us, 0.1) for t, us in ((1, 2.0), (128, 2.7))),
        *(("fp8_static", 8192, t, "torchseam", us, 0.1) for t, us in ((1, 2.0), (128, 2.6))),
    )
    assert goal_line(found, "T = 128").endswith("| 1 of 2 | `fp8_static` H 4096 T 128: 1.35x |")


def test_a_variant_may_take_what_its_bytes_take_and_2_percent(tmp_path):
    rows = [("torchseam (plain)", 100.0, 90.0), ("torchseam (fp32 weight)", 101.9, 90.0)]
    rows += [("torchseam (norm emitted)", 140.0, 120.0)]
    found = results(tmp_path, *(("fp8_static", 4096, 4096, *row) for row in rows))
    assert goal_line(found, "variants").endswith("| 1 of 2 | `fp8_static` H 4096 T 4096 norm emitted: 1.05x |")
    assert "| `fp8_static` | 4096 | 4096 | 100.00 | 1.02 (1.00) | 1.40 (1.33) |" in tables.of_variants(found)


def test_rows_of_two_runs_beside_each_other_are_said_to_be(tmp_path):
    found = results(
        tmp_path,
        ("fp8_static", 4096, 1, "torchseam", 3.0, 0.1, "2026-02-02"),
        ("fp8_static", 4096, 1, "inductor", 4.0, 0.1, "2026-02-01"),
        ("fp8_static", 4096, 16, "torchseam", 3.0, 0.1, "2026-02-02"),
        ("fp8_static", 4096, 16, "inductor", 4.0, 0.1, "2026-02-02"),
    )
    assert tables.mixed(found)[0] == (
        "Not of one run, ours and the peer's: `fp8_static` H 4096 T 1 Inductor max-autotune."
    )


def test_several_gpus_have_goals_of_their_own(tmp_path):
    found = results(
        tmp_path,
        ("fp8_static", 4096, 1, "torchseam", 3.2, 0.7),
        ("fp8_static", 8192, 1, "torchseam", 3.41, 0.7),
        ("fp8_static", 4096, 1, "nccl+inductor", 5.0, 0.7),
        ("fp8_static", 4096, 1, "torchseam-collective", 3.2, 0.7),
        world_size=2,
    )
    assert goal_line(found, "static FP8, T = 1, H 4096").endswith("| 1 of 1 |  |")
    assert goal_line(found, "static FP8, T = 1, H 8192").endswith("| 0 of 1 | `fp8_static` H 8192 T 1: 3.41 us |")
    assert "| 0 of 1 | `fp8_static` H 4096 T 1: 1.56x |" in goal_line(found, "at least 1.6 times as fast as NCCL")
    assert goal_line(found, "no slower than `collective`").endswith("| 1 of 1 |  |")
    assert goal_line(found, "at least 1.25 times").endswith("| not measured | |")
