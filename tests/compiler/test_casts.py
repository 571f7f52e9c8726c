"""The roundings that older Inductors remove: hidden before its patterns, back before the search."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

import torchseam
from blocks import AtenStatic, Block, TorchNorm, same_bits
from torchseam.compiler import casts

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_dynamo")


def inputs():
    return tuple(torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))


def fold_casts(graph) -> None:
    """What torch 2.11's `pointless_convert` does: cast(cast(x, narrow), wide) becomes cast(x, wide)."""
    convert = torch.ops.prims.convert_element_type.default
    for node in graph.nodes:
        if node.target is convert and getattr(node.args[0], "target", None) is convert:
            node.args = (node.args[0].args[0], node.args[1])
    graph.eliminate_dead_code()


@pytest.mark.parametrize("kept", [False, True])
def test_a_norm_survives_an_inductor_that_folds_casts(kept, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(casts, "needed", lambda: kept)
    model = Block(TorchNorm, "residual", AtenStatic("divide"), torch.bfloat16)
    folding = {} if kept else {"joint_custom_pre_pass": fold_casts}
    with torch.no_grad(), inductor_config.patch(joint_custom_post_pass=fold_casts, fx_graph_cache=False):
        compiled = torchseam.compile(model, config=torchseam.SeamConfig(exact=True), options=folding)
        want, got = model(*inputs()), compiled(*inputs())
    kinds = list(torchseam.report(compiled).kinds())
    if kept:
        assert kinds == ["all_reduce + residual + rms_norm + fp8_static"]
        assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    else:
        assert kinds == [], "without the pass nothing is found: the test would not see it removed"


def test_hide_and_restore_are_inverse():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    convert = torch.ops.prims.convert_element_type.default
    down = graph.call_function(convert, (x, torch.bfloat16))
    alone = graph.call_function(convert, (x, torch.float16))
    up = graph.call_function(convert, (down, torch.float32))
    graph.output((up, alone))
    before = str(graph)
    assert casts.hide(graph) == 1 and down.target is torch.ops.torchseam.keep_cast.default
    assert alone.target is convert, "a cast that nobody widens again is in no danger"
    assert casts.restore(graph) == 1 and str(graph) == before


def test_keep_cast_is_a_cast():
    x = torch.randn(5)
    y = torch.ops.torchseam.keep_cast(x, torch.bfloat16)
    assert torch.equal(y, x.bfloat16())
    torch.library.opcheck(torch.ops.torchseam.keep_cast.default, (x, torch.bfloat16))


def test_which_torch_needs_it(monkeypatch):
    for version, needed in (("2.11.0+cu130", True), ("2.12.1", True), ("2.13.0+cpu", False), ("2.14.1", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert casts.needed() is needed


def test_a_users_joint_pass_stays():
    calls = []

    def users(graph):
        calls.append(graph)

    keep = casts.KeepCasts(also=users)
    graph = torch.fx.Graph()
    graph.output(())
    keep(graph)
    assert calls == [graph] and keep.uuid() is None
    assert casts.KeepCasts().uuid()
