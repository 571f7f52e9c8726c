"""`symmetric`: our own fused collectives over symmetric memory, peer to peer, each in one kernel.

For NVIDIA GPUs of one machine that reach each other's memory (NVLink or PCIe). NVLink multicast is not used.
Sums in rank order, so the bits are those of DESIGN section 4, rule 1, on every rank, whichever kernel runs: one-shot or
two-shot, as `algorithms` chooses.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchseam.backends import algorithms
from torchseam.backends import local as local_backend
from torchseam.backends.algorithms import Algorithm, Choice, Model
from torchseam.backends.base import Backend, Group, Kind, Unavailable, agree, host, verdict
from torchseam.backends.tuned import agreed_table
from torchseam.kernels.launch import OneShot
from torchseam.kernels.tuned import ONE_SHOT, Table
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

_log = logging.getLogger(__name__)

NAME = "symmetric"
#: Seconds after which a wait for another rank stops the kernel and says who waited for whom. Not set: for ever.
WATCHDOG_VARIABLE = "TORCHSEAM_WATCHDOG"

#: Two-shot runs where this is 1 on every rank, and a sharded residual with it. Off until `one_gpu_check.py` has been
#: seen to pass on a GPU: on 2026-12-01 one kernel was wrong, which is mended since (`packets._poll`) and not run again.
TWO_SHOT_VARIABLE = "TORCHSEAM_TWO_SHOT"

_MOST_RANKS = 8
#: `st.relaxed.sys` and vectors of it.
_LEAST_CAPABILITY = (8, 0)
#: Seconds that the self-test may take; a push takes microseconds.
_SELF_TEST_TIMEOUT = 10.0
#: Seconds between two looks at what the kernels wrote for the host.
_WATCHDOG_PERIOD = 0.2


def probe(group: Group) -> str | None:
    """Why this rank could not run it, or None (`base.Kind.probe`)."""
    if group.device.type != "cuda":
        return f"the model is on {group.device.type}; it needs CUDA GPUs"
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs; this torch was built for AMD"
    if not 2 <= group.world_size <= _MOST_RANKS:
        return f"the group has {group.world_size} ranks; it takes 2 to {_MOST_RANKS}"
    capability = torch.cuda.get_device_capability(group.device)
    if capability < _LEAST_CAPABILITY:
        return f"the GPU's compute capability is {capability}; it needs {_LEAST_CAPABILITY}"
    try:
        import torchseam.kernels.one_shot  # noqa: F401
    except Exception as error:  # a broken installation of Triton raises more than ImportError
        return f"its kernel cannot be imported ({type(error).__name__}: {error})"
    return None


def open_on(group: Group) -> Symmetric:
    """Collective (`base.Kind.open`)."""
    capability = _check_peers(group)
    _check_watchdog(group)
    from torchseam.backends import workspace

    tuned = agreed_table(group)
    off = verdict(group, None if two_shot_allowed() else f"two-shot is off ({TWO_SHOT_VARIABLE} is not 1)")
    made = Symmetric(group, workspace.create(group), tuned, capability, no_two_shot=off)
    _require(made, "one_shot")
    if off is not None:
        return made
    failure = verdict(group, made.self_test("two_shot"))
    if failure is None:
        return made
    why = f"two-shot is switched off, its self-test failed ({failure})"
    _log.error("group %s: %s; all calls take one-shot", group.name, why)
    # A word that somebody gave up waiting for may still come: one-shot needs buffers that two-shot never used.
    made.close()
    made = Symmetric(group, workspace.create(group), tuned, capability, no_two_shot=why)
    _require(made, "one_shot")
    return made


def two_shot_allowed() -> bool:
    """Whether this process may run the two-shot kernel."""
    return os.environ.get(TWO_SHOT_VARIABLE) == "1"


def _require(made: Symmetric, algorithm: Algorithm) -> None:
    """`Unavailable` on every rank, and nothing held, unless all pass the self-test."""
    failure = verdict(made.group, made.self_test(algorithm))
    if failure is not None:
        made.close()
        raise Unavailable(f"its self-test failed ({failure})")


def missing() -> str | None:
    """What this machine lacks for it on any group, or None (`base.Kind.missing`)."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    return probe(Group(NAME, 0, 2, torch.device("cuda", torch.cuda.current_device())))


