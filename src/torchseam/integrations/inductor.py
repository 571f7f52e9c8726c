"""torch.compile with torchseam's pass in it: the public `compile`, `inductor_options` and `report`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from torchseam.backends import select
from torchseam.compiler import casts
from torchseam.compiler.fusion_pass import FusionPass, current_frame
from torchseam.compiler.report import FusionReport, GraphReport, graph_from_dict, graph_to_dict
from torchseam.config import SeamConfig
from torchseam.nn import QuantLinear

log = logging.getLogger("torchseam")

#: How long a graph that came from Inductor's cache waits for the record of it: 2 seconds.
_RECORD_POLLS, _RECORD_POLL_SECONDS = 20, 0.1

_POST_PASS, _JOINT_PASS = "post_grad_custom_post_pass", "joint_custom_pre_pass"


def _new_pass(config: SeamConfig | None, options: dict[str, Any], report: FusionReport | None = None) -> FusionPass:
    """A pass that runs after the user's own: that in `options`, or else that set in Inductor's config."""
    config = config or SeamConfig()
    select.resolve(config.backend)
    also = options.get(_POST_PASS, getattr(inductor_config, _POST_PASS))
    fusion_pass = FusionPass(config, also=also)
    if report is not None:
        fusion_pass.report = report
    return fusion_pass


def _options_for(fusion_pass: FusionPass, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """The user's options with torchseam's pass in them."""
    options: dict[str, Any] = {**(given or {}), _POST_PASS: fusion_pass}
    if casts.needed():
        also = options.get(_JOINT_PASS, getattr(inductor_config, _JOINT_PASS))
        options[_JOINT_PASS] = casts.KeepCasts(also=also)
    if fusion_pass.config.exact:
        options["emulate_precision_casts"] = True
    return options


def inductor_options(config: SeamConfig | None = None) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` that fuse seams with the ordinary Inductor backend.

    A post-grad pass that is set in Inductor's config at this time runs before torchseam's. `report`
    takes the returned dict. A graph that Inductor takes from its cache is not reported this way
    (`torchseam.compile` keeps a record for that).
    """
    return _options_for(_new_pass(config, {}))


class _Records:
    """Reports of graphs, kept next to Inductor's cache: a graph that comes from it runs no pass."""

    def __init__(self) -> None:
        self.folder = Path(cache_dir()) / "torchseam"

    def load(self, key: str) -> list[GraphReport] | None:
        path = self.folder / f"{key}.json"
        for _ in range(_RECORD_POLLS):  # another rank that compiled the graph may be about to write it
            if path.exists():
                break
            time.sleep(_RECORD_POLL_SECONDS)
        try:
            graphs, frame = [graph_from_dict(g) for g in json.loads(path.read_text())], current_frame()
            return [dataclasses.replace(graph, from_cache=True, frame=frame) for graph in graphs]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the fusion record %s cannot be read (%s); it is ignored", path, error)
            return None

    def save(self, key: str, graphs: Sequence[GraphReport]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".tmp", delete=False) as file:
                json.dump([graph_to_dict(g) for g in graphs], file)
            os.replace(file.name, self.folder / f"{key}.json")
        except OSError as error:
            log.warning("the fusion record for this graph could not be written: %s", error)


def _settings(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Inductor's configuration with these options in it, but for passes (they have identities of their own)."""
    with inductor_config.patch({name: value for name, value in options.items() if not callable(value)}):
        return sorted((name, repr(value)) for name, value in inductor_config.save_config_portable().items())


def _fingerprint(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], identity: Any, options: dict[str, Any] | None = None
) -> str:
    """Names a captured graph: its code, its inputs, what identifies the pass, the modes that AOT compiles for, and
    Inductor's settings. What Inductor would compile anew must have another name, or the record would be another's."""
    modes = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((d, torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in ("cpu", "cuda")),
        [(str(getattr(i, "placements", "")), str(getattr(i, "device_mesh", ""))) for i in inputs],
    ]
    shapes = [
        (str(i.dtype), str(tuple(i.shape)), str(i.stride()), str(i.device)) if isinstance(i, torch.Tensor) else str(i)
        for i in inputs
    ]
    parts = (gm.code, shapes, modes, identity, _settings(options or {}))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _constant_epsilons() -> Any:
    """While Dynamo may trace: Python floats are constants. With dynamic shapes it would make an
    input of every float that is an attribute of a model, epsilon among them."""
    return torch._dynamo.config.patch(specialize_float=True)


