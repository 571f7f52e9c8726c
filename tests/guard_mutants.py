"""Mutants of compiler/plan.py: for each guard's every `if`, the same guard with that `if` never taken."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchseam.compiler import plan

PREFIX = "_guard_"


@dataclass(frozen=True)
class Mutant:
    """`function` of plan.py without its refusal for `reason` number `index`; `code` replaces it."""

    function: str
    reason: str
    condition: str
    code: Callable[..., Any]

    @property
    def name(self) -> str:
        return f"{self.function}: {self.condition}"


def _refusal(statements: list[ast.stmt]) -> str | None:
    """The reason that a block returns, None when it returns no refusal."""
    if len(statements) != 1 or not isinstance(statements[0], ast.Return):
        return None
    value = statements[0].value
    if not isinstance(value, ast.Tuple) or not ast.unparse(value.elts[0]).startswith("Reason."):
        return None
    return ast.unparse(value.elts[0]).removeprefix("Reason.")


def _compiled(function: ast.FunctionDef) -> Callable[..., Any]:
    """The function in the namespace of plan.py."""
    scope: dict[str, Any] = {}
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], function], [])
    exec(compile(ast.fix_missing_locations(module), plan.__file__, "exec"), vars(plan) | {}, scope)
    return scope[function.name]


def mutants() -> list[Mutant]:
    """One for each `if ...: return Reason...` and each `except ...: return Reason...` of every guard."""
    found = []
    for function in ast.parse(inspect.getsource(plan)).body:
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith(PREFIX):
            continue
        places = [
            (n, node)
            for n, node in enumerate(ast.walk(function))
            if isinstance(node, (ast.If, ast.ExceptHandler)) and _refusal(node.body)
        ]
        for n, node in places:
            changed = copy.deepcopy(function)
            twin = list(ast.walk(changed))[n]
            reason = _refusal(node.body)
            assert reason is not None and isinstance(twin, (ast.If, ast.ExceptHandler))
            if isinstance(twin, ast.If):
                condition = ast.unparse(twin.test)
                twin.test = ast.Constant(False)
            else:
                condition = f"except {ast.unparse(twin.type)}" if twin.type else "except"
                twin.body = [ast.Pass()]
            found.append(Mutant(function.name, reason, condition, _compiled(changed)))
    return found


def returned_reasons() -> int:
    """How often the guards return a reason, counted by itself: none may escape `mutants`."""
    source = ast.parse(inspect.getsource(plan))
    guards = [f for f in source.body if isinstance(f, ast.FunctionDef) and f.name.startswith(PREFIX)]
    return sum(
        isinstance(node, ast.Return)
        and node.value is not None
        and any(ast.unparse(n).startswith("Reason.") for n in ast.walk(node.value) if isinstance(n, ast.Attribute))
        for guard in guards
        for node in ast.walk(guard)
    )
