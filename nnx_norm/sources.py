# SPDX-License-Identifier: Apache-2.0
"""Which library an object is of, by its attributes, and which importer reads it.

Importers take objects by their attributes. Several libraries use the same names for
other things, so that each importer first asks here, and refuses what another reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nnx_norm import state_dicts
from nnx_norm.running_mean_std import RunningMeanStd
from nnx_norm.statistics import RunningStatistics
from nnx_norm.tree import is_mapping

# What is to be there, and which importers read it; the first line that fits counts.
SIGNATURES = (
    ({"with_mean", "with_std"}, {"from_sklearn"}),
    ({"mean", "M2", "counter"}, {"from_nnx_ppo"}),
    # Brax's has come from Acme's: both importers read both.
    ({"mean", "std", "summed_variance", "count"}, {"from_brax", "from_acme"}),
    ({"emp_norm"}, {"from_rsl_rl_rewards"}),
    ({"_mean", "_var", "count"}, {"from_rsl_rl"}),
    (
        {"running_mean", "running_variance", "current_count"},
        {"from_skrl"},
    ),
    ({"loc", "scale", "eps", "in_keys"}, {"from_torchrl"}),
    ({"loc", "scale", "eps", "_td"}, {"from_torchrl"}),
    ({"loc", "scale", "eps", "_count"}, {"from_torchrl"}),
    ({"mean", "var", "use_running_average"}, {"from_flax_batch_norm"}),
)
GYMNASIUM = {"from_gymnasium", "from_gymnasium_rewards"}
SB3 = {"from_sb3", "from_sb3_rewards"}
STATE_DICT = "running_mean_std_from_state_dict"


def readers(source: Any) -> set[str]:
    """Names of the importers that read an object; empty where it is of no known kind.

    Args:
      source: An object of another library, or a saved state of it.

    Returns:
      Names in `nnx_norm.interop`.

    Example:
      >>> readers({"_mean": 0.0, "_var": 1.0, "count": 9})
      {'from_rsl_rl'}
    """
    for names, found in SIGNATURES:
        if all(has(source, name) for name in names):
            return found
    found_in = list(layers(source))
    if any("clip_obs" in layer for layer in found_in):
        return SB3
    wrapped = {"obs_rms": "from_gymnasium", "return_rms": "from_gymnasium_rewards"}
    found = {wrapped[k] for layer in found_in for k in wrapped if k in layer}
    found |= {"from_sb3_rewards"} if any("ret_rms" in k for k in found_in) else set()
    if not found and has(source, "mean") and has(source, "var"):
        if not has(source, "count"):
            return {"from_flax_batch_norm"} if is_mapping(source) else set()
        if is_mapping(source):
            return {"from_gymnasium", STATE_DICT}
        return {STATE_DICT if "_buffers" in own(source) else "from_gymnasium"}
    return found


def expect(source: Any, importer: str) -> None:
    """Refuse what another importer reads, or none.

    Args:
      source: What an importer was given.
      importer: Its name.

    Raises:
      ValueError: It is of another library, of ours, or of a kind that holds nothing.

    Example:
      >>> expect({"_mean": 0.0, "_var": 1.0, "count": 9}, "from_rsl_rl")
    """
    kind = type(source).__name__
    if isinstance(source, RunningStatistics | RunningMeanStd):
        raise ValueError(
            f"{importer} got a {kind} of nnx_norm itself, with more digits than it "
            "reads: use copy_from, merge_from or nnx.clone."
        )
    if isinstance(source, (str, bytes, int, float, np.ndarray)) or source is None:
        shown = f" ({source!r})" if isinstance(source, str) else ""
        raise ValueError(
            f"{importer} got {kind}{shown}; expected an object of the library or its "
            "saved state, loaded."
        )
    if isinstance(source, (tuple, list)) and not hasattr(source, "_fields"):
        here = [i for i, part in enumerate(source) if importer in readers(part)]
        raise ValueError(
            f"{importer} got a {kind} of {len(source)}; expected the statistics alone"
            + (f": pass its element [{here[0]}]." if here else ".")
        )
    found = readers(source)
    # Wrappers of one kind may be there without the other: their importers tell.
    if importer in GYMNASIUM and found and found <= GYMNASIUM:
        return
    if found and importer not in found:
        right = " or ".join(f"interop.{name}" for name in sorted(found))
        if STATE_DICT in found and not is_mapping(source):
            right += " (it takes its state_dict())"
        raise ValueError(
            f"{importer} got a {kind}, which normalizes in another way than it "
            f"reads: use {right}."
        )


def at_prefix(source: Any, prefix: str, importer: str, names: set[str]) -> Any:
    """A module as it is, or what a state dict has at a prefix; as `expect` checks it.

    Args:
      source: Module or state dict.
      prefix: Where it stands in the state dict; a dot at its end is no matter.
      importer: Name of who asks.
      names: What it reads there, to tell where else there is some.

    Returns:
      The module, or a nested mapping.

    Raises:
      ValueError: There is nothing to read, or a prefix in something without names.

    Example:
      >>> at_prefix({"norm._mean": 1.0}, "norm.", "from_rsl_rl", {"_mean"})
      {'_mean': 1.0}
    """
    if not is_mapping(source):
        if prefix:
            raise ValueError(
                f"{importer} got the prefix {prefix!r} with a {type(source).__name__}; "
                "a prefix is for a state dict: pass that part of the module itself, or "
                "its state_dict()."
            )
        expect(source, importer)
        return source
    state = state_dicts.nested(source)
    found = state_dicts.find(state, [name for name in prefix.split(".") if name])
    if not is_mapping(found) or not names <= set(found):
        there = [".".join(path) for path in holders(state, names)]
        if there:
            raise ValueError(
                f"The state dict has no {', '.join(map(repr, sorted(names)))} at the "
                f"prefix {prefix!r}; it has them at {there}."
            )
    if found is None:
        raise ValueError(f"The state dict has no entry at the prefix {prefix!r}.")
    expect(found, importer)
    return found


def own(layer: Any) -> dict[str, Any]:
    """Attributes of an object itself, or the entries of a mapping.

    `getattr` would ask the environments below a wrapper, or recurse without one.

    Example:
      >>> own({"a": 1})
      {'a': 1}
    """
    return dict(layer) if is_mapping(layer) else getattr(layer, "__dict__", {})


def has(source: Any, name: str) -> bool:
    """Whether a field is there, None or not; no environment below is asked.

    Example:
      >>> has({"a": None}, "a"), has(1.0, "imag"), has(1.0, "mean")
      (True, True, False)
    """
    if is_mapping(source):
        return name in source.keys()
    held = own(source)
    parts = [held, held.get("_buffers") or {}, held.get("_modules") or {}]
    return any(name in part for part in parts) or hasattr(type(source), name)


def layers(source: Any) -> Iterator[dict[str, Any]]:
    """Attributes of wrappers of environments, from the outermost to what they wrap.

    Example:
      >>> [sorted(layer) for layer in layers({"env": {"obs_rms": None}})]
      [['env'], ['obs_rms']]
    """
    layer, seen = source, set()
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        yield own(layer)
        inner = own(layer)
        layer = inner["venv"] if "venv" in inner else inner.get("env")


def holders(state: Any, names: set[str], path: tuple[str, ...] = ()) -> list[Any]:
    """Paths of the parts of a nested state that have entries of some names.

    Example:
      >>> holders({"a": {"norm": {"mean": 0.0, "var": 1.0}}}, {"mean", "var"})
      [('a', 'norm')]
    """
    if not is_mapping(state):
        return []
    here = [path] if names <= set(state) else []
    inner = [
        k for k in state if k != "emp_norm"
    ]  # a part, which another importer reads
    return here + [p for k in inner for p in holders(state[k], names, (*path, str(k)))]
