"""Compiles the collective kernels for GPUs that are not there, as `run` would launch them. Not a test module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from kernel_builds import disassembled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from torchseam.kernels import launch as launches
from torchseam.kernels import local
from torchseam.kernels.channel import Channel
from torchseam.operands import Operands
from torchseam.seam import Seam

#: Of an H200.
MULTIPROCESSORS = 132
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "enable_fp_fusion", "launch_pdl")
#: Those that the launcher passes as 64 bits, whatever their value of the day.
_WIDE = ("mailbox", "timeout")


@dataclass(frozen=True)
class Built:
    """What a kernel became."""

    ptx: str
    ttgir: str
    sass: str
    registers: int
    stack: int


def arguments_of(
    module: ModuleType, kernel: str, seam: Seam, operands: Operands, world_size: int, launch: Any, refused_too: bool
) -> dict:
    """What `module.run` passes to its kernel on the second of `world_size` ranks."""
    passed: list[dict[str, Any]] = []

    class Recorder:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda **arguments: passed.append(arguments)

    channel = Channel(
        rank=1,
        world_size=world_size,
        addresses=torch.zeros(world_size, dtype=torch.int64),
        counter=torch.zeros(1, dtype=torch.int64),
        slots=torch.zeros(1, dtype=torch.int32),
        slot_bytes=1 << 40,
        multiprocessors=MULTIPROCESSORS,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, kernel, Recorder())
        if refused_too:
            patch.setattr(launches, "check_threads", lambda *_: None)
        module.run(seam, operands, channel, launch=launch)
    return passed[0]


def build(
    module: ModuleType,
    kernel: str,
    seam: Seam,
    operands: Operands,
    world_size: int,
    arch: int,
    *,
    launch: Any = None,
    watch: bool = False,
    refused_too: bool = False,
) -> Built:
    """The kernel of `module` for an NVIDIA GPU of compute capability `arch`; `refused_too`: with too many threads."""
    arguments = arguments_of(module, kernel, seam, operands, world_size, launch, refused_too)
    options = {name: arguments.pop(name) for name in _OPTIONS if name in arguments}
    pdl = arch >= 90
    arguments.update(PTX=True, NATIVE=local.native_level(divmod(arch, 10)), PDL=pdl, WATCH=watch)
    if pdl:
        options["launch_pdl"] = True
    function: JITFunction = getattr(module, kernel)
    names = function.arg_names
    free = {names[i] if isinstance(i, int) else i for i in function.do_not_specialize}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name.isupper() or value is None or (name not in free and value == 1):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i64" if name in _WIDE else "i32"
            if name not in free and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", disassembled(compiled, "cuobjdump", "-res-usage"))
    assert usage
    sass = disassembled(compiled, "nvdisasm", "-c")
    return Built(compiled.asm["ptx"], compiled.asm["ttgir"], sass, int(usage[1]), int(usage[2]))


def shared_packets(ttgir: str) -> list[str]:
    """Stores of packets (and tags) whose lanes several threads hold: each of these would store them."""
    layouts = dict(re.findall(r"(#\w+) = #ttg\.(blocked<\{.*?\}>|linear<\{.*?\}>|slice<\{.*?\}>)\n", ttgir))
    stores = re.findall(r'elementwise_inline_asm "[^"]*\bst\.relaxed.*?-> tensor<(\d+)xi32, (#\w+)>', ttgir)
    assert stores
    broken = []
    for lanes, layout in stores:
        text = layouts[layout]
        if text.startswith("blocked"):
            sizes = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[(\d+)\]", text)
            held = 1
            for size in sizes:
                held *= int(size)
            shared = int(lanes) < held
        else:
            shared = "[0]" in text.replace(" ", "") or not text.startswith("linear")
        if shared:
            broken.append(f"{lanes} lanes in {text}")
    return broken


def scattered_polls(sass: str) -> tuple[int, list[str]]:
    """How many loops wait for packets, and those behind which the threads of a warp do not meet again at once.

    The last thing that a loop does is a branch back to its label. Behind it must come what makes threads wait for
    each other, before they exchange anything (SHFL), pass a barrier (BAR), wait for other packets or are done.
    """
    lines = sass.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\.L_\w+):", line))}
    polls, scattered = 0, []
    for end, line in enumerate(lines):
        branch = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        start = labels.get(branch[1], end) if branch else end
        body = lines[start:end]
        if start >= end or not any("STRONG" in x and "LD" in x for x in body) or any("BAR.SYNC" in x for x in body):
            continue
        polls += 1
        behind = next((x for x in lines[end + 1 :] if re.search(_MEETING + "|" + _TOO_LATE, x)), "")
        if not re.search(_MEETING, behind):
            scattered.append("\n".join(lines[start : end + 20]))
    return polls, scattered


#: Instructions at which threads of a warp wait for each other, and those before which they must have.
_MEETING = r"\bBSYNC\b|\bWARPSYNC\b|\bBRA\.DIV\b"
_TOO_LATE = r"\bSHFL\b|\bBAR\.|\bLDG?\.\S*STRONG|\bEXIT\b"
