# SPDX-License-Identifier: Apache-2.0
"""What hypothesis draws: trees of observations, their samples, settings, returns.

Everything that a compilation depends on (shapes, dtypes, settings) comes out of small
pools, so that thousands of examples share a few dozen compiled functions. A tree's
containers are no part of that: they are drawn freely.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from flax.core import FrozenDict

from nnx_norm import Normalizer
from tests.support import Config, Observation, Pair

RECORD = hypothesis.settings().max_examples >= 1000
"""Whether this is a run of record: it can afford more compilations."""

MAPPINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": lambda d: OrderedDict(reversed(d.items())),
    "FrozenDict": FrozenDict,
    "Config": Config,
}
try:
    from ml_collections import ConfigDict
except ImportError:  # duck-typed alike
    pass
else:
    MAPPINGS["ConfigDict"] = ConfigDict

mappings = st.sampled_from(sorted(MAPPINGS))
seeds = st.integers(0, 2**32 - 1)


class Node(NamedTuple):
    """A container in a layout: its kind and its children by name, index or field."""

    kind: str
    children: tuple[tuple[Any, Any], ...]


OUT = "out"
"""A leaf that is excluded; the other leaves of a layout are indices, and None."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The containers of a tree; `build` fills in the leaves."""

    root: Any

    def build(
        self, leaves: Sequence[Any], out: Any = None, mapping: str = "dict"
    ) -> Any:
        """The tree with `leaves` in order and `out` where one is excluded."""

        def make(node: Any) -> Any:
            if not isinstance(node, Node):
                return out if node is OUT else None if node is None else leaves[node]
            made = {key: make(child) for key, child in node.children}
            if node.kind == "mapping":
                return MAPPINGS[mapping](made)
            if node.kind in ("tuple", "list"):
                return (tuple if node.kind == "tuple" else list)(made.values())
            return (Pair if node.kind == "pair" else Observation)(*made.values())

        return make(self.root)

    def excluded(self) -> tuple[tuple[Any, ...], ...]:
        """The paths of the excluded leaves."""

        def walk(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
            if node is OUT:
                yield path
            elif isinstance(node, Node):
                for key, child in node.children:
                    yield from walk(child, (*path, key))

        return tuple(walk(self.root, ()))

    def names(self) -> str:
        """All keys of its mappings, run together."""

        def walk(node: Any) -> Iterator[str]:
            if isinstance(node, Node):
                for key, child in node.children:
                    yield str(key)
                    yield from walk(child)

        return " ".join(walk(self.root))

    def kinds(self) -> set[str]:
        """The kinds of its containers."""

        def walk(node: Any) -> Iterator[str]:
            if isinstance(node, Node):
                yield node.kind
                for _, child in node.children:
                    yield from walk(child)

        return set(walk(self.root))


EMPTY = Node("mapping", ())
FIELDS = {"pair": ("first", "second"), "observation": ("image", "speed")}
NAMES = (("a", "b", "c"), ("a/b", "mean", "value"), ("0", "1", "~"))


@st.composite
def layouts(draw: st.DrawFn, leaves: int) -> Layout:
    """Any tree with so many kept leaves, and with None, excluded and empty nodes."""

    def node(below: tuple[int, ...], depth: int) -> Any:
        if not below and depth < 3:
            return draw(st.sampled_from([None, OUT, EMPTY]))
        if len(below) == 1 and (not depth or draw(st.booleans())):
            return below[0]
        kind = draw(st.sampled_from(["mapping", "tuple", "list", *FIELDS]))
        if kind in FIELDS:
            keys: Sequence[Any] = FIELDS[kind]
        else:
            size = draw(st.integers(1 if depth else len(below), 3))
            keys = draw(st.sampled_from(NAMES)) if kind == "mapping" else range(3)
            keys = keys[:size]
        cuts = sorted(draw(st.integers(0, len(below))) for _ in keys[1:])
        if not depth:
            cuts = list(range(1, len(keys)))
        ends = zip([0, *cuts], [*cuts, len(below)], strict=True)
        parts = [below[start:end] for start, end in ends]
        children = [node(part, max(depth - 1, 0)) for part in parts]
        return Node(kind, tuple(zip(keys, children, strict=True)))

    root = node(tuple(range(leaves)), 3)
    return Layout(root)


class Kind(NamedTuple):
    """What a compiled update depends on but for the settings."""

    dtypes: tuple[str, str]
    lead: tuple[int, ...]
    mask: int | None = None  # how many of the leading axes it has
    weights: int | None = None


FLOAT = ("float32", "float32")
KINDS = [
    Kind(FLOAT, (2, 3)),
    Kind(("float16", "uint8"), (2, 3), mask=2),
    Kind(FLOAT, (2, 2, 2), weights=2),
]
if RECORD:
    KINDS += [
        Kind(FLOAT, (4,)),
        Kind(FLOAT, (1,)),
        Kind(FLOAT, (0, 3)),
        Kind(FLOAT, (2, 3), mask=2),
        Kind(FLOAT, (2, 3), mask=1, weights=2),
        Kind(FLOAT, (2, 3), mask=2, weights=1),
        Kind(FLOAT, (2, 2, 2), mask=2),
        Kind(("bfloat16", "float16"), (2, 3)),
        Kind(("bfloat16", "int16"), (2, 3), weights=2),
        Kind(("int8", "bool"), (2, 3), mask=1),
        Kind(("int32", "float32"), (4,)),
        Kind(("bool", "int32"), (2, 3), weights=1),
    ]

OFFSETS = (0.0, 1.0, -1e4, 1e6)
SCALES = (1.0, 0.0, 1e-3, 1e3, 1e25)
DAMAGES = ("none", "none", "none", "nan", "infinity", "row")


class Samples(NamedTuple):
    """A history: leaves `[*lead, *feat]`, mask and weights over a prefix of `lead`."""

    leaves: list[np.ndarray]
    mask: np.ndarray | None
    weights: np.ndarray | None
    lead: tuple[int, ...]

    def weight(self) -> np.ndarray:
        """Mask and weights as one float64 array `[*lead]`."""
        weight = np.ones(self.lead)
        for part in (self.mask, self.weights):
            if part is not None:
                times = part.reshape(part.shape + (1,) * (len(self.lead) - part.ndim))
                weight = weight * times
        return weight


def make_samples(
    kind: Kind,
    features: Sequence[tuple[int, ...]],
    seed: int,
    offset: float,
    scale: float,
    damage: str,
) -> Samples:
    """Samples of a kind: normal about an offset, some of them damaged."""
    rng = np.random.default_rng(seed)
    leaves = [
        _leaf(rng, dtype, (*kind.lead, *feat), offset, scale)
        for dtype, feat in zip(kind.dtypes, features, strict=False)
    ]
    if damage != "none" and math.prod(kind.lead):
        where = tuple(rng.integers(n) for n in kind.lead)
        bad = np.nan if damage == "nan" else -np.inf
        for leaf in leaves[: 1 if damage == "nan" else None]:
            if not np.issubdtype(leaf.dtype, np.integer) and leaf.dtype != bool:
                at = () if damage == "row" else (-1,) * leaf[where].ndim
                leaf[(*where, *at)] = bad
    mask = weights = None
    if kind.mask is not None:
        mask = rng.random(kind.lead[: kind.mask]) < rng.choice([0.0, 0.6, 0.6, 1.0])
    if kind.weights is not None:  # multiples of 1/4: what they add up to is exact
        pool = np.asarray([0, 0, 0.25, 0.5, 1, 2, 3], np.float32)
        weights = rng.choice(pool, kind.lead[: kind.weights])
    return Samples(leaves, mask, weights, kind.lead)


def _leaf(
    rng: np.random.Generator,
    dtype: str,
    shape: tuple[int, ...],
    offset: float,
    scale: float,
) -> np.ndarray:
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if "int" in dtype:
        limits = np.iinfo(dtype)
        bound = {0.0: 0, 1.0: 20, 1e-3: 3}.get(scale, limits.max // 2)
        low = int(np.clip(offset, limits.min // 2, limits.max // 2))
        return rng.integers(max(low - bound, limits.min), low + bound + 1, shape, dtype)
    if dtype == "float16":
        offset, scale = np.clip(offset, -1e4, 1e4), min(scale, 1e2)
    columns = np.asarray([1.0, 30.0])[: shape[-1]] if shape[-1:] == (2,) else 1.0
    values = offset + scale * columns * rng.normal(size=shape)
    return np.asarray(values).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )


def samples(
    features: Sequence[tuple[int, ...]], kinds: Sequence[Kind] = tuple(KINDS)
) -> st.SearchStrategy[Samples]:
    """Histories for leaves of these feature shapes."""
    return st.builds(
        make_samples,
        st.sampled_from(kinds),
        st.just(features),
        seeds,
        st.sampled_from(OFFSETS),
        st.sampled_from(SCALES),
        st.sampled_from(DAMAGES),
    )


RULES: list[dict[str, Any]] = [
    {},
    {"decay": 0.5},
    {"nonfinite": "propagate"},
    {"max_count": 9},
]
OTHERS: list[dict[str, Any]] = [{}, {"clip": 2.0, "epsilon": 1e-2}]
FEATURES = [((2,), ()), ((2,),), ()] if RECORD else [((2,), ()), ((2,), ()), ()]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a normalizer is made; `jit` marks the few that are run compiled too."""

    layout: Layout
    features: tuple[tuple[int, ...], ...]
    rule: int = 0
    others: int = 0
    emit: str = "inputs"
    jit: bool = False

    def fresh(self) -> Normalizer:
        """A normalizer like `make`'s, quicker."""
        graphdef, state = _made(self)
        return nnx.merge(graphdef, copied(state))

    def make(self, form: str = "struct", mapping: str = "dict") -> Normalizer:
        """A normalizer for a spec written in one of several ways."""
        given = [FORMS[form](shape) for shape in self.features]
        excluded = self.layout.excluded()
        return Normalizer(
            self.layout.build(given, FORMS[form]((4,)), mapping),
            exclude=excluded if form == "shape" else lambda path: path in excluded,
            emit=self.emit,
            **RULES[self.rule],
            **OTHERS[self.others],
        )


FORMS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "struct": lambda shape: jax.ShapeDtypeStruct(shape, jnp.float16),
    "shape": lambda shape: shape,
    "numpy": lambda shape: np.zeros(shape, np.uint8),
    "jax": lambda shape: _zeros(shape),
}
forms = st.sampled_from(sorted(FORMS))


def copied(state: Any) -> Any:
    """A state of Variables of its own: `nnx.split` and `nnx.merge` share them."""
    return jax.tree.map(lambda leaf: leaf, state)


@lru_cache(maxsize=64)
def _made(settings: Settings) -> Any:
    return nnx.split(settings.make())


@lru_cache
def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape)


def any_settings() -> st.SearchStrategy[Settings]:
    """Settings with any tree, or one of the few that are run compiled too."""
    free = st.sampled_from(FEATURES).flatmap(
        lambda features: st.builds(
            Settings,
            layouts(len(features)),
            st.just(features),
            st.sampled_from(range(len(RULES))),
            st.sampled_from(range(len(OTHERS))),
            st.sampled_from(["inputs", "inputs", "moments"]),
        )
    )
    return st.one_of(free, st.sampled_from(COMPILED))


def _goal(a: Any, b: Any) -> Layout:
    inner = Node("mapping", (("img", OUT), ("x", a)))
    return Layout(Node("mapping", (("goal", inner), ("speed", b))))


COMPILED = [
    Settings(_goal(0, 1), ((2,), ()), jit=True),
    Settings(_goal(0, 1), ((2,), ()), rule=1, others=1, jit=True),
]
if RECORD:
    COMPILED += [
        Settings(_goal(0, 1), ((2,), ()), rule=2, jit=True),
        Settings(_goal(0, 1), ((2,), ()), rule=3, jit=True),
        Settings(
            Layout(Node("pair", (("first", 0), ("second", None)))), ((2,),), jit=True
        ),
        Settings(_goal(0, 1), ((2,), ()), emit="moments", jit=True),
        Settings(Layout(EMPTY), (), jit=True),
    ]


class Rollout(NamedTuple):
    """Rewards `[T, B, *shape]`, their ends, and the steps that are there."""

    rewards: list[np.ndarray]
    terminated: np.ndarray
    truncated: np.ndarray | None
    mask: np.ndarray | None


REWARDS = ("float32", "float16", "int8")


def make_rollout(
    shape: tuple[int, ...],
    lead: tuple[int, int],
    dtype: str,
    seed: int,
    scale: float,
    damage: str,
    given: tuple[bool, bool],
) -> Rollout:
    """A rollout with episodes of a few steps; some rewards are damaged."""
    kind = Kind((dtype, dtype), lead)
    (rewards,) = make_samples(kind, [shape], seed, 1.0, scale, damage).leaves
    rng = np.random.default_rng(seed)
    ends, cuts, there = rng.random((3, *lead)) < np.reshape([0.2, 0.1, 0.8], (3, 1, 1))
    return Rollout(
        [rewards],
        ends if seed % 2 else ends.astype(np.float32),
        cuts if given[0] else None,
        there if given[1] else None,
    )


def rollouts(shape: tuple[int, ...]) -> st.SearchStrategy[Rollout]:
    """Rollouts of rewards of this shape."""
    given = [(True, True), (False, False)]
    return st.builds(
        make_rollout,
        st.just(shape),
        st.sampled_from([(5, 2), (1, 3), (0, 2)] if RECORD else [(5, 2)]),
        st.sampled_from(REWARDS[: None if RECORD else 1]),
        seeds,
        st.sampled_from([1.0, 0.0, 1e3]),
        st.sampled_from(DAMAGES),
        st.sampled_from(given[: None if RECORD else 1]),
    )
