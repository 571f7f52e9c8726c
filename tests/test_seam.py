"""The vocabulary: what a Seam can be, that it survives JSON, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cases
import torchseam
from torchseam import seam as vocabulary
from torchseam.seam import RESIDUAL_PLACEMENTS, Norm, Quant, Reduce, Seam, owned_rows

NORM = Norm(1e-6)
STATIC, TOKEN, NVFP4 = Quant("fp8_static"), Quant("fp8_token"), Quant("nvfp4")
FULL = Seam(
    norm=Norm(1e-5, "before_cast", 1),
    reduce=Reduce("tp", "collective"),
    inner_norm=Norm(9.999999974752427e-07, "after_cast"),
    residual=True,
    quants=(
        NVFP4,
        Quant("fp8_group", 64, "ue8m0", "tma_aligned", "reciprocal", 0.25, "reciprocal", "activation"),
        TOKEN,
    ),
    outputs=("reduced", "residual", "norm"),
)


# ---- JSON -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", cases.QUANTS, ids=cases.describe)
def test_every_recipe_survives_json(quant):
    text = quant.to_json()
    assert "\n" not in text
    assert Quant.from_json(text) == quant
    assert Quant(**json.loads(text)) == quant
    assert Quant.from_json(text).to_json() == text


@pytest.mark.parametrize("reduce", (None, Reduce("0"), Reduce("tp", "symmetric")), ids=("local", "auto", "named"))
def test_every_case_survives_json(reduce):
    texts = set()
    for case in cases.CASES:
        seam = case.seam(reduce=reduce)
        assert Seam.from_json(seam.to_json()) == seam
        texts.add(seam.to_json())
    # A seam has no dtypes; apart from them no two cases may be the same text.
    assert len(texts) == len({(c.norm, c.kind, c.quant) for c in cases.CASES})


def test_a_seam_with_every_part_survives_json_field_by_field():
    back = Seam.from_json(FULL.to_json())
    for field in dataclasses.fields(Seam):
        value = getattr(FULL, field.name)
        assert value != field.default, f"{field.name} is at its default: the test would not see it lost"
        assert getattr(back, field.name) == value
    assert type(back.quants) is tuple and type(back.outputs) is tuple
    assert "\n" not in FULL.to_json()


@pytest.mark.parametrize("eps", (*cases.EPSILONS, 0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2))
def test_epsilon_survives_json_bit_for_bit(eps):
    seam = Seam(Norm(eps), inner_norm=Norm(eps, "none"), residual=True, outputs=("norm",))
    back = Seam.from_json(seam.to_json())
    assert back.norm.eps.hex() == eps.hex()
    assert back.inner_norm.eps.hex() == eps.hex()


@given(st.floats(min_value=0.0, allow_nan=False, allow_infinity=False))
def test_any_epsilon_and_any_floor_survive_json_bit_for_bit(value):
    seam = Seam(Norm(value), quants=(Quant("fp8_token", scale_floor=value),))
    back = Seam.from_json(seam.to_json())
    assert back.norm.eps.hex() == value.hex()
    assert back.quants[0].scale_floor.hex() == value.hex()


def test_json_says_nothing_of_absent_parts():
    # Kept short: this text is a constant in every compiled graph.
    assert set(json.loads(Seam(NORM, outputs=("norm",)).to_json())) == {"norm", "outputs"}
    assert set(json.loads(Seam(NORM, quants=(STATIC,)).to_json())) == {"norm", "quants"}


@pytest.mark.parametrize("value", (FULL, NVFP4), ids=("seam", "quant"))
def test_the_text_for_operators_can_stand_in_the_source_of_c_as_it_is(value):
    assert not set('"\\\n') & set(value.to_text())
    assert type(value).from_json(value.to_text()) == value


@pytest.mark.parametrize("into", RESIDUAL_PLACEMENTS)
@pytest.mark.parametrize("out", RESIDUAL_PLACEMENTS)
def test_where_the_rows_of_residuals_are_is_said_and_read_back(into, out):
    reduce = Reduce("tp", residual_in=into, residual_out=out)
    seam = Seam(NORM, reduce, residual=True, outputs=("residual", "norm"))
    assert Seam.from_json(seam.to_json()) == seam
    assert seam.to_json().count("sharded") == [into, out].count("sharded")
    assert reduce.sharded == ("sharded" in (into, out))


def test_a_residual_is_sharded_only_where_there_is_one():
    for name in ("residual_in", "residual_out"):
        with pytest.raises(ValueError, match=rf"Reduce\.{name} is 'split'; allowed: 'full', 'sharded'"):
            Reduce("tp", **{name: "split"})
    with pytest.raises(ValueError, match="residual_in is 'sharded' but the seam adds no residual"):
        Seam(NORM, Reduce("tp", residual_in="sharded"), outputs=("norm",))
    with pytest.raises(ValueError, match="residual_out is 'sharded' but the seam emits no residual"):
        Seam(NORM, Reduce("tp", residual_out="sharded"), residual=True, outputs=("norm",))


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_row_has_one_owner(world_size):
    for tokens in (0, 1, 2, 3, 7, 8, 9, 100):
        owned = [owned_rows(tokens, rank, world_size) for rank in range(world_size)]
        assert [row for rows in owned for row in rows] == list(range(tokens))
        assert max(map(len, owned)) == len(owned[0]) and max(map(len, owned)) - min(map(len, owned)) <= 1


@pytest.mark.parametrize("name", ('tp "fast"', "tp\\0", "\\", '"', "tp 'fast'", "'"))
def test_a_name_that_json_would_have_to_escape_is_refused(name):
    for make in (lambda: Reduce(name), lambda: Reduce("tp", name)):
        with pytest.raises(ValueError) as caught:
            make()
        assert repr(name) in str(caught.value) and "quotes" in str(caught.value)


@pytest.mark.parametrize("name", ("tp\n", "tp\t0"))
def test_a_control_character_in_a_name_is_refused_or_survives(name):
    try:
        seam = Seam(NORM, Reduce(name), outputs=("norm",))
    except ValueError:
        return
    assert Seam.from_json(seam.to_json()) == seam


def test_an_offset_of_true_is_refused_or_survives():
    try:
        seam = Seam(Norm(1e-6, "before_cast", True), outputs=("norm",))
    except ValueError:
        return
    assert Seam.from_json(seam.to_json()) == seam


class PrintedFloat(float):
    """A float that prints as numpy 2's does."""

    def __repr__(self):
        return f"np.float64({float(self)!r})"


