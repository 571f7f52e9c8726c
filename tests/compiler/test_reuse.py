"""Memory that a seam writes into: what Inductor's generated code does with it, and that values stay eager's."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode

import torchseam
from blocks import HIDDEN, GemmaNorm, LlamaNorm, same_bits
from graphs import run_fused, seam_calls
from pretend_group import pretend_group
from torchseam import Quant, SeamConfig, ops
from torchseam.compiler import reuse
from torchseam.seam import Reduce, Seam

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_dynamo")

FP8 = Quant("fp8_static")
SCALE = torch.tensor(0.01)
BOTH = ("x", "residual")
LEFTOVERS = ("copy_(", "clone", "auto_functionalized", "as_strided")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty compile cache for each test, so that the pass runs and code is generated."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with torch.no_grad():
        yield


@pytest.fixture
def reduce(one_rank) -> Callable[[Tensor], Tensor]:
    """A sum over three equal ranks: one that is forgotten or done twice shows in the values."""
    name = pretend_group(3)
    return lambda x: funcol.all_reduce(x, "sum", name)


def rows(seed: int, *lead: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(lead or (2, 3)), HIDDEN, generator=generator).bfloat16()


def norms(count: int, kind: type[LlamaNorm] = LlamaNorm) -> list[LlamaNorm]:
    generator = torch.Generator().manual_seed(7)
    return [kind((torch.rand(HIDDEN, generator=generator) + 0.5).bfloat16()) for _ in range(count)]


@dataclass(frozen=True)
class Call:
    """One seam in the generated code: the buffers that it reads, and which of these arguments it overwrites."""

    seam: Seam
    x: str
    residual: str | None
    overwrites: tuple[str, ...]


def _buffer(node: ast.expr) -> str | None:
    """The buffer behind an argument: `buf4` of `reinterpret_tensor(buf4, ...)`."""
    if isinstance(node, ast.Call):
        return _buffer(node.args[0])
    return node.id if isinstance(node, ast.Name) else None


def calls_in(code: str) -> list[Call]:
    """The seams that the generated wrapper runs, in order."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or "torchseam.seam" not in ast.unparse(node.func):
            continue
        seam = Seam.from_json(ast.literal_eval(node.args[5]))
        target = ast.unparse(node.func)
        overwrites = tuple(target.split(".")[-1].split("_")[:-1]) if ".seam_." in target else ()
        found.append((node.lineno, Call(seam, _buffer(node.args[0]), _buffer(node.args[1]), overwrites)))
    return [call for _, call in sorted(found, key=lambda pair: pair[0])]


def compiled_calls(function: Callable[..., tuple[Tensor, ...]], *args: Tensor, **how) -> list[Call]:
    """Compile, hold the values to eager's and the inputs to what they were; returns the seams of the generated code."""
    before = [a.clone() for a in args]
    want = function(*args)
    compiled = torchseam.compile(function, config=SeamConfig(exact=True), fullgraph=True, **how)
    got, (code,) = run_and_get_code(compiled, *args)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    assert all(same_bits(a, b) for a, b in zip(args, before, strict=True)), "an input was overwritten"
    body = code.split("def call(")[1].split("def get_args")[0]
    for leftover in LEFTOVERS:
        assert leftover not in body, f"{leftover} in the generated code:\n{body}"
    return calls_in(code)


