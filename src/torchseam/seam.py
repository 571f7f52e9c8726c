"""The vocabulary: what a seam is, as frozen values.

No tensors, no fx, no Triton here: every floor above speaks of seams in these words. A `Seam`
travels through graphs as one line of text (`Seam.to_text`), so an operator needs no new schema
when a part gains an attribute. It is JSON with ' in the place of ": Inductor's `cpp_wrapper` puts
the text into C++ source between " as it is. The JSON is written once, by plain string formatting:
so torch.compile can trace a `Quant` made inside `forward`, and reads that of one made outside as a
constant (its integers would become symbolic).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any, Literal

WeightMode = Literal["none", "after_cast", "before_cast"]
Scheme = Literal["fp8_static", "fp8_token", "fp8_group", "nvfp4"]
Rule = Literal["divide", "reciprocal", "multiply"]
ScaleRule = Literal["divide", "reciprocal"]
ScaleRounding = Literal["none", "activation"]
GlobalScale = Literal["encode", "decode", "none"]
Output = Literal["reduced", "residual", "norm"]
ResidualPlacement = Literal["full", "sharded"]

WEIGHT_MODES: tuple[WeightMode, ...] = ("none", "after_cast", "before_cast")
SCHEMES: tuple[Scheme, ...] = ("fp8_static", "fp8_token", "fp8_group", "nvfp4")
RULES: tuple[Rule, ...] = ("divide", "reciprocal", "multiply")
SCALE_RULES: tuple[ScaleRule, ...] = ("divide", "reciprocal")
SCALE_ROUNDINGS: tuple[ScaleRounding, ...] = ("none", "activation")
GLOBAL_SCALES: tuple[GlobalScale, ...] = ("encode", "decode", "none")
OUTPUTS: tuple[Output, ...] = ("reduced", "residual", "norm")
RESIDUAL_PLACEMENTS: tuple[ResidualPlacement, ...] = ("full", "sharded")
NVFP4_BLOCK = 16
FP8_GROUP_SIZES = (64, 128)

#: Scale storage that each scheme can emit; the first entry is the scheme's default.
SCALE_DTYPES: dict[Scheme, tuple[str, ...]] = {
    "fp8_static": ("float32",),
    "fp8_token": ("float32",),
    "fp8_group": ("float32", "ue8m0", "ue8m0_float32"),
    "nvfp4": ("float8_e4m3fn",),
}
SCALE_LAYOUTS: dict[Scheme, tuple[str, ...]] = {
    "fp8_static": ("row_major",),
    "fp8_token": ("row_major",),
    "fp8_group": ("row_major", "column_major", "tma_aligned", "tma_aligned_packed"),
    "nvfp4": ("swizzled", "linear"),
}
#: What `tma_aligned_packed` packs, as DeepGEMM takes it and vLLM's op makes it.
PACKED_SCALE_DTYPE, PACKED_GROUP_SIZE = "ue8m0", 128
#: Smallest scale that a recipe returns (an all-zero row or group would divide by zero). Static
#: scales and NVFP4 have no floor: the caller gives the first, a zero block of the second is 0.
#: 1/(448*512) is what the per-token FP8 kernels of TensorRT-LLM and vLLM use; 1e-10/448 is an
#: amax floor of 1e-10, as DeepGEMM and vLLM have it for groups.
SCALE_FLOORS: dict[Scheme, float] = {
    "fp8_static": 0.0,
    "fp8_token": 1.0 / (448.0 * 512.0),
    "fp8_group": 1e-10 / 448.0,
    "nvfp4": 0.0,
}


def _choose(what: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


@dataclass(frozen=True)
class Reduce:
    """A sum over the ranks of one process group.

    `group` is the name under which torch.distributed knows the group (`ProcessGroup.group_name`);
    `backend` is what runs the sum (DESIGN section 5), resolved when the operator runs. `residual_in` and
    `residual_out` are where the rows are of the residual that the seam reads, and of the one that it emits: `full` has
    all of them on every rank, `sharded` each on the rank that owns it (`owned_rows`); its other rows hold anything.
    """

    group: str
    backend: str = "auto"
    residual_in: ResidualPlacement = "full"
    residual_out: ResidualPlacement = "full"

    def __post_init__(self) -> None:
        _choose("Reduce.residual_in", self.residual_in, RESIDUAL_PLACEMENTS)
        _choose("Reduce.residual_out", self.residual_out, RESIDUAL_PLACEMENTS)
        for text in (self.group, self.backend):
            if any(mark in text for mark in "'\"\\") or not text.isprintable():
                raise ValueError(f"Reduce has {text!r}; names must be printable, without quotes and backslashes")

    @property
    def sharded(self) -> bool:
        """Whether a residual is sharded, on either side."""
        return "sharded" in (self.residual_in, self.residual_out)

    def to_json(self) -> str:
        placements = {"residual_in": self.residual_in, "residual_out": self.residual_out}
        told = "".join([f',"{name}":"{value}"' for name, value in placements.items() if value != "full"])
        return f'{{"group":"{self.group}","backend":"{self.backend}"{told}}}'


def owned_rows(tokens: int, rank: int, world_size: int) -> range:
    """The rows that a rank owns: neighbours, in rank order, and the first T % W ranks have one more."""
    each, more = divmod(tokens, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


@dataclass(frozen=True)
class Norm:
    """An RMSNorm over the last dimension.

    `weight`: how the model spelled the multiplication (DESIGN section 4): `after_cast` is
    `weight * round(n)` (Hugging Face Llama), `before_cast` is `round(n * (offset + weight))`
    (nn.RMSNorm, offset 0; Gemma, offset 1), `none` has no weight.
    """

    eps: float
    weight: WeightMode = "before_cast"
    offset: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        _choose("Norm.weight", self.weight, WEIGHT_MODES)
        _choose("Norm.offset", self.offset, (0, 1))
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"Norm.eps is {self.eps!r}; it must be a finite number >= 0")
        if self.offset and self.weight != "before_cast":
            raise ValueError("Norm.offset = 1 goes with weight='before_cast' only (Gemma's spelling)")

    @property
    def has_weight(self) -> bool:
        return self.weight != "none"

    def to_json(self) -> str:
        return f'{{"eps":{float(self.eps)!r},"weight":"{self.weight}","offset":{int(self.offset)}}}'


@dataclass(frozen=True)
class Quant:
    """A quantisation recipe.

    `rule` is how the quotient is formed: `divide` is `y / scale`, `reciprocal` is
    `y * (1 / scale)`, `multiply` is `y * scale` (static FP8 only: the caller's tensor is the
    encode factor). `scale_floor` is the smallest scale (see SCALE_FLOORS). None in `group_size`,
    `scale_dtype`, `scale_layout` or `scale_floor` means the scheme's default. `tma_aligned_packed` goes with
    `ue8m0` and groups of 128 only.

    How per-token and per-group FP8 make a scale of amax: `scale_rule` `divide` is `amax / 448`,
    `reciprocal` is `amax * fp32(1/448)`; `scale_rounding` `activation` rounds that to the dtype of
    the activations (torchao computes it there) before the floor, `none` keeps the fp32 value.

    `global_scale` says what number NVFP4 is given, and with it whose arithmetic is meant
    (formats.nvfp4): `encode` is the factor of FlashInfer, TensorRT-LLM and vLLM; `decode` is
    torchao's per-tensor scale, and `none` torchao without one.
    """

    scheme: Scheme
    group_size: int = None  # type: ignore[assignment]  # never None once made, as are the next
    scale_dtype: str = None  # type: ignore[assignment]
    scale_layout: str = None  # type: ignore[assignment]
    rule: Rule = "divide"
    scale_floor: float = None  # type: ignore[assignment]
    scale_rule: ScaleRule = "divide"
    scale_rounding: ScaleRounding = "none"
    global_scale: GlobalScale = "encode"

    def __post_init__(self) -> None:
        _choose("Quant.scheme", self.scheme, SCHEMES)
        sizes: dict[str, tuple[int, ...]] = {"fp8_group": (128, 64), "nvfp4": (NVFP4_BLOCK,)}
        defaults: dict[str, Any] = {
            "group_size": sizes.get(self.scheme, (0,))[0],
            "scale_dtype": SCALE_DTYPES[self.scheme][0],
            "scale_layout": SCALE_LAYOUTS[self.scheme][0],
            "scale_floor": SCALE_FLOORS[self.scheme],
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        where = f"of scheme {self.scheme!r}"
        _choose(f"group_size {where}", self.group_size, sizes.get(self.scheme, (0,)))
        _choose(f"scale_dtype {where}", self.scale_dtype, SCALE_DTYPES[self.scheme])
        _choose(f"scale_layout {where}", self.scale_layout, SCALE_LAYOUTS[self.scheme])
        if self.scale_layout == "tma_aligned_packed":
            _choose(f"scale_dtype in {self.scale_layout}", self.scale_dtype, (PACKED_SCALE_DTYPE,))
            _choose(f"group_size in {self.scale_layout}", self.group_size, (PACKED_GROUP_SIZE,))
        rules = RULES if self.scheme == "fp8_static" else ("divide", "reciprocal")
        _choose(f"rule {where}", self.rule, ("divide",) if self.scheme == "nvfp4" else rules)
        computes = self.scheme in ("fp8_token", "fp8_group")
        _choose(f"scale_rule {where}", self.scale_rule, SCALE_RULES if computes else SCALE_RULES[:1])
        _choose(f"scale_rounding {where}", self.scale_rounding, SCALE_ROUNDINGS if computes else SCALE_ROUNDINGS[:1])
        kinds = GLOBAL_SCALES if self.scheme == "nvfp4" else GLOBAL_SCALES[:1]
        _choose(f"global_scale {where}", self.global_scale, kinds)
        floor = self.scale_floor
        if not 0 <= floor < float("inf"):
            raise ValueError(f"scale_floor is {floor!r}; it must be a finite number >= 0")
        if floor and not computes:
            raise ValueError(f"scale_floor is {floor!r}, but {self.scheme!r} computes no scale that could be too small")
        object.__setattr__(self, "_json", self._as_json())
        object.__setattr__(self, "_text", self.to_json().replace('"', "'"))

    @property
    def takes_scale(self) -> bool:
        """Whether the caller gives a scale: static FP8's scale, NVFP4's global scale."""
        return self.scheme == "fp8_static" or (self.scheme == "nvfp4" and self.global_scale != "none")

    @property
    def emits_scale(self) -> bool:
        """Whether the quantiser returns scales beside the codes."""
        return self.scheme != "fp8_static"

    @property
    def multiple_of(self) -> int:
        """What the hidden size must be a multiple of."""
        return self.group_size or 1

    def to_json(self) -> str:
        return self._json  # type: ignore[attr-defined]

    def to_text(self) -> str:
        """What the operators take."""
        return self._text  # type: ignore[attr-defined]

    def _as_json(self) -> str:
        return (
            f'{{"scheme":"{self.scheme}","group_size":{self.group_size},"scale_dtype":"{self.scale_dtype}",'
            f'"scale_layout":"{self.scale_layout}","rule":"{self.rule}","scale_floor":{float(self.scale_floor)!r},'
            f'"scale_rule":"{self.scale_rule}","scale_rounding":"{self.scale_rounding}",'
            f'"global_scale":"{self.global_scale}"}}'
        )

    @staticmethod
    def from_json(text: str) -> Quant:
        """The inverse of `to_json`, and of `to_text`."""
        return _quant_from_json(text)


@dataclass(frozen=True)
class Seam:
    """One fusable stretch: [reduce] -> [inner_norm] -> [+ residual] -> [norm] -> [quants].

    `inner_norm` is the first norm of Gemma 2 / 3's sandwich order (all_reduce, norm, + residual,
    norm). `outputs` are the intermediate values that somebody still reads, in the fixed order
    `reduced` (the sum over the ranks), `residual` (what the norm reads), `norm`; the codes and
    scales of each entry of `quants` follow them.
    """

    norm: Norm
    reduce: Reduce | None = None
    inner_norm: Norm | None = None
    residual: bool = False
    quants: tuple[Quant, ...] = ()
    outputs: tuple[Output, ...] = ()

    def __post_init__(self) -> None:
        if tuple(o for o in OUTPUTS if o in self.outputs) != self.outputs:
            raise ValueError(f"Seam.outputs is {self.outputs!r}; it must be a subset of {OUTPUTS}, in order")
        if "norm" not in self.outputs and not self.quants:
            raise ValueError("a Seam must emit its norm or a quantised form of it")
        if self.inner_norm is not None and not self.residual:
            raise ValueError("Seam.inner_norm needs a residual after it (two norms in a row are two seams)")
        if "reduced" in self.outputs and self.reduce is None:
            raise ValueError("Seam.outputs has 'reduced' but the seam reduces nothing")
        if "residual" in self.outputs and not self.residual:
            raise ValueError("Seam.outputs has 'residual' but the seam adds none (ask for 'reduced')")
        if self.reduce is not None and self.reduce.residual_in == "sharded" and not self.residual:
            raise ValueError("Reduce.residual_in is 'sharded' but the seam adds no residual")
        if self.reduce is not None and self.reduce.residual_out == "sharded" and "residual" not in self.outputs:
            raise ValueError("Reduce.residual_out is 'sharded' but the seam emits no residual")
        object.__setattr__(self, "_json", self._as_json())
        object.__setattr__(self, "_text", self.to_json().replace('"', "'"))

    def local(self) -> Seam:
        """The same seam without its collective: what runs once the sum is there. Made once: every call asks for it."""
        made: Seam | None = self.__dict__.get("_local")
        if made is None:
            outputs = tuple(o for o in self.outputs if o != "reduced")
            made = dataclasses.replace(self, reduce=None, outputs=outputs)
            object.__setattr__(self, "_local", made)
        return made

    def describe(self) -> str:
        """For people: `all_reduce + residual + rms_norm + fp8_static`."""
        parts = ["all_reduce"] if self.reduce else []
        parts += ["rms_norm"] if self.inner_norm else []
        parts += ["residual"] if self.residual else []
        parts += ["rms_norm"]
        parts += [q.scheme for q in self.quants]
        return " + ".join(parts)

    def to_json(self) -> str:
        return self._json  # type: ignore[attr-defined]

    def to_text(self) -> str:
        """What the operators take."""
        return self._text  # type: ignore[attr-defined]

    def _as_json(self) -> str:
        parts = [f'"norm":{self.norm.to_json()}']
        if self.reduce is not None:
            parts.append(f'"reduce":{self.reduce.to_json()}')
        if self.inner_norm is not None:
            parts.append(f'"inner_norm":{self.inner_norm.to_json()}')
        if self.residual:
            parts.append('"residual":true')
        if self.quants:
            parts.append('"quants":[' + ",".join([q.to_json() for q in self.quants]) + "]")
        if self.outputs:
            parts.append('"outputs":[' + ",".join([f'"{o}"' for o in self.outputs]) + "]")
        return "{" + ",".join(parts) + "}"

    @staticmethod
    def from_json(text: str) -> Seam:
        """The inverse of `to_json`, and of `to_text`."""
        return _seam_from_json(text)


def _loads(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text.replace("'", '"'))  # no name in it holds either (Reduce)
    return values


@functools.lru_cache(maxsize=4096)
def _quant_from_json(text: str) -> Quant:
    return Quant(**_loads(text))


@functools.lru_cache(maxsize=4096)
def _seam_from_json(text: str) -> Seam:
    d = _loads(text)
    return Seam(
        norm=Norm(**d["norm"]),
        reduce=Reduce(**d["reduce"]) if "reduce" in d else None,
        inner_norm=Norm(**d["inner_norm"]) if "inner_norm" in d else None,
        residual=d.get("residual", False),
        quants=tuple(Quant(**q) for q in d.get("quants", ())),
        outputs=tuple(d.get("outputs", ())),
    )
