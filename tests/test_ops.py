"""The operators: schema, fake results, validation, aliasing, strides, and the collective in one process."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import cases
from torchseam import ops, reference
from torchseam import seam as vocabulary
from torchseam.operands import Operands
from torchseam.seam import Norm, Quant, Reduce, Seam

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
HIDDEN = 256
NORM = Norm(1e-6)
PLAIN = Seam(NORM, outputs=("norm",))
TOKEN, GROUP, STATIC, NVFP4 = Quant("fp8_token"), Quant("fp8_group"), Quant("fp8_static"), Quant("nvfp4")


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on two, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def raw(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def all_same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def geometry(x: Tensor) -> tuple:
    return x.dtype, tuple(x.shape), tuple(x.stride()), x.storage_offset()


def arguments(case: cases.Case, seam: Seam, lead: tuple[int, ...], hidden: int = HIDDEN, seed: int = 0) -> dict:
    return cases.arguments(seam, lead, hidden, case.dtype, case.weight_dtype, seed=seed)


def tensors_of(given: dict) -> list[Tensor]:
    return [t for t in (*(v for k, v in given.items() if k != "scales"), *given["scales"]) if t is not None]


# ---- the operators as torch knows them --------------------------------------------------------------


@pytest.mark.parametrize("case", cases.spread(14), ids=str)
def test_opcheck_of_seam(case):
    seam = case.seam()
    given = arguments(case, seam, (5,))
    torch.library.opcheck(torch.ops.torchseam.seam.default, cases.positional(seam, given))


def test_the_overloads_for_one_result():
    case = cases.Case(NORM, "residual", BF16, FP32)
    seam = case.seam(outputs=(), quants=(STATIC,))
    given = cases.positional(seam, arguments(case, seam, (5,)))
    torch.library.opcheck(torch.ops.torchseam.seam.single, given)
    assert same(torch.ops.torchseam.seam.single(*given), torch.ops.torchseam.seam(*given)[0])
    y = given[0]
    one = (y, cases.scale_for(STATIC), STATIC.to_text())
    torch.library.opcheck(torch.ops.torchseam.quantize.single, one)
    assert same(torch.ops.torchseam.quantize.single(*one), torch.ops.torchseam.quantize(*one)[0])
    with pytest.raises(ValueError, match="2 tensors are returned"):
        torch.ops.torchseam.quantize.single(y, None, Quant("fp8_token").to_text())


@pytest.mark.parametrize("lead", ((0,), (2, 3), ()), ids=str)
def test_opcheck_of_seam_over_leading_dims(lead):
    case = cases.Case(NORM, "sandwich", BF16, FP32)
    seam = case.seam(quants=(NVFP4, Quant("fp8_group", 64, "ue8m0", "tma_aligned"), STATIC))
    torch.library.opcheck(torch.ops.torchseam.seam.default, cases.positional(seam, arguments(case, seam, lead)))


@pytest.mark.parametrize("quant", cases.QUANTS[::5], ids=cases.describe)
def test_opcheck_of_quantize(quant):
    y = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(BF16)
    torch.library.opcheck(torch.ops.torchseam.quantize.default, (y, cases.scale_for(quant), quant.to_text()))


@pytest.mark.parametrize("stretch", cases.STRETCHES, ids=str)
def test_fake_results_have_the_shape_dtype_and_stride_of_real_ones(stretch):
    """The whole table: each quantiser alone, as a graph would ask for it."""
    leads = itertools.cycle(((5,), (2, 3), (), (0,), (1,), (2, 0), (129,)))
    for quant, lead in zip((None, *cases.QUANTS), leads, strict=False):
        seam = stretch.seam(quants=() if quant is None else (quant,))
        given = arguments(stretch, seam, lead)
        real = torch.ops.torchseam.seam(*cases.positional(seam, given))
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, given)
            fake = torch.ops.torchseam.seam(*cases.positional(seam, fakes))
        assert list(map(geometry, fake)) == list(map(geometry, real)), (quant, lead)


@pytest.mark.parametrize("quant", cases.QUANTS, ids=cases.describe)
@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
def test_fake_quantize_has_the_shape_dtype_and_stride_of_the_real_one(dtype, quant):
    scale = cases.scale_for(quant)
    for lead in ((5,), (2, 3), (), (0,), (1,), (129,)):
        y = torch.randn(*lead, HIDDEN).to(dtype)
        real = ops.quantize(y, quant, scale)
        with FakeTensorMode() as mode:
            fake = ops.quantize(mode.from_tensor(y), quant, None if scale is None else mode.from_tensor(scale))
        assert list(map(geometry, fake)) == list(map(geometry, real)), lead


def at(size, values: dict) -> int:
    """A symbolic (or plain) size where its symbols have these values."""
    return int(size.node.expr.subs(values)) if isinstance(size, torch.SymInt) else size


@pytest.mark.parametrize("stretch", cases.STRETCHES[::4], ids=str)
def test_fake_results_stay_symbolic_in_the_leading_dims(stretch):
    """B and S unknown: no guard ties them to a number, and at any B, S the formula gives the real geometry."""
    seam = stretch.seam(quants=cases.QUANTS)
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    given = arguments(stretch, seam, (3, 7))
    symbolic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(given["x"], symbolic_context=symbolic)
    batch, sequence = (size.node.expr for size in x.shape[:2])
    with mode:
        fakes = torch.utils._pytree.tree_map_only(Tensor, lambda t: mode.from_tensor(t, static_shapes=True), given)
        fakes["x"], fakes["residual"] = x, torch.empty_like(x) if seam.residual else None
        fake = torch.ops.torchseam.seam(*cases.positional(seam, fakes))
    guards = [g.expr for g in shape_env.guards]
    for b, s in ((2, 3), (5, 1000), (1, 129)):
        values = {batch: b, sequence: s}
        assert all(bool(g.subs(values)) for g in guards), guards
        real = torch.ops.torchseam.seam(*cases.positional(seam, arguments(stretch, seam, (b, s))))
        for f, r in zip(fake, real, strict=True):
            found = tuple(at(n, values) for n in f.shape), tuple(at(n, values) for n in f.stride())
            if 1 in r.shape:  # the stride of a dim of size 1 says nothing; torch counts it as contiguous
                assert found[0] == tuple(r.shape)
            else:
                assert found == (tuple(r.shape), tuple(r.stride()))
    assert all(isinstance(f.shape[0], torch.SymInt) for f in fake)


@pytest.mark.parametrize("case", [c for c in cases.spread(24) if c.quant], ids=str)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_with_dynamic_shapes_it_gives_the_same_bits_and_compiles_once(case):
    seam = case.seam()
    given = arguments(case, seam, (2, 3))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    weight, inner_weight, scales = given["weight"], given["inner_weight"], given["scales"]

    def layer(x, residual):
        return ops.seam(seam, x, residual=residual, weight=weight, inner_weight=inner_weight, scales=scales)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for lead in ((2, 3), (5, 9), (64, 3)):
        new = arguments(case, seam, lead, seed=lead[0])
        results = compiled(new["x"], new["residual"])
        expected = layer(new["x"], new["residual"])
        assert all_same(results, expected)
        assert [r.stride() for r in results] == [e.stride() for e in expected]
    assert counter.frame_count == 1


# ---- what it returns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stretch", cases.STRETCHES, ids=str)
def test_the_operator_is_the_reference_on_the_cpu(stretch):
    seam = stretch.seam(quants=cases.QUANTS)
    given = arguments(stretch, seam, (5,))
    by_keyword = ops.seam(seam, given["x"], **{k: v for k, v in given.items() if k != "x"})
    assert all_same(by_keyword, reference.run(seam, Operands(**given)))


@pytest.mark.parametrize("kind", cases.KINDS)
def test_each_choice_of_outputs_is_a_choice_from_all_of_them(kind):
    case = cases.Case(NORM, kind, BF16, BF16)
    full = case.seam(quants=(TOKEN, NVFP4))
    given = arguments(case, full, (5,))
    everything = torch.ops.torchseam.seam(*cases.positional(full, given))
    values, quantized = cases.split(full, everything)
    for chosen in itertools.chain.from_iterable(itertools.combinations(full.outputs, n) for n in range(3)):
        part = case.seam(quants=(TOKEN, NVFP4), outputs=chosen)
        results = torch.ops.torchseam.seam(*cases.positional(part, given))
        assert all_same(results, [*(values[name] for name in chosen), *itertools.chain(*quantized)])


@pytest.mark.parametrize("stretch", cases.STRETCHES, ids=str)
def test_no_output_shares_memory_and_no_input_changes(stretch):
    seam = stretch.seam(quants=cases.QUANTS)
    given = arguments(stretch, seam, (5,))
    inputs = tensors_of(given)
    before = [t.clone() for t in inputs]
    results = torch.ops.torchseam.seam(*cases.positional(seam, given))
    assert all_same(inputs, before)
    owners = [t.untyped_storage().data_ptr() for t in (*inputs, *results)]
    assert len(set(owners)) == len(owners)


@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
def test_quantize_shares_no_memory_and_changes_nothing(dtype):
    for quant in cases.QUANTS:
        y = torch.randn(128, HIDDEN).to(dtype)
        given = [t for t in (y, cases.scale_for(quant)) if t is not None]
        before = [t.clone() for t in given]
        results = ops.quantize(y, quant, given[1] if len(given) > 1 else None)
        assert all_same(given, before)
        owners = [t.untyped_storage().data_ptr() for t in (*given, *results)]
        assert len(set(owners)) == len(owners), quant


@pytest.mark.parametrize("stretch", cases.STRETCHES, ids=str)
def test_no_tokens_give_empty_results_of_the_right_shape(stretch):
    seam = stretch.seam(quants=cases.QUANTS)
    for lead in ((0,), (2, 0), (0, 3)):
        results = torch.ops.torchseam.seam(*cases.positional(seam, arguments(stretch, seam, lead)))
        values, quantized = cases.split(seam, results)
        assert all(tuple(v.shape) == (*lead, HIDDEN) for v in values.values())
        for quant, (codes, *scales) in zip(seam.quants, quantized, strict=True):
            assert codes.shape == (*lead, HIDDEN // 2 if quant.scheme == "nvfp4" else HIDDEN)
            assert all(s.numel() == 0 for s in scales)


@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_rows_of_nan_leave_the_other_rows_as_they_are(kind, dtype):
    """FIELD 4.20: 8 real rows, 56 of padding."""
    case = cases.Case(NORM, kind, dtype, dtype)
    rowwise = tuple(q for q in cases.QUANTS if q.scale_layout == "row_major" or q.scale_layout == "linear")
    seam = case.seam(quants=rowwise)
    real = arguments(case, seam, (8,))
    padding = torch.full((56, HIDDEN), NAN, dtype=dtype)
    padded = {**real, "x": torch.cat((real["x"], padding))}
    if seam.residual:
        padded["residual"] = torch.cat((real["residual"], padding))
    alone = torch.ops.torchseam.seam(*cases.positional(seam, real))
    batch = torch.ops.torchseam.seam(*cases.positional(seam, padded))
    assert all_same(alone, [t[:8] for t in batch])
    assert all(bool(t[8:].isnan().all()) for t in batch[: len(seam.outputs)])


# ---- strides ------------------------------------------------------------------------------------------


def every_other_column(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), NAN, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def part_of_wider_rows(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), NAN, dtype=x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def columns_first(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def sequence_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


STRIDED = (every_other_column, part_of_wider_rows, sequence_first, columns_first)


@pytest.mark.parametrize("strided", STRIDED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
def test_strided_inputs_give_the_same_bits(dtype, kind, strided):
    case = cases.Case(Norm(1e-6, "none"), kind, dtype, dtype)
    seam = case.seam(quants=(TOKEN, GROUP, STATIC, NVFP4))
    # Many rows, so that in bf16 too some norm falls on the other side of a tie when a mean changes.
    given = arguments(case, seam, (8, 256), 640)
    expected = torch.ops.torchseam.seam(*cases.positional(seam, given))
    moved = {**given, "x": strided(given["x"])}
    if seam.residual:
        moved["residual"] = strided(given["residual"])
    assert not moved["x"].is_contiguous()
    results = torch.ops.torchseam.seam(*cases.positional(seam, moved))
    assert all_same(results, expected)
    assert [r.stride() for r in results] == [e.stride() for e in expected]


@pytest.mark.parametrize("strided", STRIDED, ids=lambda f: f.__name__)
def test_strided_weights_and_expanded_rows_give_the_same_bits(strided):
    case = cases.Case(NORM, "residual", BF16, FP32)
    seam = case.seam(quants=(TOKEN,))
    given = arguments(case, seam, (6,), 640)
    row = given["x"][:1]
    expected = torch.ops.torchseam.seam(*cases.positional(seam, {**given, "x": row.repeat(6, 1)}))
    weight = strided(given["weight"].expand(2, -1))[0]
    assert torch.equal(weight, given["weight"])
    moved = {**given, "x": row.expand(6, -1), "weight": weight}
    assert all_same(torch.ops.torchseam.seam(*cases.positional(seam, moved)), expected)


@pytest.mark.parametrize("strided", STRIDED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", cases.ACTIVATION_DTYPES, ids=str)
def test_quantize_of_strided_inputs_gives_the_same_bits(dtype, strided):
    y = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    for quant in cases.QUANTS:
        scale = cases.scale_for(quant)
        results, expected = ops.quantize(strided(y), quant, scale), ops.quantize(y, quant, scale)
        assert all_same(results, expected)
        assert [r.stride() for r in results] == [e.stride() for e in expected]


# ---- errors -------------------------------------------------------------------------------------------


def changed(seam: Seam, **changes):
    """A call of the operator that is right but for `changes` (name -> value, or a function of the right one)."""
    given = cases.arguments(seam, (5,), changes.pop("hidden", HIDDEN), BF16)
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    return cases.positional(seam, given)


WITH_RESIDUAL = Seam(NORM, residual=True, outputs=("norm",))
SANDWICH = Seam(NORM, inner_norm=NORM, residual=True, outputs=("norm",))
WEIGHTLESS = Seam(Norm(1e-6, "none"), outputs=("norm",))
SCALED = Seam(NORM, quants=(STATIC, TOKEN, NVFP4))

ERRORS = {
    "x of float64": (lambda: changed(PLAIN, x=Tensor.double), ("x has dtype torch.float64", "torch.bfloat16")),
    "x of int32": (lambda: changed(PLAIN, x=Tensor.int), ("x has dtype torch.int32", "torch.float32")),
    "x without dims": (lambda: changed(WEIGHTLESS, x=lambda x: x[0, 0]), ("x has shape ()", "hidden size")),
    "no hidden size": (lambda: changed(WEIGHTLESS, x=lambda x: x[:, :0]), ("x has shape (5, 0)", "hidden size")),
    "residual missing": (
        lambda: changed(WITH_RESIDUAL, residual=None),
        ("residual is missing", "'residual + rms_norm'"),
    ),
    "residual given": (lambda: changed(PLAIN, residual=torch.zeros(5, HIDDEN)), ("residual is given", "'rms_norm'")),
    "residual of another dtype": (
        lambda: changed(WITH_RESIDUAL, residual=Tensor.float),
        ("residual is torch.float32 (5, 256)", "torch.bfloat16 (5, 256)"),
    ),
    "residual of another shape": (
        lambda: changed(WITH_RESIDUAL, residual=lambda r: r[:1]),
        ("residual is torch.bfloat16 (1, 256)", "as x: torch.bfloat16 (5, 256)"),
    ),
    "weight missing": (lambda: changed(PLAIN, weight=None), ("weight is missing", "before_cast")),
    "weight given": (lambda: changed(WEIGHTLESS, weight=torch.ones(HIDDEN)), ("weight is given", "'none'")),
    "weight of float64": (
        lambda: changed(PLAIN, weight=Tensor.double),
        ("weight has dtype torch.float64", "torch.float16"),
    ),
    "weight of another size": (lambda: changed(PLAIN, weight=lambda w: w[:1]), ("weight has shape (1,)", "[256]")),
    "weight of two dims": (lambda: changed(PLAIN, weight=lambda w: w[None]), ("weight has shape (1, 256)", "[256]")),
    "inner_weight missing": (lambda: changed(SANDWICH, inner_weight=None), ("inner_weight is missing", "eps=1e-06")),
    "inner_weight given": (
        lambda: changed(PLAIN, inner_weight=torch.ones(HIDDEN)),
        ("inner_weight is given", "the norm is None"),
    ),
    "inner_weight of another size": (
        lambda: changed(SANDWICH, inner_weight=lambda w: w[1:]),
        ("inner_weight has shape (255,)", "[256]"),
    ),
    "too few scales": (lambda: changed(SCALED, scales=lambda s: s[:1]), ("1 scales were given", "take 2")),
    "too many scales": (lambda: changed(SCALED, scales=lambda s: s * 2), ("4 scales were given", "take 2")),
    "scale of bf16": (
        lambda: changed(SCALED, scales=lambda s: [s[0], s[1].bfloat16()]),
        ("scale of nvfp4 has dtype torch.bfloat16", "float32"),
    ),
    "scale per channel": (
        lambda: changed(SCALED, scales=lambda s: [s[0].repeat(2), s[1]]),
        ("scale of fp8_static", "shape (2,)", "one float32 number"),
    ),
    "hidden size and groups": (
        lambda: changed(Seam(NORM, quants=(GROUP,)), hidden=320),
        ("hidden size is 320", "fp8_group with groups of 128", "multiple of 128"),
    ),
    "hidden size and blocks": (
        lambda: changed(Seam(NORM, quants=(TOKEN, NVFP4)), hidden=264),
        ("hidden size is 264", "nvfp4 with groups of 16", "multiple of 16"),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_a_seam_is_a_value_error(name):
    make, words = ERRORS[name]
    with pytest.raises(ValueError) as caught:
        torch.ops.torchseam.seam(*make())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_refused_while_tracing_too(name):
    make, words = ERRORS[name]
    with FakeTensorMode() as mode, pytest.raises(ValueError) as caught:
        fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, make())
        torch.ops.torchseam.seam(*fakes)
    assert words[0] in str(caught.value)


@pytest.mark.parametrize(
    ("y", "quant", "scale", "words"),
    (
        (torch.zeros(5, 256, dtype=torch.float64), TOKEN, None, ("y has dtype torch.float64", "torch.bfloat16")),
        (torch.zeros(()), TOKEN, None, ("y has shape ()", "hidden size")),
        (torch.zeros(5, 0), TOKEN, None, ("y has shape (5, 0)", "hidden size")),
        (torch.zeros(5, 64), GROUP, None, ("hidden size is 64", "multiple of 128")),
        (torch.zeros(5, 24), NVFP4, torch.ones(()), ("hidden size is 24", "multiple of 16")),
        (torch.zeros(5, 256), STATIC, None, ("fp8_static takes a scale", "opposite")),
        (torch.zeros(5, 256), NVFP4, None, ("nvfp4 takes a scale", "opposite")),
        (torch.zeros(5, 256), TOKEN, torch.ones(()), ("fp8_token takes no scale", "opposite")),
        (torch.zeros(5, 256), GROUP, torch.ones(()), ("fp8_group takes no scale", "opposite")),
        (torch.zeros(5, 256), STATIC, torch.ones(5), ("scale of fp8_static", "shape (5,)", "one float32")),
        (torch.zeros(5, 256), STATIC, torch.ones((), dtype=FP16), ("dtype torch.float16", "one float32")),
    ),
)
def test_what_does_not_fit_quantize_is_a_value_error(y, quant, scale, words):
    with pytest.raises(ValueError) as caught:
        ops.quantize(y, quant, scale)
    for word in words:
        assert word in str(caught.value)
    with FakeTensorMode() as mode, pytest.raises(ValueError) as caught:
        ops.quantize(mode.from_tensor(y), quant, None if scale is None else mode.from_tensor(scale))
    assert words[0] in str(caught.value)


@pytest.mark.parametrize("hidden", (8, 16, 464, 1040, 2880))
def test_a_hidden_size_either_fits_a_recipe_or_is_refused(hidden):
    """FIELD 4.22, the sizes that are no multiple of 128."""
    for quant in cases.QUANTS:
        y = torch.randn(3, hidden)
        scale = cases.scale_for(quant)
        if hidden % quant.multiple_of:
            with pytest.raises(ValueError, match=f"hidden size is {hidden}.*multiple of {quant.multiple_of}"):
                ops.quantize(y, quant, scale)
        else:
            codes = ops.quantize(y, quant, scale)[0]
            assert codes.shape == (3, hidden // (2 if quant.scheme == "nvfp4" else 1))


# ---- the collective, with one rank ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """The name of a gloo group of this process alone."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ("auto", "collective"))
@pytest.mark.parametrize("stretch", cases.STRETCHES, ids=str)
def test_a_seam_that_reduces_over_one_rank_is_the_local_seam(stretch, backend, group):
    seam = stretch.seam(quants=(TOKEN, NVFP4), reduce=Reduce(group, backend))
    for lead in ((5,), (0,)):
        given = arguments(stretch, seam, lead)
        inputs = tensors_of(given)
        before = [t.clone() for t in inputs]
        reduced, *rest = results = torch.ops.torchseam.seam(*cases.positional(seam, given))
        assert same(reduced, given["x"])
        assert all_same(rest, torch.ops.torchseam.seam(*cases.positional(seam.local(), given)))
        assert all_same(inputs, before)
        if math.prod(lead):
            owners = [t.untyped_storage().data_ptr() for t in (*inputs, *results)]
            assert len(set(owners)) == len(owners)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_seam_that_reduces_may_keep_its_sum_to_itself(kind, group):
    case = cases.Case(NORM, kind, BF16, BF16)
    seam = case.seam(quants=(STATIC,), reduce=Reduce(group), outputs=())
    given = arguments(case, seam, (5,))
    results = torch.ops.torchseam.seam(*cases.positional(seam, given))
    assert all_same(results, torch.ops.torchseam.seam(*cases.positional(seam.local(), given)))


