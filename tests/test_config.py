"""SeamConfig: what is allowed, what the environment sets, and that a backend is refused before anything runs."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import types

import pytest
import torch

import torchseam
from torchseam import config
from torchseam.backends import select
from torchseam.config import BACKEND_VARIABLE, BACKENDS, VLLM_BACKEND_VARIABLE, SeamConfig
from torchseam.seam import SCHEMES

#: These need hardware; a machine that lacks something for them says what.
DEMANDING = ("symmetric", "mnnvl", "trtllm")
LACK = "no such GPU here"


@pytest.fixture(autouse=True)
def no_backend_in_the_environment(monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.delenv(VLLM_BACKEND_VARIABLE, raising=False)


@pytest.fixture
def lacking(monkeypatch):
    """A machine that lacks something for every backend but `collective`."""
    monkeypatch.setattr(select, "missing", lambda name: LACK if name in DEMANDING else None)


def test_defaults():
    settings = SeamConfig()
    assert settings == SeamConfig(True, True, "auto", SCHEMES, False, False, False)


def test_a_config_is_a_frozen_value():
    settings = SeamConfig(strict=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.strict = False
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert len({settings, SeamConfig(strict=True), SeamConfig()}) == 2


def test_backends_are_those_of_the_design():
    assert set(BACKENDS) == {"auto", "collective", *DEMANDING}
    assert config.BACKEND_VARIABLE == "TORCHSEAM_BACKEND"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_environment_sets_the_default_backend(backend, monkeypatch):
    monkeypatch.setenv("TORCHSEAM_BACKEND", backend)
    assert SeamConfig().backend == backend
    assert SeamConfig(backend="collective").backend == "collective", "an argument wins over the environment"
    monkeypatch.delenv("TORCHSEAM_BACKEND")
    assert SeamConfig().backend == "auto", "read when a config is made, not when torchseam is imported"


@pytest.mark.parametrize("backend", ("trtllm", "mnnvl", "auto"))
def test_vllms_choice_counts_where_ours_is_unset(backend, monkeypatch):
    monkeypatch.setenv("VLLM_FLASHINFER_ALLREDUCE_BACKEND", backend)
    assert SeamConfig().backend == "auto", "another program than vLLM does not ask for it"
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    assert SeamConfig().backend == backend
    monkeypatch.setenv("TORCHSEAM_BACKEND", "")
    assert SeamConfig().backend == backend, "set to nothing is not set"
    monkeypatch.setenv("TORCHSEAM_BACKEND", "collective")
    assert SeamConfig().backend == "collective"


@pytest.mark.parametrize("backend", ("nccl", "Collective", "flashinfer-trtllm"))
@pytest.mark.parametrize("from_environment", (False, True), ids=("argument", "environment"))
def test_an_unknown_backend_is_told_what_is_allowed_and_where_it_came_from(backend, from_environment, monkeypatch):
    if from_environment:
        monkeypatch.setenv("TORCHSEAM_BACKEND", backend)
    with pytest.raises(ValueError) as caught:
        SeamConfig() if from_environment else SeamConfig(backend=backend)
    for word in (f"backend is {backend!r}", "SeamConfig.backend", "TORCHSEAM_BACKEND", *BACKENDS):
        assert word in str(caught.value)


def test_schemes_may_be_any_iterable_but_a_string():
    assert SeamConfig(schemes=["nvfp4", "fp8_token"]).schemes == ("nvfp4", "fp8_token")
    assert SeamConfig(schemes=()).schemes == ()
    with pytest.raises(ValueError) as caught:
        SeamConfig(schemes="nvfp4")
    assert "'nvfp4'" in str(caught.value) and "('nvfp4',)" in str(caught.value)


def test_an_unknown_scheme_is_told_what_is_allowed():
    with pytest.raises(ValueError) as caught:
        SeamConfig(schemes=("fp8_token", "int8"))
    for word in ("schemes has 'int8'", *SCHEMES):
        assert word in str(caught.value)


@pytest.mark.parametrize("take", (torchseam.compile, torchseam.inductor_options), ids=("compile", "inductor_options"))
@pytest.mark.parametrize("from_environment", (False, True), ids=("argument", "environment"))
@pytest.mark.parametrize("backend", DEMANDING)
def test_a_backend_that_cannot_work_is_refused_when_compile_is_called(
    backend, from_environment, take, monkeypatch, lacking
):
    if from_environment:
        monkeypatch.setenv("TORCHSEAM_BACKEND", backend)
    settings = SeamConfig() if from_environment else SeamConfig(backend=backend)
    arguments = (torch.nn.Identity(),) if take is torchseam.compile else ()
    with pytest.raises(ValueError) as caught:
        take(*arguments, config=settings)
    for word in (repr(backend), LACK, "what works", "'auto'", "'collective'"):
        assert word in str(caught.value)


@pytest.mark.parametrize("backend", DEMANDING)
def test_the_environment_alone_is_enough_to_be_refused(backend, monkeypatch, lacking):
    monkeypatch.setenv("TORCHSEAM_BACKEND", backend)
    with pytest.raises(ValueError, match=f"{backend!r}.*'collective'"):
        torchseam.compile(torch.nn.Identity())


@pytest.mark.parametrize("backend", ("auto", "collective"))
def test_a_backend_that_works_is_taken(backend):
    options = torchseam.inductor_options(SeamConfig(backend=backend))
    assert options["post_grad_custom_post_pass"].config.backend == backend


def test_exact_asks_inductor_for_eagers_roundings():
    assert "emulate_precision_casts" not in torchseam.inductor_options(SeamConfig())
    assert torchseam.inductor_options(SeamConfig(exact=True))["emulate_precision_casts"] is True