class _Backend:
    """A torch.compile backend: Inductor with torchseam's pass, one report for all of its graphs."""

    compiler_name = "inductor"

    def __init__(self, fusion_pass: FusionPass, options: dict[str, Any] | None = None) -> None:
        self.backend_ctx_ctor = _constant_epsilons  # Dynamo looks for it among the instance's attributes
        self.fusion_pass = fusion_pass
        self.options = _options_for(fusion_pass, options)

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        report = self.fusion_pass.report
        identity = self.fusion_pass.uuid()
        key = _fingerprint(gm, inputs, identity, self.options)
        before = len(report.graphs)
        compiled = compile_fx(gm, inputs, config_patches=self.options)
        fresh = report.graphs[before:]
        if fresh:
            if identity is not None:
                _Records().save(key, fresh)
            return compiled  # type: ignore[return-value]
        known = _Records().load(key)
        if known is None:
            report.unreported += 1
        else:
            report.graphs += known
        return compiled  # type: ignore[return-value]


#: Which pass compiled what. Weak: a report lives as long as its model.
_passes: weakref.WeakKeyDictionary[Any, FusionPass] = weakref.WeakKeyDictionary()

#: The report of every model compiled with `backend="torchseam"`: torch hands that backend graphs,
#: not models, so they share one. None until that backend has compiled something.
_named_backend_report: FusionReport | None = None


def compile(
    model: Callable[..., Any],
    *,
    config: SeamConfig | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile` a model (module or function) for inference, with its seams fused.

    Args:
        config: what to fuse and how; None means `SeamConfig()`.
        fullgraph, dynamic: as in `torch.compile`.
        options: further Inductor options. `post_grad_custom_post_pass` among them runs before torchseam's.

    Returns:
        What `torch.compile` returns; `torchseam.report` says what was fused in it once it has run.

    Raises:
        ValueError: the configured backend cannot work here.
    """
    options = dict(options or {})
    fusion_pass = _new_pass(config, options)
    # torch.compile would wrap the backend and hide `backend_ctx_ctor` from Dynamo.
    optimize = torch._dynamo.optimize(_Backend(fusion_pass, options), nopython=fullgraph, dynamic=dynamic)
    compiled: Callable[..., Any] = optimize(model)
    _passes[compiled] = fusion_pass
    return compiled


def torchseam_backend(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="torchseam")`. Settings come from the environment (see `SeamConfig`).

    `mode` and `options` are those of torch.compile.
    """
    global _named_backend_report
    if _named_backend_report is None:
        _named_backend_report = FusionReport()
    merged = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}
    return _Backend(_new_pass(None, merged, _named_backend_report), merged)(gm, inputs)


def _made_by_torch_compile(compiled: Any) -> bool:
    return isinstance(compiled, torch._dynamo.OptimizedModule) or hasattr(compiled, "_torchdynamo_orig_callable")


def report(compiled: Any) -> FusionReport:
    """What was fused in a compiled model, and why the rest was not.

    Takes what `torchseam.compile` returned, the dict of `inductor_options`, or a model compiled with
    `backend="torchseam"` (these share one report). A model compiles when it first runs: before that
    the report is empty. Raises ValueError for anything else.
    """
    if isinstance(compiled, dict) and isinstance(compiled.get(_POST_PASS), FusionPass):
        return compiled[_POST_PASS].report
    found: FusionReport | None = None
    if _made_by_torch_compile(compiled):
        found = _passes[compiled].report if compiled in _passes else _named_backend_report
    if found is None:
        raise ValueError(
            f"{type(compiled).__name__} was not compiled by torchseam; give what torchseam.compile or "
            "torchseam.inductor_options returned"
        )
    gemms: dict[str, int] = {}
    for module in compiled.modules() if isinstance(compiled, torch.nn.Module) else ():
        if isinstance(module, QuantLinear):
            gemms[module.gemm] = gemms.get(module.gemm, 0) + 1
    return dataclasses.replace(found, gemms=gemms)


def reset() -> None:
    """Close every backend, forget which failed, and forget the shared report of `backend="torchseam"`.

    For tests and long-lived processes. Call it on all ranks, and not while a captured CUDA graph may replay: the next
    seam of each group chooses its backend anew.
    """
    global _named_backend_report
    _named_backend_report = None
    select.reset()