def model(
    reduce: Callable[[Tensor], Tensor], layers: int = 3, sandwich: bool = False, returned: bool = False
) -> Callable[..., tuple[Tensor, ...]]:
    """Embedding, `layers` seams with a matrix product before each, static FP8 between."""
    first, *rest = norms(layers + 1)
    inner = norms(layers, GemmaNorm) if sandwich else []
    matrices = [torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(layers)]
    halves = [(m / HIDDEN**0.5).bfloat16() for m in matrices]

    def forward(ids: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        h = torch.nn.functional.embedding(ids, table)
        y = first(h)
        for i, norm in enumerate(rest):
            (codes,) = ops.quantize(y, FP8, SCALE)
            z = reduce(codes.to(h.dtype) @ halves[i])
            h = h + (inner[i](z) if sandwich else z)
            y = norm(h)
        return (y, h) if returned else (y,)

    return forward


TABLE = (torch.tensor([[1, 5, 2], [0, 3, 3]]), rows(0, 9))


@pytest.mark.parametrize("returned", [False, True], ids=["", "last_residual_returned"])
@pytest.mark.parametrize("sandwich", [False, True], ids=["plain", "sandwich"])
def test_one_buffer_is_the_residual_of_every_layer(sandwich, returned, reduce):
    first, *layers = compiled_calls(model(reduce, sandwich=sandwich, returned=returned), *TABLE)
    assert first.seam.reduce is None and first.residual is None
    assert len(layers) == 3 and all((c.seam.inner_norm is not None) == sandwich for c in layers)
    (stream,) = {c.residual for c in layers}
    assert first.x == stream
    assert [c.overwrites for c in layers] == [BOTH, BOTH, BOTH if returned else ("x",)]
    assert all(c.x != stream for c in layers)


def test_a_residual_that_is_read_again_is_not_overwritten(reduce):
    """A skip connection over two layers."""
    a, b = norms(2)

    def forward(x, y):
        h = y * 2
        one = h + reduce(x * 2)
        two = one + reduce(a(one) * 2)
        return b(two), two + h, one * 3

    first, second = compiled_calls(forward, rows(0), rows(1))
    assert first.overwrites == second.overwrites == ("x",)


def gemm(width: int = HIDDEN) -> Tensor:
    return (torch.randn(width, HIDDEN, generator=torch.Generator().manual_seed(3)) / 12).bfloat16()


def read_before_and_used_after(reduce) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]]:
    """What is computed of a residual, or of partial sums, before the seam, and used behind it: Inductor may compute it
    as late as that, from memory that the seam has overwritten by then."""
    (norm,), weight = norms(1), gemm()

    def gate(x, y):
        h = y * 2
        g = torch.sigmoid(h)
        s = h + reduce(x @ weight)
        return g * norm(s), s

    def gate_of_a_gemm(x, y):
        h = y @ weight
        g = torch.sigmoid(h)
        s = h + reduce(x @ weight)
        return (g * norm(s)) @ weight, s

    def scaled_skip(x, y):
        p = x @ weight
        half = p * 0.5
        s = y * 2 + reduce(p)
        return half + norm(s), s

    def joined(x, y):
        h = y * 2
        k = h * 1.5
        s = h + reduce(x @ weight)
        return norm(s), s, torch.cat([k, norm(s)])

    def two_layers(x, y):
        h = y @ weight
        for _ in range(2):
            g = torch.sigmoid(h)
            h = h + reduce(x @ weight)
            x = g * norm(h)
        return x, h

    def concatenated(x, y):
        """Inductor makes the first product in the memory of the whole, which is returned."""
        p = y @ weight
        c = torch.cat([p, x * 3], 0)
        s = ((c @ weight)[:6] * 2) + reduce(p)
        return norm(s), s, c

    return {f.__name__: f for f in (gate, gate_of_a_gemm, scaled_skip, joined, two_layers, concatenated)}