def test_the_sum_of_strided_partial_sums_is_contiguous(group):
    case = cases.Case(NORM, "residual", BF16, BF16)
    seam = case.seam(reduce=Reduce(group))
    given = arguments(case, seam, (2, 3))
    moved = {**given, "x": columns_first(given["x"])}
    results = torch.ops.torchseam.seam(*cases.positional(seam, moved))
    assert results[0].is_contiguous()
    assert all_same(results, torch.ops.torchseam.seam(*cases.positional(seam, given)))


@pytest.mark.parametrize("stretch", cases.STRETCHES[::9], ids=str)
def test_fake_results_of_a_seam_that_reduces(stretch, group):
    seam = stretch.seam(quants=cases.QUANTS, reduce=Reduce(group))
    given = arguments(stretch, seam, (2, 3))
    real = torch.ops.torchseam.seam(*cases.positional(seam, given))
    with FakeTensorMode() as mode:
        fake = torch.ops.torchseam.seam(
            *torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, cases.positional(seam, given))
        )
    assert list(map(geometry, fake)) == list(map(geometry, real))


def test_opcheck_of_a_seam_that_reduces(group):
    case = cases.Case(NORM, "residual", BF16, BF16, TOKEN)
    seam = case.seam(reduce=Reduce(group))
    torch.library.opcheck(torch.ops.torchseam.seam.default, cases.positional(seam, arguments(case, seam, (5,))))


@pytest.mark.parametrize("backend", ("symmetric", "mnnvl", "trtllm", "nccl"))
def test_a_backend_that_is_not_there_is_refused_and_not_swapped(backend, group):
    seam = Seam(NORM, Reduce(group, backend), outputs=("norm",))
    given = cases.arguments(seam, (5,), HIDDEN, BF16)
    with pytest.raises(ValueError) as caught:
        torch.ops.torchseam.seam(*cases.positional(seam, given))
    for word in (repr(backend), "'auto'", "'collective'"):
        assert word in str(caught.value)


def test_the_outputs_that_exist_are_the_vocabularys():
    # If the vocabulary gains an output, the tests above must learn it.
    assert vocabulary.OUTPUTS == ("reduced", "residual", "norm")