KIND = Kind(NAME, probe, open_on, missing)


def _check_watchdog(group: Group) -> None:
    """`Unavailable` on every rank where one of them cannot read its setting: before anything is shared, so that the
    others do not go on into a collective without it."""
    why = None
    try:
        watchdog_seconds()
    except ValueError as error:
        why = str(error)
    objection = verdict(group, why)
    if objection is not None:
        raise Unavailable(objection)


def _check_peers(group: Group) -> tuple[int, int]:
    """One machine, and GPUs that reach each other; `Unavailable` on every rank otherwise.

    Returns the lowest compute capability of the group.
    """
    uuid = str(torch.cuda.get_device_properties(group.device).uuid)
    own = torch.cuda.get_device_capability(group.device)
    ranks = agree(group, {"machine": host(), "uuid": uuid, "capability": own})
    machines = {rank["machine"] for rank in ranks}
    if len(machines) > 1:
        raise Unavailable(f"the group's ranks are on {len(machines)} machines; it needs one")
    uuids = [rank["uuid"] for rank in ranks]
    if len(set(uuids)) < len(uuids):
        raise Unavailable("two ranks share a GPU; each needs its own")
    visible = {str(torch.cuda.get_device_properties(d).uuid): d for d in range(torch.cuda.device_count())}
    cut_off = [
        str(peer)
        for peer, name in enumerate(uuids)
        if peer != group.rank
        and name in visible
        and not torch.cuda.can_device_access_peer(group.device.index, visible[name])
    ]
    why = f"no peer-to-peer access to the GPUs of ranks {', '.join(cut_off)}" if cut_off else None
    objection = verdict(group, why)
    if objection is not None:
        raise Unavailable(objection)
    major, minor = min(rank["capability"] for rank in ranks)
    return major, minor


def watchdog_seconds() -> float:
    """What TORCHSEAM_WATCHDOG says; 0 when it is not set. ValueError for what is no number of seconds."""
    text = os.environ.get(WATCHDOG_VARIABLE, "").strip() or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{WATCHDOG_VARIABLE} is {text!r}; give seconds (such as 30), or 0 for no watchdog")
    return seconds