@pytest.mark.parametrize(
    "seam",
    (
        Seam(Norm(PrintedFloat(1e-6)), outputs=("norm",)),
        Seam(NORM, quants=(Quant("fp8_token", scale_floor=PrintedFloat(1e-6)),)),
    ),
    ids=("eps", "scale_floor"),
)
def test_a_float_of_numpy_survives_json(seam):
    assert Seam.from_json(seam.to_json()) == seam


def test_equal_values_have_equal_json_and_hash_however_they_were_made():
    spelled_out = Quant("fp8_group", 128, "float32", "row_major", "divide", 1e-10 / 448.0)
    assert spelled_out == Quant("fp8_group")
    assert spelled_out.to_json() == Quant("fp8_group").to_json()
    assert hash(spelled_out) == hash(Quant("fp8_group"))
    assert FULL.to_json() == dataclasses.replace(FULL).to_json()
    assert pickle.loads(pickle.dumps(FULL)).to_json() == FULL.to_json()


def test_a_replaced_field_is_in_the_json():
    other = dataclasses.replace(FULL, norm=Norm(0.5))
    assert Seam.from_json(other.to_json()) == other != FULL
    coarse = dataclasses.replace(TOKEN, scale_floor=0.5)
    assert Quant.from_json(coarse.to_json()).scale_floor == 0.5


@pytest.mark.parametrize("value", (FULL, NVFP4), ids=("seam", "quant"))
@pytest.mark.usefixtures("fresh_dynamo")
def test_to_json_can_be_traced(value):
    def length(x):
        return x + len(value.to_json())

    compiled = torch.compile(length, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), float(len(value.to_json()))))


@pytest.mark.usefixtures("fresh_dynamo")
def test_to_json_can_be_traced_when_the_seam_is_a_modules_attribute():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seam = FULL

        def forward(self, x):
            return x + len(self.seam.to_json()) + len(self.seam.quants[0].to_json())

    x = torch.zeros(2)
    assert torch.equal(torch.compile(Layer(), fullgraph=True, backend="eager")(x), Layer()(x))


# ---- recipes ----------------------------------------------------------------------------------


def test_the_table_has_every_recipe_that_the_vocabulary_allows():
    expected = 0
    for scheme in vocabulary.SCHEMES:
        sizes = len(vocabulary.FP8_GROUP_SIZES) if scheme == "fp8_group" else 1
        rules = {"fp8_static": 3, "nvfp4": 1}.get(scheme, 2)
        layouts = [name for name in vocabulary.SCALE_LAYOUTS[scheme] if name != "tma_aligned_packed"]
        expected += sizes * len(vocabulary.SCALE_DTYPES[scheme]) * len(layouts) * rules
    expected += 2  # the packed layout has one dtype and one size of groups, and both rules
    assert len(set(cases.QUANTS)) == len(cases.QUANTS) == expected
    # The weight modes, and before_cast a second time with offset 1.
    assert len(cases.NORMS) == len(vocabulary.WEIGHT_MODES) + 1
    weightless = sum(not n.has_weight for n in cases.NORMS)
    spellings = (len(cases.NORMS) - weightless) * len(cases.WEIGHT_DTYPES) + weightless
    assert len(cases.STRETCHES) == spellings * len(cases.ACTIVATION_DTYPES) * len(cases.KINDS)
    assert len(set(cases.CASES)) == len(cases.CASES) == len(cases.STRETCHES) * (1 + expected)