@pytest.mark.parametrize("name", ["gate", "gate_of_a_gemm", "scaled_skip", "joined", "two_layers", "concatenated"])
@pytest.mark.parametrize("exact", [False, True])
def test_what_is_computed_of_old_values_has_the_old_values(name, exact, reduce):
    function = read_before_and_used_after(reduce)[name]
    args = rows(0, 6), rows(1, 6)
    want = function(*args)
    got = torchseam.compile(function, config=SeamConfig(exact=exact))(*args)
    for a, b in zip(want, got, strict=True):
        if exact:
            assert same_bits(a, b)
        else:  # Inductor keeps fp32 where eager rounds
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_what_a_collective_in_flight_still_sends_is_not_overwritten(reduce, one_rank):
    (norm,), weight, c10d = norms(1), gemm(), torch.ops._c10d_functional
    group = torch.distributed.group.WORLD.group_name

    def function(x, y):
        h = y * 2
        sent = c10d.all_to_all_single(h, [len(h)], [len(h)], group)
        s = h + reduce(x @ weight)
        return norm(s), s, c10d.wait_tensor(sent)

    (call,) = compiled_calls(function, rows(0, 6), rows(1, 6))
    assert "residual" not in call.overwrites


def test_a_residual_that_is_returned_is_not_overwritten(reduce):
    (norm,) = norms(1)

    def forward(x, y):
        h = y * 2
        s = h + reduce(x * 2)
        return norm(s), s, h

    (call,) = compiled_calls(forward, rows(0), rows(1))
    assert call.overwrites == ("x",)


@pytest.mark.parametrize("view", [False, True], ids=["input", "view_of_an_input"])
def test_inputs_of_the_graph_are_not_overwritten(view, reduce):
    (norm,) = norms(1)

    def forward(x, y):
        x, y = (t.view(2, 3, HIDDEN) if view else t for t in (x, y))
        s = y + reduce(x)
        return norm(s), s

    lead = (6,) if view else (2, 3)
    (call,) = compiled_calls(forward, rows(0, *lead), rows(1, *lead))
    assert call.overwrites == ()


def test_of_two_seams_with_one_residual_the_last_overwrites_it(reduce):
    a, b = norms(2)

    def forward(x, y):
        h = y * 2
        one = h + reduce(x * 2)
        two = h + reduce(a(one) * 3)
        return one, b(two), two

    first, second = compiled_calls(forward, rows(0), rows(1))
    assert first.residual == second.residual
    assert (first.overwrites, second.overwrites) == (("x",), BOTH)