class Symmetric(Backend):
    """The backend, open on one group. Its calls must follow each other: one stream, or ordered streams."""

    name = NAME

    def __init__(
        self,
        group: Group,
        workspace: Any,
        tuned: Table,
        capability: tuple[int, int],
        *,
        no_two_shot: str | None = None,
        model: Model = algorithms.MODEL,
    ) -> None:
        """All but `workspace` must be the same on all ranks of the group, or they would run different kernels.

        capability: the lowest of the group. no_two_shot: why two-shot is never to run, None where it may.
        """
        from torchseam.kernels.channel import Watch

        channel = workspace.channel
        self.group = group
        self.remarks: list[str] = [] if no_two_shot is None else [no_two_shot]
        self._no_two_shot = no_two_shot
        self._workspace = workspace
        self._choose = algorithms.chooser(
            capability, group.world_size, channel.slot_bytes, two_shot=no_two_shot is None, model=model
        )
        self._tuned = tuned.chooser(ONE_SHOT, group.world_size, channel.multiprocessors)
        # Pinned: the kernels write there, and it can be read when they have stopped.
        self._mailbox = torch.zeros(1, dtype=torch.int64, pin_memory=group.device.type == "cuda")
        self._watch = Watch(watchdog_seconds(), self._mailbox.data_ptr())
        self._stream: torch.cuda.Stream | None = None
        self._closed = threading.Event()
        if self._watch.timeout:
            threading.Thread(target=self._look, name="torchseam-watchdog", daemon=True).start()

    def choice(self, seam: Seam, operands: Operands) -> Choice:
        """How a call runs: the same on all ranks, of what is the same in their calls."""
        x, weight = operands.x, operands.weight
        hidden = x.shape[-1]
        weight_dtype = None if weight is None else weight.dtype
        return self._choose(seam.to_json(), x.numel() // hidden, hidden, x.dtype, weight_dtype)

    def refuses(self, seam: Seam, operands: Operands) -> str | None:
        """`base.Backend.refuses`: the same on all ranks."""
        from torchseam.kernels import rows

        x = operands.x
        if not local_backend.has_kernel_for(x, seam.quants):
            return "the Triton kernels cannot take this seam"
        unsupported = rows.unsupported(x)
        if unsupported is not None:
            return unsupported
        choice = self.choice(seam, operands)
        if choice.algorithm == "two_shot" and self._no_two_shot is not None:
            return f"a sharded residual needs two-shot, and {self._no_two_shot}"
        capacity = self._workspace.channel.slot_bytes
        if choice.slot_bytes > capacity:
            name = choice.algorithm.replace("_", "-")
            return f"{name} needs {choice.slot_bytes} bytes of a slot of the workspace, which has {capacity}"
        return None

    def run(self, seam: Seam, operands: Operands) -> list[Tensor]:
        """`base.Backend.run`."""
        self._follow_last_call()
        return self._launch(self.choice(seam, operands).algorithm, seam, operands, self._watch)

    def _launch(self, algorithm: Algorithm, seam: Seam, operands: Operands, watch: Any) -> list[Tensor]:
        from torchseam.kernels import one_shot, two_shot

        channel = self._workspace.channel
        if algorithm == "two_shot":
            return two_shot.run(seam, operands, channel, watch=watch)
        launch = self._tuned_launch(seam, operands.x)
        return one_shot.run(seam, operands, channel, launch=launch, watch=watch)

    def _tuned_launch(self, seam: Seam, x: Tensor) -> OneShot | None:
        """The same on all ranks: of what is the same in their calls, and of a table that they agreed on."""
        if self._tuned is None or not seam.quants:
            return None
        hidden, quant = x.shape[-1], seam.quants[0]
        launch = self._tuned(x.numel() // hidden, hidden, x.dtype, quant.scheme, quant.multiple_of)
        return launch if isinstance(launch, OneShot) else None

    @property
    def channel(self) -> Any:
        """What the kernels are given of this group (kernels/channel.py)."""
        return self._workspace.channel

    def memory(self) -> int:
        """`base.Backend.memory`."""
        size: int = self._workspace.memory()
        return size

    def close(self) -> None:
        """`base.Backend.close`."""
        self._closed.set()
        self._workspace.close()

    def self_test(self, algorithm: Algorithm) -> str | None:
        """What is wrong with a small call of known result, or None. Collective; waits of its kernels are bounded."""
        from torchseam.kernels import channel, local

        device, size = self.group.device, self.group.world_size
        watch = dataclasses.replace(self._watch, timeout=_SELF_TEST_TIMEOUT, trap=False)
        seam = Seam(
            Norm(1e-6, "none"),
            reduce=Reduce(self.group.name),
            residual=True,
            quants=(Quant("fp8_token"),),
            outputs=("residual", "norm"),
        )
        # Every rank owns a row of two-shot's, and one owns two.
        pattern = torch.arange((size + 1) * 1024, device=device).reshape(size + 1, 1024)
        x = (pattern % (7 + self.group.rank) - 3).bfloat16()
        residual = (pattern % 5).bfloat16()
        try:
            total = x.float()
            dist.all_reduce(total, group=self.group.process_group)
            # Sums of small whole numbers: no order of them can be told from another.
            expected = local.run(seam.local(), Operands(total.bfloat16(), residual))
            # Three calls: both halves of the buffer, and one of them again.
            for _ in range(3):
                got = self._launch(algorithm, seam, Operands(x, residual), watch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if record := int(self._mailbox):
            return channel.explain(record)
        same = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, expected, strict=True)]
        return None if all(same) else "its results are not those of torch.distributed's sum"

    def _follow_last_call(self) -> None:
        """The kernels of one workspace must not overlap: wait for the call before, when it was on another stream."""
        if self.group.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.group.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _look(self) -> None:
        """Say what a stopped kernel left for the host: CUDA itself only says that one stopped."""
        from torchseam.kernels import channel

        while not self._closed.wait(_WATCHDOG_PERIOD):
            if record := int(self._mailbox):
                _log.error("%s (%.0f s); the kernel was stopped", channel.explain(record), self._watch.timeout)
                return