@pytest.mark.parametrize(
    ("quant", "expected"),
    (
        (STATIC, (0, "float32", "row_major", "divide", 0.0, "divide", "none", "encode")),
        (TOKEN, (0, "float32", "row_major", "divide", 1 / (448 * 512), "divide", "none", "encode")),
        (Quant("fp8_group"), (128, "float32", "row_major", "divide", 1e-10 / 448, "divide", "none", "encode")),
        (NVFP4, (16, "float8_e4m3fn", "swizzled", "divide", 0.0, "divide", "none", "encode")),
    ),
    ids=vocabulary.SCHEMES,
)
def test_defaults_of_each_scheme(quant, expected):
    assert dataclasses.astuple(quant)[1:] == expected


@pytest.mark.parametrize("kind", vocabulary.GLOBAL_SCALES)
def test_what_global_scale_nvfp4_takes(kind):
    quant = Quant("nvfp4", global_scale=kind)
    assert quant.takes_scale == (kind != "none")
    assert Quant.from_json(quant.to_json()) == quant


def test_a_floor_of_zero_is_not_taken_for_the_default():
    assert Quant("fp8_token", scale_floor=0.0).scale_floor == 0.0


@pytest.mark.parametrize("quant", cases.QUANTS, ids=cases.describe)
def test_what_a_recipe_takes_emits_and_needs(quant):
    assert quant.takes_scale == (quant.scheme in {"fp8_static", "nvfp4"})
    assert quant.emits_scale == (quant.scheme != "fp8_static")
    assert quant.multiple_of == {"nvfp4": 16, "fp8_group": quant.group_size}.get(quant.scheme, 1)


# ---- errors -----------------------------------------------------------------------------------


