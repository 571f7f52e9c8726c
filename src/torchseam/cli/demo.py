"""`torchseam demo`: a real language model, tensor-parallel and quantised, eager and fused side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchseam.cli.errors import BadInput
from torchseam.cli.launch import launch
from torchseam.cli.progress import Steps

#: What --scheme takes: no quantisation, or a scheme of torchseam.
SCHEMES = ("none", "fp8_static", "fp8_token", "fp8_group", "nvfp4")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_PROMPT = "The capital of France is"
DEFAULT_TOKENS = 32
#: --quick: enough layers for every kind of seam, few enough to compile in seconds.
QUICK_LAYERS = 2
QUICK_TOKENS = 4


@dataclass(frozen=True)
class Settings:
    """What the ranks need to know. `directory` and `tokenizer` are those of the prepared model."""

    directory: str
    source: str
    name: str
    tokenizer: str
    prompt_ids: tuple[int, ...]
    scheme: str
    device: str
    tokens: int
    layers: int | None


def choose_device(device: str, ranks: int) -> str:
    """`cpu` or `cuda` for `--device`; BadInput when the machine has too few of them for the ranks."""
    import torch

    if device not in DEVICES:
        raise BadInput(f"--device is {device!r}; allowed: {', '.join(DEVICES)}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if gpus >= ranks else "cpu"
    if device == "cuda" and gpus < ranks:
        raise BadInput(
            f"--tp {ranks} needs {ranks} GPUs, this machine has {gpus}; use --tp {max(gpus, 1)} or --device cpu"
        )
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device == "cpu" and processors < ranks:
        raise BadInput(f"--tp {ranks} needs {ranks} processors, this machine has {processors}; use --tp {processors}")
    return device


def check_compiler(device: str) -> None:
    """BadInput when Inductor would find no C++ compiler (it writes C++ for the CPU)."""
    if device != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        compiler = ""
    if not compiler or shutil.which(compiler) is None:
        raise BadInput(
            "no C++ compiler was found; torch.compile needs one on the CPU: install g++ or clang++ "
            "(Debian, Ubuntu: apt-get install g++), or name yours in the environment variable CXX"
        )


def check_numbers(tp: int, scheme: str, tokens: int) -> None:
    """BadInput for a scheme, a number of ranks or of tokens that cannot be."""
    if scheme not in SCHEMES:
        raise BadInput(f"--scheme is {scheme!r}; allowed: {', '.join(SCHEMES)}")
    if tp < 1:
        raise BadInput(f"--tp is {tp}; it must be at least 1")
    if tokens < 1:
        raise BadInput(f"--tokens is {tokens}; it must be at least 1")


def prepare(model: Path | None, prompt: str, steps: Steps, ranks: int) -> tuple[Any, Any, tuple[int, ...]]:
    """(files, tokeniser, prompt's token ids); checks that the model can be shared by the ranks."""
    from torchseam.integrations.transformers import store
    from torchseam.integrations.transformers.shard import check_sizes
    from torchseam.integrations.transformers.tokenizer import load_tokenizer

    files = store.default_model(steps) if model is None else store.open_model(model, steps)
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(files.directory, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise store.ModelError(f"{files.source}: transformers cannot read its config.json: {error}") from error
    check_sizes(config, ranks)
    with steps("Loading the tokeniser"):
        tokenizer = load_tokenizer(files)
        ids = tuple(tokenizer.encode(prompt))
    if not ids:
        raise BadInput("--prompt gives no tokens; write some text")
    return files, tokenizer, ids


def run_rank(settings: Settings) -> dict[str, Any] | None:
    """One rank's whole run; rank 0 returns the results."""
    import torch
    import torch.distributed as dist

    from torchseam.config import SeamConfig
    from torchseam.integrations import inductor
    from torchseam.integrations.transformers import run
    from torchseam.integrations.transformers.store import ModelFiles
    from torchseam.seam import Quant

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    steps = Steps(enabled=rank == 0)
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    files = ModelFiles(Path(settings.directory), settings.name, settings.tokenizer, Path(settings.source))
    quant = None if settings.scheme == "none" else Quant(settings.scheme)  # type: ignore[arg-type]
    prompt = torch.tensor([settings.prompt_ids], device=device)
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal started
        seconds[name] = round(time.perf_counter() - started, 3)
        started = time.perf_counter()

    with torch.no_grad():
        with steps(f"Loading {settings.name} into {world_size} ranks ({device.type})"):
            model = run.load_model(files, device, settings.layers)
        with steps(f"Sharding and quantising ({settings.scheme})"):
            run.shard_and_quantize(model, quant, prompt)
        lap("load")
        with steps.bar("Generating with the eager model", settings.tokens) as tick:
            eager = run.generate(model, model.config, prompt, settings.tokens, tick)
        lap("eager")
        compiled = inductor.compile(model, config=SeamConfig(exact=True), fullgraph=True)
        with steps("Compiling with fused seams (prompt graph, token graph)"):
length = prompt.shape[1] + settings.tokens
            run.generate(compiled, model.config, prompt, min(2, settings.tokens), cache_length=length)
        lap("compile")
        with steps.bar("Generating with the fused model", settings.tokens) as tick:
            fused = run.generate(compiled, model.config, prompt, settings.tokens, tick)
        lap("fused")
    report = inductor.report(compiled)
    comparison = run.compare(fused, eager)
    dist.destroy_process_group()
    if rank:
        return None
    return {
        "report": report,
        "comparison": dataclasses.asdict(comparison),
        "tokens": {"fused": fused.tokens, "eager": eager.tokens},
        "seconds": seconds,
        "seconds_per_token": {
            "eager": _median(eager.seconds[1:]),
            "fused": _median(fused.seconds[1:]),
        },
    }


def _median(values: list[float]) -> float | None:
    return round(sorted(values)[len(values) // 2], 4) if values else None


def run_demo(
    *,
    prompt: str,
    tp: int,
    scheme: str,
    model: Path | None,
    device: str,
    tokens: int | None,
    quick: bool,
    as_json: bool,
) -> None:
    """The whole command. Raises BadInput, ModelError or RankError."""
    steps = Steps()
    tokens = tokens if tokens is not None else QUICK_TOKENS if quick else DEFAULT_TOKENS
    check_numbers(tp, scheme, tokens)
    device = choose_device(device, tp)
    check_compiler(device)
    files, tokenizer, ids = prepare(model, prompt, steps, tp)
    settings = Settings(
        directory=str(files.directory),
        source=str(files.source),
        name=files.name,
        tokenizer=files.tokenizer,
        prompt_ids=ids,
        scheme=scheme,
        device=device,
        tokens=tokens,
        layers=QUICK_LAYERS if quick else None,
    )
    result = launch(run_rank, tp, settings)
    texts = {run: tokenizer.decode(_until_end(ids, tokenizer.eos_ids)) for run, ids in result["tokens"].items()}
    if as_json:
        print(json.dumps(summary(settings, tp, prompt, texts, result)))
    else:
        show(settings, tp, prompt, texts, result, tokenizer)


def _until_end(ids: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids))
    return ids[:end]


def summary(settings: Settings, tp: int, prompt: str, texts: dict[str, str], result: dict[str, Any]) -> dict[str, Any]:
    """What `--json` prints."""
    report, comparison = result["report"], result["comparison"]
    return {
        "model": settings.name,
        "scheme": settings.scheme,
        "tp": tp,
        "device": settings.device,
        "prompt": prompt,
        "text": texts["fused"],
        "eager_text": texts["eager"],
        "fused": report.fused,
        "not_fused": report.not_fused,
        "graphs": len(report.graphs),
        "kinds": dict(report.kinds()),
        "refusals": [f"{r.part}: {r.reason.value}: {r.detail}" for r in report.refusals],
        "gemms": report.gemms,
        **comparison,
        "seconds": result["seconds"],
        "seconds_per_token": result["seconds_per_token"],
    }


def show(
    settings: Settings, tp: int, prompt: str, texts: dict[str, str], result: dict[str, Any], tokenizer: Any
) -> None:
    """What people see: the text, the fusion table, whether the runs agree, the times."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console()
    comparison, seconds, each = result["comparison"], result["seconds"], result["seconds_per_token"]
    title = f"{settings.name}, {settings.scheme}, {tp} ranks on {settings.device}"
    if settings.layers is not None:
        title += f", first {settings.layers} layers only (--quick: the text means nothing)"
    console.print(Panel(Text.assemble((prompt, "bold"), texts["fused"]), title=title, title_align="left"))
    console.print(result["report"])
    table = Table(title="fused against eager, the same shards", title_justify="left")
    for name in ("", "fused", "eager"):
        table.add_column(name)
    equal = "equal" if comparison["tokens_equal"] else "different"
    table.add_row("tokens", equal, f"{settings.tokens}")
    table.add_row("largest logit difference", f"{comparison['max_logit_diff']:.6g}", "")
    table.add_row("seconds for each token (median)", str(each["fused"]), str(each["eager"]))
    table.add_row("seconds, load / compile", f"{seconds['compile']:.1f} to compile", f"{seconds['load']:.1f} to load")
    console.print(table)
    difference = comparison["first_difference"]
    if difference:
        for run, token in difference["tokens"].items():
            logits = difference["logits"]
            console.print(
                f"step {difference['step']}: {run} took {token} {tokenizer.decode([token])!r}: "
                f"logit {logits['fused'][str(token)]:.6g} fused, {logits['eager'][str(token)]:.6g} eager"
            )
        console.print(
            f"their margin in the eager run is {difference['margin']:.6g}, the largest logit difference "
            f"{comparison['max_logit_diff']:.6g}"
        )
