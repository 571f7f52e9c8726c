"""benchmarks/local.py without a GPU: which shapes a run takes, when it stops, and what it writes."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import local
import measuring
import peers

from torchseam import reference
from torchseam.operands import Operands
from torchseam.seam import SCHEMES


@pytest.fixture(autouse=True)
def inductor_tunes_as_before():
    """`Peers` changes how Inductor tunes for the whole process; other tests must not see it."""
    with peers.inductor.patch(autotune_local_cache=peers.inductor.autotune_local_cache):
        yield


def operand_sets(quant, hidden, tokens):
    x = torch.randn(tokens, hidden).bfloat16()
    scales = (torch.tensor([0.01]),) if quant.takes_scale else ()
    return [Operands(x, x.flip(0), weight=torch.rand(hidden).bfloat16(), scales=scales)]


@pytest.fixture
def on_cpu(monkeypatch):
    """The benchmark with the reference in the kernel's place; every call runs once and takes 7 us."""

    def timed(call, sets):
        for operands in sets:
            call(operands)
        return 7.0

    monkeypatch.setattr(local, "operand_sets", operand_sets)
    monkeypatch.setattr(local.local, "run", reference.run)
    monkeypatch.setattr(local, "timed", timed)
    monkeypatch.setattr(local, "measured_bandwidth", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_the_shards_are_the_shapes_and_keep_all_schemes_of_a_shape_together():
    whole = local.shapes_of(list(SCHEMES), [4096, 8192], [1, 16, 128], "1/1")
    shards = [local.shapes_of(list(SCHEMES), [4096, 8192], [1, 16, 128], f"{i}/4") for i in (1, 2, 3, 4)]
    assert len(whole) == 24
    assert sorted(whole) == sorted(shape for shard in shards for shape in shard)
    for shard in shards:
        for pair in {shape[1:] for shape in shard}:
            assert [shape[0] for shape in shard if shape[1:] == pair] == list(SCHEMES)


@pytest.mark.parametrize("shard", ["0/2", "3/2"])
def test_a_shard_that_is_not_there_is_refused(shard):
    with pytest.raises(ValueError, match=f"--shard is {shard}"):
        local.shapes_of(["nvfp4"], [4096], [1], shard)


def test_a_shape_that_would_end_after_the_budget_is_left_out_and_named(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    taken = []
    for shape in local.Budget(10.0).while_it_lasts([("a", 1, 1), ("b", 1, 1), ("c", 1, 1), ("d", 1, 2)]):
        taken.append(shape[0])
        now[0] += 4.0
    assert taken == ["a", "b"]
    assert "left out: c/1/1 d/1/2" in capsys.readouterr().err


def test_without_a_budget_every_shape_is_taken(capsys):
    assert len(list(local.Budget(None).while_it_lasts([("a", 1, 1), ("b", 1, 1)]))) == 2
    assert "all 2 shapes" in capsys.readouterr().err


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.usefixtures("on_cpu")
def test_a_shape_has_a_row_for_the_kernel_and_for_each_peer(tmp_path, monkeypatch):
    # Inductor's own work is not this test's: the peers are called as they are written.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    file = tmp_path / "rows.csv"
    shapes = [(scheme, 256, 4) for scheme in SCHEMES]
    with measuring.results(file, 1, "a commit") as add:
        local.compare(shapes, peers.Peers(), local.Budget(None), add)
    rows = rows_of(file)
    assert [(r["scheme"], r["implementation"]) for r in rows] == [
        (scheme, name) for scheme in SCHEMES for name in ("torchseam", "inductor", "unfused")
    ]
    assert {r["commit"] for r in rows} == {"a commit"}
    # Static FP8: x, residual and residual_out of 2 bytes, codes of 1, the weight and one scale.
    assert float(rows[0]["limit_microseconds"]) == round((4 * 256 * 7 + 512 + 4) / 1e9 * 1e6, 4)


@pytest.mark.usefixtures("on_cpu")
def test_appending_keeps_the_rows_and_writes_the_header_once(tmp_path):
    file = tmp_path / "rows.csv"
    for tokens in (1, 2):
        with measuring.results(file, 1, "c", append=True) as add:
            local.compare([("fp8_token", 256, tokens)], None, local.Budget(None), add)
    assert [(r["tokens"], r["implementation"]) for r in rows_of(file)] == [("1", "torchseam"), ("2", "torchseam")]
    with measuring.results(file, 1, "c"):
        pass
    assert rows_of(file) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_unfused_pair_computes_what_the_seam_does(scheme, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    quant = measuring.SCHEMES[scheme]
    (operands,) = operand_sets(quant, 256, 4)
    pair, whole = peers.Peers().unfused(quant)(operands), reference.run(peers.seam_of(quant), operands)
    assert len(pair) == len(whole)
    for a, b in zip(pair, whole, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.usefixtures("on_cpu")
def test_each_variant_is_timed_with_the_limit_of_its_own_bytes(tmp_path):
    file = tmp_path / "rows.csv"
    with measuring.results(file, 1, "c") as add:
        local.variants([("fp8_static", 4096, 64)], local.Budget(None), add)
    limits = {r["implementation"]: float(r["limit_microseconds"]) for r in rows_of(file)}
    plain = (64 * 4096 * 7 + 2 * 4096 + 4) / 1e9 * 1e6
    assert limits == {
        "torchseam (plain)": round(plain, 4),
        "torchseam (fp32 weight)": round(plain + 2 * 4096 / 1e3, 4),
        "torchseam (Gemma offset)": round(plain, 4),
        "torchseam (sandwich norm)": round(plain + 2 * 4096 / 1e3, 4),
        "torchseam (norm emitted)": round(plain + 2 * 64 * 4096 / 1e3, 4),
    }
