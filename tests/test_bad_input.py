# SPDX-License-Identifier: Apache-2.0
"""What users get wrong: the exact error, which leaf or argument, what to do instead.

Every row is refused before anything is compiled, and leaves every Variable as it was.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import bits

from nnx_norm import (
    Concat,
    Delay,
    Lift,
    Moments,
    Normalizer,
    Parallel,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    Sequential,
    combine_moments,
)

T, B = 2, 3
SPEC = {"goal": {"id": (), "pos": 2}, "image": (4, 4)}


def tree(*lead: int, **changes: Any) -> dict[str, Any]:
    """An observation that fits `SPEC`, but for the leaves in `changes`."""
    leaves = {
        "id": jnp.ones(lead),
        "pos": jnp.ones((*lead, 2)),
        "image": jnp.ones((*lead, 4, 4), jnp.uint8),
        **changes,
    }
    goal = {k: leaves[k] for k in ("id", "pos") if leaves[k] is not ...}
    return {"goal": goal} | {
        k: v for k, v in leaves.items() if k not in ("id", "pos") and v is not ...
    }


def known(norm: Any) -> Any:
    """A normalizer that has seen something."""
    norm.set_statistics(0.1, 2.3, 7)
    return norm


def port(stats: Any) -> Any:
    stats.mean.set_value(jax.tree.map(lambda v: v + 1.5, stats.mean.get_value()))
    return stats


@functools.cache
def subject(name: str) -> Any:
    """The module that a row is about; no row changes it, so that all share it."""
    return {
        "none": lambda: None,
        "one": lambda: known(Normalizer(4)),
        "tree": lambda: known(Normalizer(SPEC)),
        "pair": lambda: known(Normalizer((jnp.zeros(2), jnp.zeros(3)))),
        "off": lambda: known(Normalizer(SPEC, exclude=("image",))),
        "moments": lambda: known(Normalizer(4, emit="moments")),
        "axis": lambda: known(Normalizer(4, axis_name="devcies")),
        "reward": lambda: known(RewardNormalizer(0.9, num_envs=B)),
        "rewards": lambda: known(RewardNormalizer(0.9, shape={"a": (), "b": 2})),
        "port": lambda: port(RunningMeanStd(4)),
        "port tree": lambda: port(RunningMeanStd({"a": 2, "b": 3})),
        "lazy": lambda: RunningMeanStd(),
        "port reward": lambda: port(RewardRunningMeanStd(gamma=0.9, num_envs=B)),
        "delay": lambda: Delay({"pos": jnp.zeros(4, jnp.float32)}, 2),
        "net": lambda: Sequential([known(Normalizer(4)), jnp.tanh]),
        "named": lambda: Parallel(a=known(Normalizer(4)), b=known(Normalizer(4))),
        "deep": lambda: Sequential([Parallel(a=known(Normalizer(4)), b=jnp.tanh)]),
        "concat": lambda: Concat(a=known(Normalizer(4)), b=known(Normalizer(2))),
        "lift": lambda: Lift(jnp.tanh),
    }[name]()


@dataclasses.dataclass(frozen=True)
class Bad:
    """One thing to get wrong.

    Attributes:
      about: Name of a `subject`, or "none" for constructors and functions.
      call: What is done with it.
      error: The exact type of the exception.
      words: What its message and notes hold: the leaf or argument, and the fix.
    """

    about: str
    call: Callable[[Any], Any]
    error: type[Exception]
    words: tuple[str, ...]


def bad(about: str, call: Callable[[Any], Any], error: type[Exception], *words: str):
    return Bad(about, call, error, words)


V, K = ValueError, TypeError
X, H = jnp.ones((B, 4)), jnp.ones((T, B, 4))
R, E = jnp.ones((T, B)), jnp.zeros((T, B), bool)
IMAGINARY = jnp.ones((T, B), jnp.complex64)


def made(cls: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda _: cls(*args, **kwargs)


def fold(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda m: m.update_statistics(*args, **kwargs)


def without(d: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in d.items() if k not in keys}


CONSTRUCTORS = {
    "epsilon zero": bad("none", made(Normalizer, 4, epsilon=0), V, "epsilon", "> 0"),
    "epsilon nan": bad("none", made(Normalizer, 4, epsilon=np.nan), V, "epsilon"),
    "epsilon tiny": bad("none", made(Normalizer, 4, epsilon=1e-60), V, "float32"),
    "epsilon text": bad("none", made(Normalizer, 4, epsilon="1"), K, "epsilon"),
    "epsilon array": bad(
        "none", made(Normalizer, 4, epsilon=jnp.ones(())), K, "epsilon", "number"
    ),
    "initial_std": bad("none", made(Normalizer, 4, initial_std=-1), V, "initial_std"),
    "clip": bad("none", made(Normalizer, 4, clip=-5), V, "clip", ">= 0"),
    "clip bool": bad("none", made(Normalizer, 4, clip=True), K, "clip", "a number"),
    "decay zero": bad("none", made(Normalizer, 4, decay=0), V, "decay", "> 0"),
    "decay above": bad("none", made(Normalizer, 4, decay=1.01), V, "decay", "<= 1"),
    "decay and max": bad(
        "none", made(Normalizer, 4, decay=0.5, max_count=9), V, "decay", "max_count"
    ),
    "max_count": bad("none", made(Normalizer, 4, max_count=0), V, "max_count"),
    "nonfinite": bad(
        "none", made(Normalizer, 4, nonfinite="ignore"), V, "nonfinite", "propagate"
    ),
    "emit": bad("none", made(Normalizer, 4, emit="input"), V, "emit", "inputs"),
    "axis_name": bad("none", made(Normalizer, 4, axis_name=3), K, "axis_name"),
    "shape text": bad("none", made(Normalizer, "4"), K, "shape", "a tuple of ints"),
    "shape float": bad("none", made(Normalizer, {"a": 4.0}), K, "shape['a']"),
    "shape negative": bad(
        "none", made(Normalizer, {"a": (4, -1)}), V, "shape['a']", "-1"
    ),
    "shape bool": bad("none", made(Normalizer, {"a": True}), K, "shape['a']", "an int"),
    "shape complex": bad(
        "none",
        made(Normalizer, {"a": jnp.ones(2, jnp.complex64)}),
        K,
        "shape['a']",
        "Exclude it",
    ),
    "shape objects": bad(
        "none", made(Normalizer, {"a": np.array([None])}), K, "shape['a']", "dtype obj"
    ),
    "exclude nowhere": bad(
        "none", made(Normalizer, SPEC, exclude=["imgae"]), V, "imgae", "image"
    ),
    "exclude number": bad(
        "none", made(Normalizer, SPEC, exclude=[1.5]), K, "exclude", "goal/id"
    ),
    "exclude none": bad(
        "none", made(Normalizer, SPEC, exclude=None), K, "exclude is None", "nothing"
    ),
    "emit array": bad(
        "none", made(Normalizer, 4, emit=np.array(["inputs", "moments"])), V, "emit is"
    ),
    "port prior infinite": bad(
        "none", made(RunningMeanStd, 4, initial_count=np.inf), V, "initial_count"
    ),
    "gamma, num_envs missing": bad("none", made(RewardNormalizer), K, "gamma"),
    "gamma 99": bad("none", made(RewardNormalizer, 99), V, "gamma", "<= 1"),
    "gamma nan": bad("none", made(RewardNormalizer, np.nan), V, "gamma"),
    "gamma negative": bad("none", made(RewardNormalizer, -0.1), V, "gamma", ">= 0"),
    "reward epsilon": bad(
        "none", made(RewardNormalizer, 0.9, epsilon=-1), V, "epsilon"
    ),
    "num_envs": bad("none", made(RewardNormalizer, 0.9, num_envs=-1), V, "num_envs"),
    "num_envs float": bad(
        "none", made(RewardNormalizer, 0.9, num_envs=4.0), K, "num_envs", "an int"
    ),
    "port epsilon": bad("none", made(RunningMeanStd, 4, epsilon=-1), V, "epsilon"),
    "port clamp": bad(
        "none", made(RunningMeanStd, 4, clamp_value=-1), V, "clamp_value"
    ),
    "port decay": bad("none", made(RunningMeanStd, 4, ema_decay=1.5), V, "ema_decay"),
    "port prior": bad(
        "none", made(RunningMeanStd, 4, initial_count=-1), V, "initial_count"
    ),
    "port gamma": bad(
        "none", made(RewardRunningMeanStd, gamma=1.1), V, "gamma", "<= 1"
    ),
    "port num_envs": bad(
        "none",
        made(RewardRunningMeanStd, None, gamma=0.9, num_envs=3),
        V,
        "num_envs needs shape",
    ),
    "delay zero": bad("none", made(Delay, jnp.zeros(4), 0), V, "k_steps", "at least 1"),
    "delay float": bad("none", made(Delay, jnp.zeros(4), 1.0), K, "k_steps", "integer"),
    "delay shape": bad("none", made(Delay, 4, 1), K, "sample_input", "jnp.zeros(3)"),
    "delay filler": bad(
        "none",
        made(Delay, {"a": jnp.zeros(4, jnp.uint8)}, 1, initial_value=-1.0),
        V,
        "sample_input['a']",
        "initial_value",
    ),
    "delay filler text": bad(
        "none", made(Delay, jnp.zeros(4), 1, initial_value="0"), K, "initial_value"
    ),
    "lift class": bad("none", made(Lift, nnx.Linear), K, "Linear", "an instance"),
    "lift number": bad("none", made(Lift, 3.0), K, "a callable"),
    "lift stateful": bad("none", made(Lift, Normalizer(4)), K, "use it as it is"),
    "no layers": bad("none", made(Sequential, []), V, "at least one"),
    "layers dict": bad("none", made(Sequential, {"a": jnp.tanh}), K, "list of modules"),
    "layer number": bad("none", made(Sequential, [jnp.tanh, 3]), K, "layers[1]"),
    "component": bad("none", made(Parallel, a=3.0), K, "components['a']"),
    "component key": bad("none", made(Concat, {1: jnp.tanh}), K, "[1]", "strings"),
    "components list": bad("none", made(Parallel, [jnp.tanh]), K, "dict of modules"),
    "components twice": bad(
        "none", made(Parallel, {"a": jnp.tanh}, b=jnp.tanh), V, "not both"
    ),
}

FORWARD = {
    "no state": bad("one", lambda m: m(X), K, "module(state, x)", "normalize(x)"),
    "no state in a net": bad("net", lambda m: m(X), K, "module(state, x)"),
    "no state in a delay": bad("delay", lambda m: m({"pos": X}), K, "module(state, x)"),
    "no state in a lift": bad("lift", lambda m: m(X), K, "module(state, x)"),
    "x first": bad("one", lambda m: m(X, ()), V, "x is a tuple", "(state, x)"),
    "x first in a net": bad("net", lambda m: m(X, ()), K, "state is", "ahead of x"),
    "bare for a tree": bad(
        "tree", lambda m: m((), X), V, "x is one array of shape (3, 4)", "['goal', "
    ),
    "None for a tree": bad("tree", lambda m: m((), None), V, "x is None", "['goal', "),
    "tree for a bare": bad(
        "one", lambda m: m((), {"a": X}), V, "x is a dict with x['a']", "that leaf"
    ),
    "tuple for a tree": bad(
        "tree", lambda m: m((), (X, X)), V, "x[0] is not in", "goal/pos: (2,)"
    ),
    "list for a tuple": bad(
        "pair",
        lambda m: m((), [jnp.ones((B, 2)), jnp.ones((B, 3))]),
        V,
        "x has the structure",
        "containers that the normalizer was made with",
    ),
    "missing": bad(
        "tree",
        lambda m: m((), tree(B, pos=...)),
        V,
        "x['goal']['pos'] is missing",
        "`exclude` it",
    ),
    "extra": bad(
        "tree",
        lambda m: m((), tree(B, speed=X)),
        V,
        "x['speed'] is not in",
        "Leave it out",
    ),
    "None": bad(
        "tree", lambda m: m((), tree(B, id=None)), V, "x['goal']['id'] is missing"
    ),
    "excluded missing": bad(
        "off", lambda m: m((), tree(B, image=...)), V, "x['image'] is missing", "passes"
    ),
    "features": bad(
        "tree",
        lambda m: m((), tree(B, pos=jnp.ones((B, 1)))),
        V,
        "x['goal']['pos'] has shape (3, 1)",
        "(*lead, 2)",
    ),
    "features in a net": bad(
        "deep",
        lambda m: m([{"a": (), "b": ()}], jnp.ones((B, 1))),
        V,
        "x has shape (3, 1)",
        "in components['a']",
        "in layers[0]",
    ),
    "leading axes": bad(
        "tree",
        lambda m: m((), tree(B, pos=jnp.ones((1, 2)))),
        V,
        "x['goal']['pos'] has the leading axes (1,)",
        "(3,)",
    ),
    "leading axes in normalize": bad(
        "tree",
        lambda m: m.normalize(tree(B, image=jnp.ones((T, B, 4, 4)))),
        V,
        "x['image'] has the leading axes (2, 3)",
    ),
    "leading axes in denormalize": bad(
        "tree",
        lambda m: m.denormalize(tree(B, image=jnp.ones((4, 4)))),
        V,
        "y['image'] has the leading axes ()",
    ),
    "text": bad("one", lambda m: m((), "1234"), K, "x is '1234'", "an array"),
    "list": bad("one", lambda m: m((), [1.0] * 4), V, "x is a list", "Stack"),
    "complex": bad(
        "tree",
        lambda m: m((), tree(B, pos=jnp.ones((B, 2), jnp.complex64))),
        K,
        "x['goal']['pos'] has dtype complex64",
        "convert it",
    ),
    "strings": bad(
        "one", lambda m: m((), np.full((B, 4), "a")), K, "x has dtype <U1", "convert it"
    ),
    "objects": bad(
        "one", lambda m: m((), np.full((B, 4), None)), K, "x has dtype object"
    ),
    "keys": bad(
        "one", lambda m: m.normalize(jax.random.key(0)), K, "x has dtype key", "convert"
    ),
    "times": bad(
        "one", lambda m: m.normalize(np.zeros((B, 4), "M8[s]")), K, "x has dtype date"
    ),
    "state of a net": bad(
        "net", lambda m: m((), X), V, "state is a list of 0", "initialize_state"
    ),
    "state of named": bad(
        "named", lambda m: m({"a": ()}, X), V, "state is a dict of 'a'", "'a', 'b'"
    ),
    "extras of a net": bad(
        "net", lambda m: m([(), ()], X, X), K, "rollout_extras is ArrayImpl", "emits"
    ),
    "input of a concat": bad(
        "concat",
        lambda m: m(m.initialize_state(B), {"a": X}),
        V,
        "the input is a dict of 'a'",
    ),
    "delay without its state": bad(
        "delay", lambda m: m((), {"pos": X}), K, "state is a tuple", "initialize_state"
    ),
    "delay of another batch": bad(
        "delay",
        lambda m: m(m.initialize_state(B + 1), {"pos": X.astype(jnp.float32)}),
        V,
        "x['pos'] is float32 of shape (3, 4)",
        "(4, 4)",
    ),
    "delay with other pointers": bad(
        "delay",
        lambda m: m(
            m.initialize_state(B) | {"idx": jnp.zeros(1, jnp.int32)}, {"pos": X}
        ),
        V,
        "state['buffer']['pos'] has shape (3, 2, 4)",
        "initialize_state",
    ),
    "delay with one pointer": bad(
        "delay",
        lambda m: m(jax.tree.map(lambda v: v[0], m.initialize_state(1)), {"pos": X[0]}),
        V,
        "state['idx'] has shape ()",
        "B = 1",
    ),
    "delay with float pointers": bad(
        "delay",
        lambda m: m(
            m.initialize_state(B) | {"idx": np.zeros(B, np.float32)}, {"pos": X}
        ),
        V,
        "state['idx'] is float32",
        "integers",
    ),
    "delay of another dtype": bad(
        "delay",
        lambda m: m(m.initialize_state(B), {"pos": X.astype(jnp.bfloat16)}),
        V,
        "x['pos'] is bfloat16",
        "Cast",
    ),
    "reset of another state": bad(
        "delay", lambda m: m.reset_state(()), K, "state is a tuple", "initialize_state"
    ),
    "reset of other buffers": bad(
        "delay",
        lambda m: m.reset_state({"buffer": {"pos": X}, "idx": jnp.zeros(B, jnp.int32)}),
        V,
        "state['buffer']['pos'] has shape (3, 4)",
    ),
    "reset of a net": bad("net", lambda m: m.reset_state([()]), V, "state is a list"),
    "batch_size": bad(
        "delay", lambda m: m.initialize_state(2.0), K, "batch_size", "an integer"
    ),
    "batch_size negative": bad(
        "delay", lambda m: m.initialize_state(-1), V, "batch_size", "at least 0"
    ),
}

HISTORY = {
    "None": bad("one", fold(None), V, "history is missing", "Pass it"),
    "whole output": bad(
        "one",
        lambda m: m.update_statistics(m((), X)),
        V,
        "history is a StatefulModuleOutput",
        "rollout_extras",
    ),
    "list of steps": bad("one", fold([X, X]), V, "history is a list", "Stack"),
    "list of trees": bad(
        "tree", fold([tree(B)] * 2), V, "history[0]['goal']['id'] is not", "Stack"
    ),
    "no leading axis": bad(
        "one", fold(jnp.ones(4)), V, "history has shape (4,)", "x[None]"
    ),
    "features": bad(
        "one", fold(jnp.ones((T, B, 1))), V, "history has shape (2, 3, 1)", "broadcast"
    ),
    "features swapped": bad(
        "tree",
        fold(tree(T, B, pos=jnp.ones((2, T, B)))),
        V,
        "history['goal']['pos'] has shape (2, 2, 3)",
    ),
    "leading axes": bad(
        "tree",
        fold(tree(T, B, pos=jnp.ones((T, 1, 2)))),
        V,
        "history['goal']['pos'] has the leading axes (2, 1)",
        "(T, B)",
    ),
    "missing": bad(
        "tree", fold(tree(T, B, image=...)), V, "history['image'] is missing"
    ),
    "extra": bad("off", fold(tree(T, B, speed=H)), V, "history['speed']", "`exclude`"),
    "complex": bad(
        "tree", fold(tree(T, B, id=IMAGINARY)), K, "history['goal']['id']", "complex64"
    ),
    "ragged": bad("one", fold(np.array([X, None], object)), K, "history has dtype obj"),
    "moments for inputs": bad(
        "one",
        lambda m: m.update_statistics(subject("moments")((), X).rollout_extras),
        K,
        "history holds moments",
        'emit="inputs"',
    ),
    "inputs for moments": bad(
        "moments", fold(H), K, "history is a ArrayImpl", 'emit="moments"', "Raw inputs"
    ),
    "moments of one step": bad(
        "moments",
        lambda m: m.update_statistics(m((), X).rollout_extras),
        V,
        "history.count has shape ()",
        "v[None]",
    ),
    "moments with a mask": bad("moments", fold(H, mask=E), V, "mask", 'emit="inputs"'),
    "moments with weights": bad("moments", fold(H, weights=R), V, "weights", "emit="),
    "mask shape": bad("one", fold(H, mask=jnp.ones((B, T), bool)), V, "mask", "(2, 3)"),
    "mask per feature": bad(
        "one", fold(H, mask=jnp.ones(H.shape, bool)), V, "mask has shape (2, 3, 4)"
    ),
    "mask with an axis too many": bad(
        "one", fold(H, mask=E[..., None]), V, "mask has shape (2, 3, 1)", "prefix"
    ),
    "mask scalar": bad("one", fold(H, mask=True), V, "mask has shape ()"),
    "mask of numbers": bad("one", fold(H, mask=R), K, "mask", "astype(bool)"),
    "mask of integers": bad(
        "one", fold(H, mask=R.astype(jnp.int32)), K, "mask", "weights="
    ),
    "mask text": bad("one", fold(H, mask="all"), K, "mask is 'all'"),
    "weights negative": bad(
        "one", fold(H, weights=R.at[0, 1].set(-1)), V, "weights", ">= 0"
    ),
    "weights nan": bad("one", fold(H, weights=R * jnp.nan), V, "weights", "non-finite"),
    "weights bool": bad("one", fold(H, weights=~E), K, "weights", "mask="),
    "weights shape": bad(
        "one", fold(H, weights=jnp.ones(B)), V, "weights has shape (3,)", "(2, 3)"
    ),
    "weights complex": bad(
        "one", fold(H, weights=IMAGINARY), K, "weights has dtype comp"
    ),
    "axis": bad("axis", fold(H), V, "axis_name 'devcies'", "axis_name=None"),
    "extras of a net": bad(
        "net", fold(H), K, "rollout_extras is ArrayImpl", "a list of 2"
    ),
    "extras of named": bad("named", fold({"a": H}), V, "rollout_extras", "'a', 'b'"),
    "one child": bad(
        "named",
        fold({"a": H, "b": H[..., :1]}),
        V,
        "history has shape (2, 3, 1)",
        "in components['b']",
    ),
    "mask in a net": bad(
        "net", fold([H, None], mask=E.T), V, "mask has shape (3, 2)", "in layers[0]"
    ),
    "weights in a net": bad(
        "net", fold([H, None], weights=-R), V, "weights", "in layers[0]"
    ),
}

NAN = np.full(4, np.nan)
SETTERS = {
    "mean shape": bad(
        "one", lambda m: m.set_statistics(np.ones(3), 1, 1), V, "mean has shape (3,)"
    ),
    "mean tree": bad(
        "tree", lambda m: m.set_statistics({"a": 1}, 1, 1), V, "mean['a'] is not in"
    ),
    "mean bare": bad(
        "tree", lambda m: m.set_statistics(np.ones(4), 1, 1), V, "mean is one array"
    ),
    "mean nan": bad("one", lambda m: m.set_statistics(NAN, 1, 1), V, "mean", "finite"),
    "mean text": bad("one", lambda m: m.set_statistics("0", 1, 1), K, "mean"),
    "mean huge": bad("one", lambda m: m.set_statistics(1e39, 1, 1), V, "mean", "float"),
    "variance": bad(
        "tree",
        lambda m: m.set_statistics(0, tree(pos=[1.0, -1.0]), 1),
        V,
        "variance['goal']['pos']",
        ">= 0",
    ),
    "M2 huge": bad("one", lambda m: m.set_statistics(0, 1e38, 1e3), V, "M2", "float32"),
    "count": bad("one", lambda m: m.set_statistics(0, 1, -1), V, "count", ">= 0"),
    "count nan": bad("one", lambda m: m.set_statistics(0, 1, np.nan), V, "count"),
    "count none": bad("one", lambda m: m.set_statistics(0, 1, None), K, "count"),
    "count shape": bad("one", lambda m: m.set_statistics(0, 1, [1, 2]), V, "count"),
    "count zero": bad("one", lambda m: m.set_statistics(1, 1, 0), V, "count is 0"),
    "copy of a dict": bad(
        "one", lambda m: m.copy_from(m.to_dict()), K, "copy_from got dict", "normalizer"
    ),
    "copy of others": bad(
        "one", lambda m: m.copy_from(Normalizer(3)), V, "copy_from got", "(4,)"
    ),
    "merge itself": bad("one", lambda m: m.merge_from(m), V, "merge_from", "twice"),
    "merge a list": bad("one", lambda m: m.merge_from([1]), K, "merge_from got list"),
    "merge moments": bad(
        "one",
        lambda m: m.merge_from(Moments(np.ones(3), np.ones(3), jnp.ones(()))),
        V,
        "mean has shape (3,)",
    ),
    "load a list": bad("one", lambda m: m.load_dict([1]), K, "load_dict got list"),
    "load without a count": bad(
        "one", lambda m: m.load_dict(without(m.to_dict(), "count")), V, "count is miss"
    ),
    "load without a mean": bad(
        "one", lambda m: m.load_dict(without(m.to_dict(), "mean")), V, "'mean' is miss"
    ),
    "load another tree": bad(
        "one",
        lambda m: m.load_dict(subject("tree").to_dict()),
        V,
        "'mean' is missing",
        "mean/goal/pos",
        "another `shape`",
    ),
    "load a bare one": bad(
        "tree",
        lambda m: m.load_dict(subject("one").to_dict()),
        V,
        "'mean/goal/id' is missing",
        "another `shape`",
    ),
    "load a leaf too many": bad(
        "off",
        lambda m: m.load_dict(subject("tree").to_dict()),
        V,
        "'mean/image' is not in the spec",
        "`exclude`",
    ),
    "load another shape": bad(
        "one",
        lambda m: m.load_dict(m.to_dict() | {"mean": np.ones(3)}),
        V,
        "mean has shape (3,)",
        "(4,)",
    ),
    "load a negative count": bad(
        "one", lambda m: m.load_dict(m.to_dict() | {"count": -1}), V, "count", ">= 0"
    ),
    "load negative skips": bad(
        "one", lambda m: m.load_dict(m.to_dict() | {"skipped": -1}), V, "skipped", ">= "
    ),
    "load nan": bad(
        "one", lambda m: m.load_dict(m.to_dict() | {"mean": NAN}), V, "mean", "finite"
    ),
    "load text": bad(
        "one", lambda m: m.load_dict(m.to_dict() | {"M2": ["a"] * 4}), K, "M2"
    ),
    "load another library's": bad(
        "one",
        lambda m: m.load_dict({"mean": np.ones(4), "var": np.ones(4), "count": 1}),
        V,
        "'variance' is missing",
        "nnx_norm.interop",
    ),
    "build of a list": bad("one", lambda m: Normalizer.from_dict([1]), K, "from_dict"),
    "build without a shape": bad(
        "one",
        lambda m: Normalizer.from_dict(without(m.to_dict(), "shape")),
        V,
        "shape is missing",
        "load_dict",
    ),
    "build of the wrong class": bad(
        "reward",
        lambda m: Normalizer.from_dict(m.to_dict()),
        V,
        "initial_std, emit, max_count",
    ),
    "build rewards of inputs": bad(
        "one",
        lambda m: RewardNormalizer.from_dict(m.to_dict()),
        V,
        "gamma, num_envs missing",
        "from_dict of the class",
    ),
    "build rewards of a setting": bad(
        "reward",
        lambda m: RewardNormalizer.from_dict(m.to_dict() | {"gamma": 2.0}),
        V,
        "gamma is 2.0",
    ),
}


def step(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda m: m.update(*args, **kwargs)


REWARDS = {
    "one step": bad("reward", step(R[0], E[0]), V, "rewards have", "rewards[None]"),
    "three axes": bad(
        "reward", step(R[..., None], E), V, "leading axes (2, 3, 1)", "(T, B)"
    ),
    "tree for one": bad(
        "reward", step({"a": R}, E), V, "rewards is a dict with rewards['a']", "leaf"
    ),
    "one for a tree": bad("rewards", step(R, E), V, "rewards is one array", "['a', "),
    "missing": bad("rewards", step({"a": R}, E), V, "rewards['b'] is missing"),
    "extra": bad(
        "rewards",
        step({"a": R, "b": jnp.ones((T, B, 2)), "c": R}, E),
        V,
        "rewards['c'] is not in",
    ),
    "leading axes": bad(
        "rewards",
        step({"a": R, "b": jnp.ones((B, T, 2))}, E),
        V,
        "rewards['b'] has the leading axes (3, 2)",
    ),
    "text": bad("reward", step("1", E), K, "rewards is '1'"),
    "complex": bad("reward", step(IMAGINARY, E), K, "rewards has dtype complex64"),
    "flags shape": bad(
        "reward", step(R, E.T), V, "terminated has shape (3, 2)", "(T, B) = (2, 3)"
    ),
    "flags of one step": bad("reward", step(R, E[0]), V, "terminated has shape (3,)"),
    "flag scalar": bad("reward", step(R, False), V, "terminated has shape ()"),
    "flags none": bad("reward", step(R, None), K, "terminated is None", "an array"),
    "flags of numbers": bad(
        "reward", step(R, R * 2.5), V, "terminated holds 2.5", "zeros and ones"
    ),
    "flags of counts": bad(
        "reward", step(R, E, 7 * R.astype(jnp.int32)), V, "truncated holds 7", "bool"
    ),
    "flags nan": bad("reward", step(R, R * jnp.nan), V, "terminated holds nan"),
    "flags complex": bad(
        "reward", step(R, IMAGINARY), K, "terminated has dtype complex"
    ),
    "truncated shape": bad("reward", step(R, E, E[:, :1]), V, "truncated has shape"),
    "mask prefix": bad("reward", step(R, E, mask=E[:, 0]), V, "mask has shape (2,)"),
    "mask numbers": bad("reward", step(R, E, mask=R), K, "mask", "astype(bool)"),
    "normalize": bad(
        "rewards",
        lambda m: m.normalize({"a": R, "b": R}),
        V,
        "rewards['b'] has shape (2, 3)",
        "(*lead, 2)",
    ),
    "denormalize": bad(
        "rewards",
        lambda m: m.denormalize({"a": R[0], "b": jnp.ones((T, B, 2))}),
        V,
        "rewards['b'] has the leading axes (2, 3)",
    ),
    "port text": bad("port", lambda m: m.record_moments("a"), K, "x is 'a'"),
    "port row": bad(
        "port", lambda m: m.record_moments(jnp.ones(4)), V, "x has shape (4,)", "x[None"
    ),
    "port time": bad(
        "port", lambda m: m.record_moments(H), V, "leading axes (2, 3)", "reshape"
    ),
    "port features": bad(
        "port", lambda m: m.record_moments(H[0, :, :3]), V, "x has shape (3, 3)"
    ),
    "port leading": bad(
        "port tree",
        lambda m: m.record_moments({"a": jnp.ones((5, 2)), "b": jnp.ones((4, 3))}),
        V,
        "x['b'] has the leading axes (4,)",
    ),
    "port missing": bad(
        "port tree", lambda m: m.normalize({"a": jnp.ones(2)}), V, "x['b'] is missing"
    ),
    "port leading axes": bad(
        "port tree",
        lambda m: m.normalize({"a": jnp.ones((2, 2)), "b": jnp.ones((1, 3))}),
        V,
        "x['b'] has the leading axes (1,)",
    ),
    "port moments": bad(
        "port", lambda m: m.update_from_moments(np.ones(3), 1, 1), V, "mean has shape"
    ),
    "port variance": bad(
        "port", lambda m: m.update_from_moments(0, -1, 1), V, "var", ">= 0"
    ),
    "port count": bad(
        "port", lambda m: m.update_from_moments(0, 1, -1), V, "count", ">= 0"
    ),
    "port nan": bad(
        "port", lambda m: m.update_from_moments(NAN, 1, 1), V, "mean", "finite"
    ),
    "lazy text": bad("lazy", lambda m: m.record_moments("a"), K, "x is 'a'"),
    "lazy number": bad(
        "lazy", lambda m: m.record_moments(jnp.ones(())), V, "x", "lead"
    ),
    "port flags": bad(
        "port reward", lambda m: m.record_reward(R[0], R[0] * 2), V, "terminated holds"
    ),
    "port flags shape": bad(
        "port reward", lambda m: m.record_reward(R[0], E), V, "terminated has shape"
    ),
    "port reward": bad(
        "port reward", lambda m: m.record_reward(R, E), V, "reward has the leading axes"
    ),
    "combine counts": bad(
        "none",
        lambda _: combine_moments([0.0], [1.0], [-1]),
        V,
        "counts",
    ),
    "combine lengths": bad(
        "none", lambda _: combine_moments([0.0, 1.0], [1.0], [1]), V, "means"
    ),
}

BAD = {
    f"{kind}: {what}": row
    for kind, rows in {
        "constructor": CONSTRUCTORS,
        "forward": FORWARD,
        "history": HISTORY,
        "setter": SETTERS,
        "reward or port": REWARDS,
    }.items()
    for what, row in rows.items()
}


@pytest.mark.parametrize("row", BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_named_with_the_fix_and_changes_nothing(row: Bad):
    module = subject(row.about)
    before = {} if module is None else bits(module)
    with pytest.raises(Exception) as caught:
        row.call(module)
    assert type(caught.value) is row.error, repr(caught.value)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [word for word in row.words if word not in message] == [], message
    assert module is None or bits(module) == before


def test_the_table_is_long_enough():
    assert len(BAD) >= 150