def message_of(make) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "given", "allowed"),
    (
        (lambda: Norm(1e-6, "after"), "Norm.weight is 'after'", ("'none'", "'after_cast'", "'before_cast'")),
        (lambda: Norm(1e-6, "before_cast", 2), "Norm.offset is 2", ("0, 1",)),
        (lambda: Norm(-1e-6), "Norm.eps is -1e-06", ("finite number >= 0",)),
        (lambda: Norm(math.nan), "Norm.eps is nan", ("finite number >= 0",)),
        (lambda: Norm(math.inf), "Norm.eps is inf", ("finite number >= 0",)),
        (lambda: Norm(1e-6, "after_cast", 1), "Norm.offset = 1", ("weight='before_cast'",)),
        (lambda: Norm(1e-6, "none", 1), "Norm.offset = 1", ("weight='before_cast'",)),
        (lambda: Quant("int8"), "Quant.scheme is 'int8'", tuple(map(repr, vocabulary.SCHEMES))),
        (lambda: Quant("fp8_group", 32), "group_size of scheme 'fp8_group' is 32", ("128, 64",)),
        (lambda: Quant("nvfp4", 32), "group_size of scheme 'nvfp4' is 32", ("allowed: 16",)),
        (lambda: Quant("fp8_token", 128), "group_size of scheme 'fp8_token' is 128", ("allowed: 0",)),
        (
            lambda: Quant("fp8_token", scale_dtype="ue8m0"),
            "scale_dtype of scheme 'fp8_token' is 'ue8m0'",
            ("'float32'",),
        ),
        (
            lambda: Quant("fp8_group", scale_layout="tma_aligned_packed"),
            "scale_dtype in tma_aligned_packed is 'float32'",
            ("allowed: 'ue8m0'",),
        ),
        (
            lambda: Quant("fp8_group", 64, "ue8m0", "tma_aligned_packed"),
            "group_size in tma_aligned_packed is 64",
            ("allowed: 128",),
        ),
        (
            lambda: Quant("nvfp4", scale_layout="row_major"),
            "scale_layout of scheme 'nvfp4' is 'row_major'",
            ("'swizzled', 'linear'",),
        ),
        (
            lambda: Quant("fp8_token", rule="multiply"),
            "rule of scheme 'fp8_token' is 'multiply'",
            ("'divide', 'reciprocal'",),
        ),
        (
            lambda: Quant("fp8_static", rule="times"),
            "rule of scheme 'fp8_static' is 'times'",
            ("'multiply'",),
        ),
        (lambda: Quant("nvfp4", rule="reciprocal"), "rule of scheme 'nvfp4' is 'reciprocal'", ("'divide'",)),
        (
            lambda: Quant("fp8_static", scale_rule="reciprocal"),
            "scale_rule of scheme 'fp8_static' is 'reciprocal'",
            ("allowed: 'divide'",),
        ),
        (lambda: Quant("fp8_token", scale_rule="multiply"), "is 'multiply'", ("'divide', 'reciprocal'",)),
        (
            lambda: Quant("nvfp4", scale_rounding="activation"),
            "scale_rounding of scheme 'nvfp4' is 'activation'",
            ("allowed: 'none'",),
        ),
        (
            lambda: Quant("fp8_static", global_scale="decode"),
            "global_scale of scheme 'fp8_static' is 'decode'",
            ("allowed: 'encode'",),
        ),
        (lambda: Quant("nvfp4", global_scale="amax"), "is 'amax'", ("'encode', 'decode', 'none'",)),
        (lambda: Quant("fp8_group", scale_rounding="bf16"), "is 'bf16'", ("'none', 'activation'",)),
        (lambda: Quant("fp8_token", scale_floor=-1.0), "scale_floor is -1.0", ("finite number >= 0",)),
        (lambda: Quant("fp8_token", scale_floor=math.nan), "scale_floor is nan", ("finite number >= 0",)),
        (lambda: Quant("fp8_token", scale_floor=math.inf), "scale_floor is inf", ("finite number >= 0",)),
        (
            lambda: Seam(NORM, residual=True, outputs=("norm", "residual")),
            "Seam.outputs is ('norm', 'residual')",
            ("('reduced', 'residual', 'norm')", "in order"),
        ),
        (lambda: Seam(NORM, outputs=("norm", "norm")), "('norm', 'norm')", ("subset",)),
        (lambda: Seam(NORM, outputs=("codes", "norm")), "'codes'", ("('reduced', 'residual', 'norm')",)),
        (lambda: Seam(NORM), "a Seam must emit", ("norm", "quantised")),
        (lambda: Seam(NORM, residual=True, outputs=("residual",)), "a Seam must emit", ("norm", "quantised")),
        (
            lambda: Seam(NORM, inner_norm=NORM, outputs=("norm",)),
            "Seam.inner_norm",
            ("residual", "two seams"),
        ),
        (lambda: Seam(NORM, outputs=("reduced", "norm")), "'reduced'", ("reduces nothing",)),
        (lambda: Seam(NORM, outputs=("residual", "norm")), "'residual'", ("adds none", "'reduced'")),
    ),
)
def test_an_impossible_value_is_told_what_was_given_and_what_is_allowed(make, given, allowed):
    message = message_of(make)
    assert given in message
    for word in allowed:
        assert word in message


@pytest.mark.parametrize("scheme", ("fp8_static", "nvfp4"))
def test_a_floor_is_refused_where_there_is_none(scheme):
    assert "scale_floor" in message_of(lambda: Quant(scheme, scale_floor=0.5))


def test_values_are_frozen():
    for value in (FULL, NORM, TOKEN, Reduce("tp")):
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


# ---- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seam", "words"),
    (
        (Seam(NORM, outputs=("norm",)), "rms_norm"),
        (Seam(NORM, residual=True, quants=(STATIC,)), "residual + rms_norm + fp8_static"),
        (
            Seam(NORM, Reduce("tp"), residual=True, quants=(STATIC,)),
            "all_reduce + residual + rms_norm + fp8_static",
        ),
        (
            Seam(NORM, Reduce("tp"), NORM, True, (NVFP4, TOKEN)),
            "all_reduce + rms_norm + residual + rms_norm + nvfp4 + fp8_token",
        ),
    ),
)
def test_describe_names_the_parts_in_their_order(seam, words):
    assert seam.describe() == words


@pytest.mark.parametrize("outputs", [o for n in range(4) for o in itertools.combinations(vocabulary.OUTPUTS, n)])
def test_a_local_seam_is_the_same_without_its_collective(outputs):
    seam = dataclasses.replace(FULL, outputs=outputs)
    local = seam.local()
    assert local.reduce is None
    assert local.outputs == tuple(o for o in outputs if o != "reduced")
    assert dataclasses.replace(local, reduce=seam.reduce, outputs=outputs) == seam
    assert Seam.from_json(local.to_json()) == local


def test_the_package_hands_the_vocabulary_on():
    for name in ("Norm", "Quant", "Reduce", "Seam"):
        assert getattr(torchseam, name) is getattr(vocabulary, name)