def test_a_view_of_the_residual_that_is_read_later_keeps_it(reduce):
    (norm,) = norms(1)

    def forward(x, y):
        h = y * 2
        part = h[..., : HIDDEN // 2]
        s = h + reduce(x * 2)
        z = norm(s)
        return z, s, torch.mm(z.view(6, HIDDEN)[:, : HIDDEN // 2], part.reshape(6, -1).t())

    (call,) = compiled_calls(forward, rows(0), rows(1))
    assert call.overwrites == ("x",)


def test_partial_sums_that_are_the_residual_too_are_not_overwritten(reduce):
    (norm,) = norms(1)

    def forward(x):
        x = x * 2
        s = x + reduce(x)
        return norm(s), s

    (call,) = compiled_calls(forward, rows(0))
    assert call.overwrites == () and call.x == call.residual


def test_partial_sums_that_are_read_again_are_not_overwritten(reduce):
    (norm,) = norms(1)

    def forward(x, y):
        x = x * 2
        s = y * 2 + reduce(x)
        z = norm(s)
        return z, s, x

    (call,) = compiled_calls(forward, rows(0), rows(1))
    assert call.overwrites == ("residual",)


def test_a_sum_that_is_read_lies_where_the_partial_sums_were(reduce):
    (norm,) = norms(1)

    def forward(x, y):
        z = reduce(x * 2)
        s = y * 2 + z
        return norm(s), s, z

    (call,) = compiled_calls(forward, rows(0), rows(1))
    assert call.seam.outputs == ("reduced", "residual", "norm")
    assert call.overwrites == BOTH


def test_a_residual_that_is_not_contiguous_is_left(reduce):
    (norm,) = norms(1)

    def forward(x, y):
        s = (y.transpose(0, 1) @ torch.eye(HIDDEN, dtype=y.dtype)).transpose(0, 1) + reduce(x * 2)
        return norm(s), s

    (call,) = compiled_calls(forward, rows(0), rows(1))
    assert call.overwrites == ("x",)


def test_symbolic_sizes_change_nothing(reduce):
    forward = model(reduce, layers=2)
    _, *layers = compiled_calls(forward, *TABLE, dynamic=True)
    assert [c.overwrites for c in layers] == [BOTH, ("x",)]


@pytest.mark.parametrize("scale_dtype", ["float32", "ue8m0_float32", "ue8m0"])
def test_a_dtype_that_inductor_cannot_compute_with_stays_functional(scale_dtype, reduce):
    """Inductor's patterns skip such a node, and then fail because what they should have replaced is still there."""
    (norm,) = norms(1)
    quant = Quant("fp8_group", 128, scale_dtype=scale_dtype)

    def forward(x, y):
        s = y * 2 + reduce(x * 2)
        return *ops.quantize(norm(s), quant), s

    (call,) = compiled_calls(forward, rows(0), rows(1))
    assert call.overwrites == (() if scale_dtype == "ue8m0" else BOTH)


def test_packed_scales_are_words_and_stand_in_nobodys_way(reduce):
    (norm,) = norms(1)
    quant = Quant("fp8_group", 128, "ue8m0", "tma_aligned_packed")

    def forward(x, y):
        s = y * 2 + reduce(x * 2)
        return *ops.quantize(norm(s), quant), s

    (call,) = compiled_calls(forward, rows(0), rows(1))
    assert call.overwrites == BOTH


def test_many_quantisers_fall_back_to_the_functional_operator(reduce):
    (norm,) = norms(1)
    quants = [Quant("fp8_group", 128, scale_floor=floor) for floor in (1e-12, 1e-11, 1e-10, 1e-9, 1e-8)]

    def forward(x, y):
        s = y * 2 + reduce(x * 2)
        z = norm(s)
        return [s, *(t for q in quants for t in ops.quantize(z, q))]

    got = run_fused(forward, rows(0), rows(1))
    assert all(same_bits(a, b) for a, b in zip(forward(rows(0), rows(1)), got.results, strict=True))
    assert "torchseam.seam_." not in got.after[0] and len(got.report.fused) == 1


def test_only_what_the_pass_put_in_is_changed(reduce):
    """Operators that a user calls are the user's: the pass neither finds nor moves them."""
    (norm,) = norms(1)
    seam = Seam(torchseam.Norm(1e-6), residual=True, outputs=("residual", "norm"))

    def forward(x, y):
        h, z = ops.seam(seam, x * 2, residual=y * 2, weight=norm.weight)
        return h, z

    graphs: list[torch.fx.Graph] = []
    with pytest.MonkeyPatch.context() as patch:
        import graphs as tools

        patch.setattr(tools, "take_apart", lambda graph: graphs.append(graph))
        run_fused(forward, rows(0), rows(1))
    (call,) = seam_calls(graphs[0])
    assert call.target is torch.ops.torchseam.seam.default


@pytest.mark.parametrize(
    ("device", "backend", "outputs", "overwritten"),
    [
        ("cpu", "auto", ("reduced", "norm"), True),
        ("cuda", "auto", ("reduced", "norm"), False),
        ("cuda", "auto", ("norm",), True),
        ("cuda", "collective", ("reduced", "norm"), True),
    ],
)
def test_where_other_backends_may_run_a_sum_that_is_read_is_not_made_in_x(device, backend, outputs, overwritten):
    graph = torch.fx.Graph()
    call = graph.call_function(torch.ops.torchseam.seam.default, (graph.placeholder("x"),))
    with FakeTensorMode():
        call.args[0].meta["val"] = torch.empty(2, HIDDEN, device=device)
    seam = Seam(torchseam.Norm(1e-6), reduce=Reduce("group", backend), outputs=outputs)
    assert reuse._sums_in_x(seam, call) is overwritten
