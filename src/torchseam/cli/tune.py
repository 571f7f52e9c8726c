"""`torchseam tune`: time the launch choices of the kernels on this machine, and keep the winners for later runs."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from torchseam.cli.demo import LOG_VARIABLES
from torchseam.cli.errors import BadInput
from torchseam.cli.launch import launch
from torchseam.cli.preflight import check_compiler, gpus
from torchseam.cli.progress import Steps
from torchseam.cli.tune_tables import show_file, show_search
from torchseam.kernels import tuned_file
from torchseam.kernels.launch import MAX_HIDDEN
from torchseam.kernels.tuned import LOCAL, ONE_SHOT, Shape
from torchseam.seam import SCHEMES, Quant

DEFAULT_HIDDEN = "4096,8192"
DEFAULT_SCHEMES = ",".join(SCHEMES)
DEFAULT_DTYPE, DEFAULT_RANKS = "bf16", 1
_DEFAULTS = {
    "--hidden": DEFAULT_HIDDEN,
    "--scheme": DEFAULT_SCHEMES,
    "--tokens": None,
    "--dtype": DEFAULT_DTYPE,
    "--ranks": DEFAULT_RANKS,
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Four times apart, which is as far as a row of the table reaches (kernels/tuned.py).
LOCAL_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
#: Closer, because parts and pushers depend on T; and one as many as the GPU has multiprocessors, beyond which
#: programs take several rows.
ONE_SHOT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
#: For the ranks: our kernels use no NVLink multicast, whose state can outlive a process that is ended while it holds
#: some.
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
#: What backends/symmetric.py takes.
MOST_RANKS = 8


@dataclass(frozen=True)
class Settings:
    """What to time. tokens None: the defaults above."""

    hidden: tuple[int, ...]
    schemes: tuple[str, ...]
    tokens: tuple[int, ...] | None
    dtype: str

    def shapes(self, kernel: str, world_size: int, tokens: tuple[int, ...]) -> list[Shape]:
        """Every shape, the small ones first."""
        return [
            Shape(kernel, world_size, scheme, self.dtype, hidden, t)
            for scheme, hidden, t in itertools.product(self.schemes, self.hidden, self.tokens or tokens)
        ]


def settings_of(hidden: str, scheme: str, tokens: str | None, dtype: str) -> Settings:
    """The options as values; BadInput for what cannot be."""
    schemes = tuple(_scheme(word.strip()) for word in scheme.split(","))
    hiddens = _numbers("--hidden", hidden)
    dtype_name = DTYPES.get(dtype, dtype)
    if dtype_name not in DTYPES.values():
        raise BadInput(f"--dtype is {dtype!r}; allowed: {', '.join(DTYPES)} (or {', '.join(DTYPES.values())})")
    for name, size in itertools.product(schemes, hiddens):
        if size > MAX_HIDDEN:
            raise BadInput(f"--hidden is {size}; the kernels hold rows of at most {MAX_HIDDEN}")
        unit = max(Quant(name).multiple_of, 8)  # type: ignore[arg-type]
        if size % unit:
            raise BadInput(f"--hidden is {size}; {name} needs a multiple of {unit}")
    return Settings(hiddens, schemes, None if tokens is None else _numbers("--tokens", tokens), dtype_name)


def _scheme(word: str) -> str:
    """A scheme by its name, or without its `fp8_`."""
    for name in (word, f"fp8_{word}"):
        if name in SCHEMES:
            return name
    raise BadInput(f"--scheme has {word!r}; allowed, with commas between them: {', '.join(SCHEMES)}")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise BadInput(f"{option} is {text!r}; give positive whole numbers with commas between them")
    return tuple(sorted({int(word) for word in words}))


def run_tune(
    *, hidden: str, scheme: str, tokens: str | None, dtype: str, ranks: int, show: bool, clear: bool, debug: bool
) -> None:
    """The whole command. Raises BadInput or RankError."""
    if show and clear:
        raise BadInput("--show and --clear cannot go together")
    if show or clear:
        given = {"--hidden": hidden, "--scheme": scheme, "--tokens": tokens, "--dtype": dtype, "--ranks": ranks}
        beside = [option for option, value in given.items() if value != _DEFAULTS[option]]
        if beside:
            raise BadInput(
                f"{' and '.join(beside)} say what to time, and {'--show' if show else '--clear'} times nothing"
            )
        show_file(own_files()) if show else print(cleared())
        return
    settings = settings_of(hidden, scheme, tokens, dtype)
    tuned_file.check_setting()
    check_machine(ranks)
    # Before hours of timing, and not after them.
    path = tuned_file.make_ready(common_machine(ranks))
    steps = Steps()
    try:
        if ranks == 1:
            result = tune_local(settings)
        else:
            for name, value in NO_MULTICAST.items():
                os.environ.setdefault(name, value)
            result = launch(
                tune_rank, ranks, settings, show_output=debug or any(name in os.environ for name in LOG_VARIABLES)
            )
    except BaseException:
        if ranks > 1:
            steps.cut_short()
        if path.exists():
            steps.console.print(f"the shapes that were done are kept in {escape(str(path))}", soft_wrap=True)
        raise
    show_search(*result)


def check_machine(ranks: int) -> None:
    """BadInput unless this machine has a GPU for each rank, and what compiles kernels."""
    if not 1 <= ranks <= MOST_RANKS:
        raise BadInput(f"--ranks is {ranks}; it may be 1 (the local kernel) to {MOST_RANKS}")
    found = gpus()
    if not found:
        raise BadInput(
            "torchseam tune times kernels on a CUDA GPU, and torch finds none on this machine; run it where the model "
            "runs, with a CUDA build of torch (--show and --clear need no GPU)"
        )
    if found < ranks:
        raise BadInput(f"--ranks {ranks} needs {ranks} GPUs, torch finds {found} on this machine; use --ranks {found}")
    check_compiler("cuda")


def common_machine(ranks: int) -> tuned_file.Machine:
    """What the GPUs of all ranks are; BadInput where they are not alike: a table is for one kind, and ranks whose GPUs
    differ would not try the same launches."""
    machines = [tuned_file.machine_of(device) for device in range(ranks)]
    if len(set(machines)) > 1:
        found = ", ".join(f"GPU {i} {m.gpu} ({m.multiprocessors} multiprocessors)" for i, m in enumerate(machines))
        raise BadInput(
            f"--ranks {ranks} would be GPUs that differ: {found}; choose some of one kind with CUDA_VISIBLE_DEVICES"
        )
    return machines[0]


def own_files() -> dict[Path, str]:
    """The file of each kind of GPU that this process sees, with the GPU's name; none without a GPU or Triton."""
    try:
        machines = [tuned_file.machine_of(device) for device in range(gpus())]
    except ImportError:
        return {}
    return {tuned_file.path_of(machine): machine.gpu for machine in machines}


