"""Facts + method + target -> RopePlan: the exact config difference, and the table that readers must compute.

Lengths are in tokens, frequencies in radians per token. Suffix F = rotary_dims // 2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropext.errors import Refused, UsageError
from ropext.facts import PARTIAL_NAMES, THETA_NAMES, Facts
from ropext.lengths import LONGEST, format_length
from ropext.rope import Method, Progressive, canonical_name, method_named

# Keys that say how positions turn; they are written together, in this order, behind the window.
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopePlan:
    """What will be written, and the table that every reader must then compute."""

    method: str
    inner: str | None  # of progressive
    factor: float  # target_length / native_length, exactly
    native_length: int
    target_length: int
    theta_before: float
    theta: float  # in force in the written config
    rotary_dims: int
    frequencies: tuple[float, ...]  # [F]
    attention_scaling: float  # multiplies cos and sin
    config: Mapping[str, Any]  # the whole new config
    config_changes: Mapping[str, tuple[Any, Any]]  # key -> before, after; None where absent


def make_plan(
    config: Mapping[str, Any],
    facts: Facts,
    *,
    method: str,
    factor: float | None = None,
    to: int | None = None,
    native_length: int | None = None,
    inner: str | None = None,
) -> RopePlan:
    """Plan an extension of the checkpoint with this config. Raises Refused for a target that is unsafe,
    UsageError for a request that contradicts itself."""
    native = facts.native_length if native_length is None else _stated_native_length(native_length, facts)
    target = _target(native, factor, to)
    chosen = method_named(method, target / native, inner)
    return plan_at(config, facts, chosen, name=canonical_name(method), native_length=native, target_length=target)


def plan_at(
    config: Mapping[str, Any],
    facts: Facts,
    method: Method,
    *,
    name: str,
    native_length: int,
    target_length: int,
) -> RopePlan:
    """The plan that gives a config this method and window; `facts.theta` is the theta before any extension."""
    form = method.config_form(facts.theta, facts.rotary_dims)
    after = _rewritten(config, facts, form.theta, form.scaling, target_length)
    return RopePlan(
        method=name,
        inner=method.inner if isinstance(method, Progressive) else None,
        factor=target_length / native_length,
        native_length=native_length,
        target_length=target_length,
        theta_before=facts.theta,
        theta=form.theta,
        rotary_dims=facts.rotary_dims,
        frequencies=tuple(method.frequencies(facts.theta, facts.rotary_dims)),
        attention_scaling=1.0,
        config=after,
        config_changes=_changes(config, after),
    )


def _stated_native_length(stated: int, facts: Facts) -> int:
    if stated < 1:
        raise UsageError(f"a native length is a whole number of tokens above 0: found {stated}")
    if stated > facts.window:
        raise Refused(
            f"a native length cannot be beyond the window that the model has: {stated} is above "
            f"max_position_embeddings {facts.window}. State the length it was trained at"
        )
    return stated


def _target(native: int, factor: float | None, to: int | None) -> int:
    """Tokens of the extended window."""
    if factor is None and to is None:
        raise UsageError("how far to extend is missing: give --factor, for instance 4, or --to, for instance 8k")
    if factor is not None:
        if not (math.isfinite(factor) and factor > 1):
            raise Refused(_about_factor(factor))
        if factor * native > LONGEST:
            raise Refused(
                f"positions are counted in float32, exact up to {LONGEST}: factor {factor:g} asks for "
                f"{factor * native:.0f} tokens. Use a smaller factor"
            )
    target = to if factor is None else math.floor(native * factor)
    assert target is not None
    if to is not None and to != target:
        raise UsageError(
            f"factor and target length disagree: {native} tokens times {factor:g} are {target}, not {to}. "
            "Give one of them"
        )
    if target > LONGEST:
        raise Refused(f"positions are counted in float32, exact up to {LONGEST}: {target} tokens are asked for")
    if target <= native:
        raise Refused(
            f"an extension must be longer than the native length {native}: the target is {target} tokens. "
            f"Ask for more, for instance --to {format_length(4 * native)}"
        )
    return target


def _about_factor(factor: float) -> str:
    rule = f"a factor must be a finite number above 1, it lengthens the context: found {factor:g}"
    return rule + (f". Did you mean {1 / factor:g}?" if 0 < factor < 1 else "")


def _rewritten(
    config: Mapping[str, Any], facts: Facts, theta: float, scaling: Mapping[str, Any] | None, window: int
) -> dict[str, Any]:
    """The config in the layout that transformers 4 and 5 both read right: old keys and new block, in agreement."""
    scaling = dict(scaling) if scaling else None
    block = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    values: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": block}
    beside: dict[str, Any] = {}
    if facts.model_type in THETA_NAMES:
        beside[THETA_NAMES[facts.model_type]] = theta
    if facts.partial_rotary_factor is not None:
        block["partial_rotary_factor"] = facts.partial_rotary_factor
        beside[PARTIAL_NAMES.get(facts.model_type, "partial_rotary_factor")] = facts.partial_rotary_factor
    after: dict[str, Any] = {}
    for key, value in config.items():
        if key == "max_position_embeddings":
            after[key] = window
            after |= values
        elif key not in ROPE_KEYS:
            after[key] = beside.pop(key, value)
    return after | beside


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*after, *(key for key in before if key not in after)]
    changed = [key for key in keys if before.get(key) is not after.get(key) and before.get(key) != after.get(key)]
    return {key: (before.get(key), after.get(key)) for key in changed}  # "is not": NaN, left alone, is no change
