"""The peers of the local kernel: what Inductor makes of the eager reference, compiled ahead by several processes.

Compiling is most of what a run of `local.py` takes. `compile_ahead` fills the disk caches of Inductor and Triton from
several processes at once; what they tuned while they shared the GPU is not kept: the run that measures tunes again,
alone on the GPU.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch._inductor.config as inductor
from measuring import SCHEMES
from torch import Tensor

from torchseam import reference
from torchseam.kernels import local
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Seam
from torchseam.tuning.timing import EPS, operand_sets, seam_of

Call = Callable[[Operands], object]
#: (scheme, hidden, tokens)
Shape = tuple[str, int, int]

#: Add and norm, as the first of two kernels.
NORM_SEAM = Seam(norm=Norm(EPS), residual=True, outputs=("residual", "norm"))


class Peers:
    """Compiled functions; one static shape after the other, each compiled when it is first called."""

    def __init__(self) -> None:
        # What the processes of `compile_ahead` tuned, several on one GPU, must not be taken for the best.
        inductor.autotune_local_cache = False
        options = {"mode": "max-autotune-no-cudagraphs", "dynamic": False, "fullgraph": True}
        self._whole = torch.compile(reference.run, **options)
        self._quantize = torch.compile(reference.quantize, **options)

    def inductor(self, quant: Quant) -> Call:
        """The eager reference in one piece: Inductor fuses what it can."""
        seam = seam_of(quant)
        return lambda o: self._whole(seam, o)

    def unfused(self, quant: Quant) -> Call:
        """The pair that runs where nothing fuses across: add and norm, then the quantiser."""

        def run(o: Operands) -> object:
            h, y = self._whole(NORM_SEAM, o)
            return [h, *self._quantize(y, quant, *o.scales)]

        return run

    def forget(self) -> None:
        """Drop the compiled code, before a limit on how often one function may be compiled is met."""
        torch._dynamo.reset()


def compile_ahead(shapes: Sequence[Shape], processes: int, timeout: float | None) -> tuple[int, int]:
    """(shapes compiled, shapes whose compilation failed) by so many processes that share the GPU, in `timeout` seconds.

    What is under way when the time is over is waited for; the rest is left to the run that measures. Why the first
    failure failed is printed.
    """
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_start
    )
    firsts = {(hidden, tokens): scheme for scheme, hidden, tokens in reversed(shapes)}
    futures = [pool.submit(_compile, shape, firsts[shape[1:]] == shape[0]) for shape in shapes]
    concurrent.futures.wait(futures, timeout)
    pool.shutdown(cancel_futures=True)
    ended = [f for f in futures if not f.cancelled()]
    failures = [error for f in ended if (error := f.exception()) is not None]
    if failures:
        print(f"compiling ahead: {type(failures[0]).__name__}: {failures[0]}", file=sys.stderr)
    return len(ended) - len(failures), len(failures)


def _start() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    inductor.compile_threads = 1


def _compile(shape: Shape, with_norm: bool) -> None:
    """Call everything once that is timed at this shape; `with_norm`: the norm of the unfused pair too."""
    scheme, hidden, tokens = shape
    quant, peers = SCHEMES[scheme], Peers()
    operands = operand_sets(quant, hidden, tokens)[0]
    local.run(seam_of(quant), operands)
    peers.inductor(quant)(operands)
    normed: Tensor = peers._whole(NORM_SEAM, operands)[1] if with_norm else operands.x
    peers._quantize(normed, quant, *operands.scales)
    torch.cuda.synchronize()
    peers.forget()
    # The processes share the GPU's memory: what one has cached, another cannot have.
    torch.cuda.empty_cache()
