"""`torchseam demo`: a real language model, tensor-parallel and quantised, eager and fused side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchseam.cli.launch import launch
from torchseam.cli.preflight import check_compiler, check_numbers, choose_device, prepare, processors, quiet
from torchseam.cli.progress import Steps
from torchseam.config import LOG_VARIABLE

DEFAULT_PROMPT = "The capital of France is"
DEFAULT_TOKENS = 32
#: --quick: enough layers for every kind of seam, few enough to compile in seconds.
QUICK_LAYERS = 2
QUICK_TOKENS = 4
#: Whoever sets one of these wants to read what the ranks write.
LOG_VARIABLES = (LOG_VARIABLE, "TORCH_LOGS")


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


def run_rank(settings: Settings) -> dict[str, Any] | None:
    """One rank's whole run; rank 0 returns the results."""
    import torch
    import torch.distributed as dist

    from torchseam.config import SeamConfig
    from torchseam.integrations import inductor
    from torchseam.integrations.transformers import run
    from torchseam.integrations.transformers.files import ModelFiles
    from torchseam.seam import Quant

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    steps = Steps(enabled=rank == 0)
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, processors() // world_size))
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
        with steps(f"Loading {settings.name} into {_ranks(world_size)} ({device.type})"):
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


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


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
    debug: bool = False,
) -> None:
    """The whole command. Raises BadInput, ModelError or RankError; with `debug` the ranks' own output is shown."""
    steps = Steps()
    tokens = tokens if tokens is not None else QUICK_TOKENS if quick else DEFAULT_TOKENS
    check_numbers(tp, scheme, tokens)
    device = choose_device(device, tp)
    check_compiler(device)
    from torchseam.backends import select
    from torchseam.config import SeamConfig

    select.resolve(SeamConfig(exact=True).backend)  # a ValueError now, not after the model was loaded
    with contextlib.nullcontext() if debug else quiet():
        files, tokenizer, ids = prepare(model, prompt, tokens, tp, steps)
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
    try:
        result = launch(run_rank, tp, settings, show_output=debug or any(name in os.environ for name in LOG_VARIABLES))
    except BaseException:
        steps.cut_short()
        raise
    texts = {run: _continuation(tokenizer, ids, tokens) for run, tokens in result["tokens"].items()}
    if as_json:
        print(json.dumps(_finite(summary(settings, tp, prompt, texts, result)), allow_nan=False))
    else:
        show(settings, tp, prompt, texts, result, tokenizer)


def _continuation(tokenizer: Any, prompt_ids: tuple[int, ...], ids: list[int]) -> str:
    """The text of `ids` up to the first that ends a text, as it follows the prompt.

    Decoded together with the prompt: alone, many tokenizers drop the space before the first word.
    """
    end = next((i for i, token in enumerate(ids) if token in tokenizer.eos_ids), len(ids))
    before = tokenizer.decode(prompt_ids)
    text: str = tokenizer.decode([*prompt_ids, *ids[:end]])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(ids[:end])


def _finite(value: Any) -> Any:
    """`value` with null in the place of what JSON has no word for: infinities, and NaN."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        "unreported": report.unreported,
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
    title = Text(f"{settings.name}, {settings.scheme}, {_ranks(tp)} on {settings.device}")
    note = None
    if settings.layers is not None:
        note = f"--quick: the first {settings.layers} layers only, so the text means nothing"
    text = Text.assemble((prompt, "bold"), texts["fused"])
    console.print(Panel(text, title=title, title_align="left", subtitle=note, subtitle_align="left"))
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
                f"logit {logits['fused'][str(token)]:.6g} fused, {logits['eager'][str(token)]:.6g} eager",
                markup=False,  # a token may look like it
            )
        console.print(
            f"their margin in the eager run is {difference['margin']:.6g}, the largest logit difference "
            f"{comparison['max_logit_diff']:.6g}"
        )
