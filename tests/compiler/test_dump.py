"""`TORCHSEAM_DUMP`: graphs before and after the pass, as text."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config

import torchseam
from blocks import HIDDEN, Block, GemmaNorm, LlamaNorm
from torchseam import Quant
from torchseam.compiler.dump import readable

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_dynamo")

OURS, THEIRS = "torch.ops.torchseam.seam", "torch.ops._c10d_functional.all_reduce"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty compile cache, so that the pass runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with torch.no_grad():
        yield


def compile_and_run(norm=GemmaNorm, order: str = "residual") -> None:
    x = torch.randn(2, 3, HIDDEN).bfloat16()
    torch._dynamo.reset()
    torchseam.compile(Block(norm, order, Quant("fp8_static"), torch.bfloat16))(x, x + 1)


def names(folder: Path) -> list[tuple[int, int, str]]:
    """(rank, number, the rest) of each file, in the order of their names."""
    split = [path.name.split("_", 2) for path in sorted(folder.iterdir())]
    return [(int(r.removeprefix("rank")), int(g.removeprefix("graph")), rest) for r, g, rest in split]


def test_a_pair_of_files_for_each_graph(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "dump"
    monkeypatch.setenv("TORCHSEAM_DUMP", str(folder))
    compile_and_run()
    compile_and_run(LlamaNorm, "plain")
    found = names(folder)
    first = found[0][1]
    pair = ["1_before.txt", "2_after.txt"]
    assert found == [(0, number, name) for number in (first, first + 1) for name in pair]
    before, after, *_ = (path.read_text() for path in sorted(folder.iterdir()))
    assert THEIRS in before and OURS not in before
    assert OURS in after and THEIRS not in after
    assert after.startswith(f"# fused: all_reduce + residual + rms_norm + fp8_static, 6 x {HIDDEN} bfloat16, ")
    for text in (before, after):
        assert "blocks.py" in text and f"bf16[2, 3, {HIDDEN}]" in text


def test_the_rank_is_in_the_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHSEAM_DUMP", str(tmp_path / "dump"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 11)
    compile_and_run()
    assert [rank for rank, *_ in names(tmp_path / "dump")] == [11, 11]


def test_a_pair_goes_to_inductors_debug_folder(tmp_path, monkeypatch):
    from torch._dynamo import config as dynamo_config

    monkeypatch.setattr(dynamo_config, "debug_dir_root", str(tmp_path / "debug"))
    with inductor_config.patch({"trace.enabled": True, "trace.debug_dir": str(tmp_path / "debug")}):
        compile_and_run()
    (before,) = tmp_path.glob("debug/**/torchseam_1_before.txt")
    assert (before.parent / "torchseam_2_after.txt").exists() and (before.parent / "output_code.py").exists()


def test_nothing_is_written_unasked(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHSEAM_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    compile_and_run()
    assert not list(tmp_path.glob("**/*_before.txt"))


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHSEAM_DUMP", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "torchseam"):
        compile_and_run()
    assert "could not be written" in caplog.text


def test_a_graph_without_a_module_is_readable_too():
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    assert "placeholder" in readable(graph)
