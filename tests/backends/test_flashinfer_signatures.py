"""Every call into FlashInfer binds to its real signatures, in the oldest and the newest version that was read, and in
the one that is installed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashinfer_double import CREATE, FUSED, PACKED
from flashinfer_signatures import CODES, EXPORTS, METHODS, installed, read, recorded, signature

from torchseam.backends import base, flashinfer, flashinfer_api, flashinfer_run
from torchseam.backends import flashinfer_patterns as patterns
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

DESTROY = "trtllm_destroy_ipc_workspace_for_all_reduce_fusion"


def known() -> list[tuple[str, dict[str, Any]]]:
    found = list(recorded().items())
    here = installed()
    return [*found, (f"installed {here[0]}", read(here[1]))] if here else found


VERSIONS = pytest.mark.parametrize(("name", "record"), known(), ids=[name for name, _ in known()])


def test_the_record_is_what_is_installed():
    here = installed()
    if here is None:
        pytest.skip("flashinfer is not installed: pip install --no-deps flashinfer-python")
    version, folder = here
    if version not in recorded():
        pytest.skip(f"flashinfer {version} is installed; the record has {', '.join(recorded())}")
    assert read(folder) == recorded()[version]


@VERSIONS
def test_what_is_used_is_there(name, record):
    assert set(record["exports"]) == set(EXPORTS)
    pattern, layouts = record["codes"]["AllReduceFusionPattern"], record["codes"]["QuantizationSFLayout"]
    assert {patterns.ALL_REDUCE, patterns.NORM, *patterns.QUANTS["fp8_static"][:2]} <= set(pattern)
    assert set(patterns.LAYOUTS.values()) <= set(layouts)
    assert pattern[patterns.ALL_REDUCE] == 0 and layouts["SWIZZLED_128x4"] == 0
    for methods in record["methods"].values():
        assert {"is_buffer_size_sufficient", "destroy"} <= set(methods) <= set(METHODS)


def calls(record: dict[str, Any], backend: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The calls that a backend makes on a machine of capability 10.0, by the real code, on tensors of real shapes."""
    made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def note(function: str) -> Any:
        return lambda *args, **kwargs: made.append((function, args, kwargs))

    numbers = {name: record["codes"][name] for name in CODES}
    quants = frozenset(numbers["MNNVLQuantType"])
    able = flashinfer_api.Installed(
        (9, 9, 9), numbers["AllReduceFusionPattern"], quants, numbers["QuantizationSFLayout"]
    )
    api = flashinfer_api.Api(note(CREATE), note(FUSED), note(DESTROY), able)
    workspace = SimpleNamespace(
        is_buffer_size_sufficient=lambda *args: made.append(("is_buffer_size_sufficient", args, {})) or True,
        destroy=note("destroy"),
        ipc_handles=[[0]],
    )
    group = base.Group("0", 0, 2, torch.device("cpu"))
    backend_made = flashinfer_run.FlashInfer(backend, group, api, workspace, 1 << 20)
    backend_made._abilities = patterns.Abilities.of(able, (10, 0))
    backend_made.settle_capacity()
    for quant in (None, Quant("fp8_static", rule="reciprocal"), Quant("nvfp4"), Quant("fp8_token"), PACKED):
        for outputs in (("residual", "norm"), ("residual",) if quant else ("norm",)):
            quants_of = (quant,) if quant else ()
            seam = Seam(Norm(1e-6), Reduce("0"), residual=True, quants=quants_of, outputs=outputs)
            x = torch.zeros(2, 3, 1024, dtype=torch.bfloat16)
            scales = (torch.ones(1),) if quant and quant.takes_scale else ()
            backend_made.run(seam, Operands(x, x, weight=x[0, 0], scales=scales))
    backend_made.run(Seam(Norm(1e-6), Reduce("0"), outputs=("norm",)), Operands(x, weight=x[0, 0]))
    backend_made.close()
    return made


@VERSIONS
@pytest.mark.parametrize("backend", ("trtllm", "mnnvl"))
def test_every_call_binds(name, record, backend):
    made = calls(record, backend)
    codes = set()
    for function, args, kwargs in made:
        if function in record["functions"]:
            arguments = signature(record["functions"][function]).bind(*args, **kwargs).arguments
            if function == FUSED:
                codes.add(arguments["pattern"])
                assert arguments["fp32_acc"] is True
                assert all(t.dim() in (1, 2) for t in arguments.values() if isinstance(t, torch.Tensor))
        else:
            signature(record["methods"][backend][function]).bind(None, *args, **kwargs)
    assert {0, 1} <= codes
    group_codes = {record["codes"]["AllReduceFusionPattern"][name] for name in patterns.QUANTS["fp8_group"][:2]}
    assert group_codes <= codes if backend == "trtllm" else not group_codes & codes
    assert [function for function, _, _ in made][-2:] == [DESTROY, "destroy"]


@VERSIONS
def test_the_making_of_a_workspace_binds(name, record, monkeypatch, one_rank):
    given: dict[str, Any] = {}
    api = SimpleNamespace(create_workspace=lambda **kwargs: given.update(kwargs))
    group = base.Group(torch.distributed.group.WORLD.group_name, 0, 1, torch.device("cpu"))
    flashinfer._create(api, "trtllm", group)  # type: ignore[arg-type]
    signature(record["functions"][CREATE]).bind(**given)
    assert type(given["max_token_num"]) is int and given["group"] is torch.distributed.group.WORLD
    protocol = ("Get_rank", "Get_size", "allgather", "bcast", "barrier", "Split")
    assert all(callable(getattr(given["comm_backend"], method)) for method in protocol)
    assert list(inspect.signature(given["comm_backend"].bcast).parameters) == ["data", "root"]
    assert given["comm_backend"].allgather({"any": b"\0object"}) == [{"any": b"\0object"}]
