"""Calls whose residual is with the owners of its rows: which kernel of `symmetric` runs them, and who refuses them."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from torchseam.backends import algorithms, flashinfer_run, symmetric
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

pytest.importorskip("triton")

FULL = Reduce("g")
SHARDED = (
    Reduce("g", residual_out="sharded"),
    Reduce("g", residual_in="sharded", residual_out="sharded"),
    Reduce("g", residual_in="sharded"),
)
SEAM = Seam(Norm(1e-6, "none"), FULL, residual=True, quants=(Quant("fp8_static"),), outputs=("residual",))
TOKENS, HIDDEN, WORLD_SIZE = 8, 256, 2
#: What two-shot needs of a slot where it gathers the residual: four rows of x, of the residual and of codes.
NEEDED = 4 * (512 + 512 + 256)


def operands(tokens: int = TOKENS) -> Operands:
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    return Operands(x, x, scales=(torch.ones(1),))


@pytest.fixture
def backend(monkeypatch) -> symmetric.Symmetric:
    """Without the memory that only a GPU has."""
    from torchseam.kernels import one_shot, two_shot

    made = object.__new__(symmetric.Symmetric)
    made._group = types.SimpleNamespace(world_size=WORLD_SIZE)
    made._workspace = types.SimpleNamespace(channel=types.SimpleNamespace(slot_bytes=1 << 20))
    made._watch = made._tuned = made._no_two_shot = None
    made._choose = algorithms.chooser((9, 0), WORLD_SIZE, 1 << 20)
    monkeypatch.setattr(symmetric.Symmetric, "_follow_last_call", lambda self: None)
    monkeypatch.setattr(symmetric.local_backend, "has_kernel_for", lambda x, quants: True)
    monkeypatch.setattr(one_shot, "run", lambda *_, **__: ["one-shot"])
    monkeypatch.setattr(two_shot, "run", lambda *_, **__: ["two-shot"])
    return made


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_symmetric_runs_them_in_two_shot_whatever_their_size(backend, tokens):
    for reduce in SHARDED:
        seam = dataclasses.replace(SEAM, reduce=reduce)
        assert backend.refuses(seam, operands(tokens)) is None
        assert backend.run(seam, operands(tokens)) == ["two-shot"]
    assert backend.run(SEAM, operands(1)) == ["one-shot"]


def test_symmetric_refuses_what_two_shot_has_no_room_for(backend):
    last = dataclasses.replace(SEAM, reduce=SHARDED[2])
    backend._workspace.channel.slot_bytes = NEEDED
    assert backend.refuses(last, operands()) is None
    backend._workspace.channel.slot_bytes = NEEDED - 16
    assert f"two-shot needs {NEEDED} bytes" in backend.refuses(last, operands())
    first = dataclasses.replace(SEAM, reduce=SHARDED[0])
    assert backend.refuses(first, operands()) is None, "its residual is not sent"


def test_flashinfer_refuses_a_residual_that_lacks_rows():
    backend = object.__new__(flashinfer_run.FlashInfer)
    for reduce in SHARDED[1:]:
        refusal = backend.refuses(dataclasses.replace(SEAM, reduce=reduce), operands())
        assert refusal == "the rows of the residual are with their owners; it needs all of them on every rank"
