"""A graph as text that two torch versions print alike: nodes numbered, operators by their short names, shapes and
dtypes of tensors, seams as readable parts, process groups by what they are called in the test."""

from __future__ import annotations

import json
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from torchseam import Quant

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "u8",
}


def _type(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"


def _number(value: float) -> str:
    return f"{value:.6g}"


def _plain(value: Any) -> str:
    """A value of an operator's text without quotes; of a recipe only what is not its scheme's default."""
    if isinstance(value, dict) and "scheme" in value:
        usual = json.loads(Quant(value["scheme"]).to_json())
        other = [f"{k}: {_plain(v)}" for k, v in value.items() if v != usual[k]]
        return " ".join([value["scheme"], *([f"({', '.join(other)})"] if other else [])])
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return _number(value) if isinstance(value, float) else str(value)


class _Printer:
    def __init__(self, graph: Graph, groups: dict[str, str]) -> None:
        self.names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
        self.groups = groups

    def argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self.argument, value)) + "]"
        if isinstance(value, torch.dtype):
            return _DTYPES.get(value, str(value))
        if isinstance(value, float):
            return _number(value)
        if isinstance(value, str):
            if value.startswith("{"):
                data = json.loads(value.replace("'", '"'))
                if data.get("reduce"):
                    data["reduce"]["group"] = self.groups[data["reduce"]["group"]]
                return _plain(data)
            return self.groups.get(value, value)
        return str(value)

    def line(self, node: Node) -> str:
        name, kind = self.names[node], _type(node.meta.get("val"))
        if node.op == "placeholder":
            return f"{name}: {kind or 'input'} = input"
        if node.op == "output":
            return f"return {self.argument(node.args[0])}"
        if node.op == "get_attr":
            return f"{name}: {kind or 'constant'} = constant"
        arguments = [self.argument(a) for a in node.args]
        arguments += [f"{k}={self.argument(v)}" for k, v in node.kwargs.items()]
        if node.target is operator.getitem:
            return f"{name}: {kind} = {arguments[0]}[{arguments[1]}]"
        operator_name = str(node.target).removesuffix(".default")
        return f"{name}{': ' + kind if kind else ''} = {operator_name}({', '.join(arguments)})"


def as_text(graph: Graph, groups: dict[str, str]) -> str:
    """The graph, one node a line. `groups` gives each process group's name in the text."""
    printer = _Printer(graph, groups)
    return "\n".join(printer.line(node) for node in graph.nodes)