def cleared() -> str:
    """Remove the files; what to say of it."""
    removed = tuned_file.clear()
    if not removed:
        return f"nothing to remove in {tuned_file.folder()}"
    return "\n".join(f"removed {path}" for path in removed)


def tune_local(settings: Settings) -> tuple[Any, ...]:
    """The local kernel on the current GPU; what `show_search` takes."""
    import torch

    from torchseam.tuning.benches import LocalBench
    from torchseam.tuning.search import search

    device = torch.device("cuda", torch.cuda.current_device())
    machine = tuned_file.machine_of(device.index)
    bench = LocalBench(device, machine.multiprocessors)
    shapes = settings.shapes(LOCAL, 1, LOCAL_TOKENS)
    total = sum(len(bench.candidates(shape)) for shape in shapes)
    with Steps().bar(f"Timing the local kernel on {machine.gpu}", total) as tick:
        found = search(shapes, bench, tick, lambda timed: tuned_file.write(machine, [timed.row]))
    return machine, found, tuned_file.path_of(machine), []


def tune_rank(settings: Settings) -> tuple[Any, ...] | None:
    """One rank of the search for the one-shot kernel; rank 0 writes and returns what `show_search` takes."""
    import torch
    import torch.distributed as dist

    from torchseam.backends import base, symmetric
    from torchseam.tuning.benches import OneShotBench
    from torchseam.tuning.search import search

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    cpu_group = dist.new_group(backend="gloo")
    name = dist.distributed_c10d._get_default_group().group_name
    try:
        backend = symmetric.open_on(base.Group(name, rank, size, device))
    except base.Unavailable as error:
        raise BadInput(f"the one-shot kernel cannot run between these {size} GPUs: {error}") from error
    machine = tuned_file.machine_of(device.index)
    bench = OneShotBench(name, cpu_group, backend.channel, device)
    tokens = tuple(sorted({*ONE_SHOT_TOKENS, machine.multiprocessors}))
    shapes = settings.shapes(ONE_SHOT, size, tokens)
    taken = [shape for shape in shapes if bench.takes(shape)]
    total = sum(len(bench.candidates(shape)) for shape in taken)
    with Steps(rank == 0).bar(f"Timing the one-shot kernel on {size} x {machine.gpu}", total) as tick:
        found = search(taken, bench, tick, lambda timed: rank or tuned_file.write(machine, [timed.row]))
    left_out = [shape for shape in shapes if shape not in taken]
    result = None if rank else (machine, found, tuned_file.path_of(machine), left_out)
    dist.barrier()
    backend.close()
    dist.destroy_process_group()
    return result
