"""Facts + method + target -> RopePlan: the exact config difference, and the table that readers must compute.

Lengths are in tokens, frequencies in radians per token. Suffix F = rotary_dims // 2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ropext.carried import Carried, carried, check_nothing_given, same_kind
from ropext.errors import Refused, UsageError
from ropext.facts import Facts, missing_head_dim, positions_of
from ropext.families import (
    FLAT_BESIDE_NESTED,
    LIMITS,
    PARTIAL_NAMES,
    SCALING_NEVER_NULL,
    THETA_NAMES,
    THREE_FIELD_LONGROPE,
    TWO_FIELD_SCALING,
)
from ropext.lengths import LONGEST, format_length
from ropext.rope import (
    ORIGINAL,
    ConfigForm,
    Method,
    Settings,
    canonical_name,
    check_asked,
    frequencies_at,
    given_settings,
    method_named,
)
from ropext.stock import Table

# Keys that say how positions turn; they are written together, in this order, behind the window.
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked for, in the words of `ropext patch`."""

    method: str
    factor: float | None = None
    to: int | None = None  # tokens
    native_length: int | None = None  # tokens
    settings: Mapping[str, Any] | Settings = field(default_factory=dict)
    scaling: Literal["extend", "replace"] | None = None  # what becomes of a scaling in force


@dataclass(frozen=True, kw_only=True, slots=True)
class Purpose:
    """What a method is to do for a checkpoint, and by which numbers it is recorded."""

    method: str
    native_length: int  # seen in training
    target_length: int
    settings: Mapping[str, Any] = field(default_factory=dict)  # explicit ones
    original_length: int | None = None  # that the formula starts from; None where nothing states it
    carried: Literal["extend", "replace"] | None = None  # what becomes of a scaling that was in force
    extras: Mapping[str, Any] = field(default_factory=dict)  # keys of the block in force that stay


@dataclass(frozen=True, kw_only=True, slots=True)
class RopePlan:
    """What will be written, and the table that every reader must then compute."""

    method: str
    inner: str | None  # of progressive
    settings: Mapping[str, Any]  # explicit ones
    carried: Literal["extend", "replace"] | None  # what becomes of a scaling that was in force
    factor: float  # target_length / native_length, exactly
    native_length: int
    original_length: int | None  # that the formula starts from; None where nothing states it
    target_length: int
    window: int  # max_position_embeddings that is written: the target, except for dynamic
    theta_before: float
    theta: float  # in force in the written config
    rotary_dims: int
    frequencies: tuple[float, ...]  # [F], for an input of the length that the formula starts from
    long_frequencies: tuple[float, ...]  # [F], for an input of the target length
    attention_scaling: float  # multiplies cos and sin
    model_type: str
    kept_tables: tuple[Table, ...]  # of modules and layers that stay as they are
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
    settings: Mapping[str, Any] | Settings | None = None,
) -> RopePlan:
    """Plan an extension of the checkpoint with this config. Raises Refused for a target that is unsafe,
    UsageError for a request that contradicts itself."""
    check_asked(settings or {})
    native = facts.native_length if native_length is None else _stated_native_length(native_length, facts)
    target = _target(native, factor, to)
    chosen = method_named(method, target / native, native, settings)
    purpose = Purpose(
        method=canonical_name(method),
        native_length=native,
        original_length=native,
        target_length=target,
        settings=given_settings(settings or {}),
    )
    return plan_at(config, facts, chosen, purpose)


def requested_plan(
    config: Mapping[str, Any], facts: Facts, record: Mapping[str, Any] | None, request: Request
) -> RopePlan:
    """The plan of a request for a checkpoint that may be scaled already. Raises as `make_plan` does."""
    if request.scaling is None:
        return _fresh_plan(config, facts, request)
    present = carried(config, facts, record)
    if present is None:
        raise UsageError(
            f"--{request.scaling}-scaling needs a scaling in force: this checkpoint has none. Leave it out"
        )
    if request.scaling == "replace":
        return _replacing_plan(config, facts, present, request)
    return _extending_plan(config, facts, present, request)


def _fresh_plan(config: Mapping[str, Any], facts: Facts, request: Request) -> RopePlan:
    return make_plan(
        config,
        facts,
        method=request.method,
        factor=request.factor,
        to=request.to,
        native_length=request.native_length,
        settings=request.settings,
    )


def _replacing_plan(config: Mapping[str, Any], facts: Facts, present: Carried, request: Request) -> RopePlan:
    """Another method in place of the one in force, from the length that the model had before any."""
    original = present.original_length
    if original is None and request.native_length is None:
        raise Refused(
            f"the length before the {present.method} in force must be known: config.json does not state it. "
            "Say it with --native-length"
        )
    if original is not None:
        _check_original(original, request.native_length)
        request = replace(request, native_length=None)
    base = replace(facts, theta=present.theta, scaling=None, native_length=original or facts.native_length)
    plan = replace(_fresh_plan(config, base, request), carried="replace")
    if plan.target_length < present.window:
        raise Refused(
            f"a replacement does not shorten the window: {present.method} in force serves {present.window} tokens, "
            f"{request.method} would serve {plan.target_length}. Ask for --to {format_length(present.window)} or more"
        )
    return plan


def _extending_plan(config: Mapping[str, Any], facts: Facts, present: Carried, request: Request) -> RopePlan:
    """The method in force for a longer window: the factor asked for is the new window / the window in force."""
    name, given = canonical_name(request.method), given_settings(request.settings)
    if not same_kind(name, present):
        raise UsageError(
            f"--extend-scaling keeps the method in force, {present.method}: found {name}. Use --method "
            f"{present.method}, or --replace-scaling"
        )
    check_nothing_given(given)
    _check_original(present.original_length, request.native_length)
    target = _target(present.window, request.factor, request.to)
    chosen = present.lengthened(target, given)
    purpose = Purpose(
        method=name,
        native_length=facts.native_length,
        original_length=present.original_length,
        target_length=target,
        settings={**present.settings, **given},
        carried="extend",
        extras=present.extras,
    )
    return plan_at(config, replace(facts, theta=present.theta), chosen, purpose)


def _check_original(original: int | None, stated: int | None) -> None:
    if stated not in (None, original):
        raise Refused(
            f"the original length is what the scaling in force starts from, the length of pre-training, not the "
            f"window: it is {original or 'not known'}, --native-length says {stated}. Leave it out"
        )


def plan_at(config: Mapping[str, Any], facts: Facts, method: Method, purpose: Purpose) -> RopePlan:
    """The plan that gives a config this method; `facts.theta` is the theta that its formula starts from."""
    form = method.config_form(facts.theta, facts.rotary_dims)
    window = form.window or purpose.target_length
    scaling = form.scaling and {**form.scaling, **purpose.extras}
    _check_limits(facts, purpose.method, (scaling or {}).get("rope_type", "default"))
    after = _with_original(_rewritten(config, facts, form.theta, scaling, window), facts, form)
    return RopePlan(
        method=purpose.method,
        inner=getattr(method, "inner", None),
        settings=purpose.settings,
        carried=purpose.carried,
        factor=purpose.target_length / purpose.native_length,
        native_length=purpose.native_length,
        original_length=purpose.original_length,
        target_length=purpose.target_length,
        window=window,
        theta_before=facts.theta,
        theta=form.theta,
        rotary_dims=facts.rotary_dims,
        frequencies=tuple(method.frequencies(facts.theta, facts.rotary_dims)),
        long_frequencies=tuple(frequencies_at(method, purpose.target_length, facts.theta, facts.rotary_dims)),
        attention_scaling=method.attention_scaling,
        model_type=facts.model_type,
        kept_tables=facts.kept_tables,
        config=after,
        config_changes=_changes(config, after),
    )


def _check_limits(facts: Facts, method: str, rope_type: str) -> None:
    """Raises Refused where a transformers that knows the model type cannot be told of the plan."""
    carried_types, why = LIMITS.get(facts.model_type, (None, ""))
    if carried_types is not None and rope_type not in carried_types:
        raise Refused(
            f"a plan must hold in every transformers that knows the model type: {facts.model_type} cannot carry "
            f"{method}, {why}. {_instead(carried_types)}"
        )


def _instead(carried_types: Set[str]) -> str:
    names = [{"default": "ntk"}.get(kind, kind) for kind in sorted(carried_types)]
    return f"Use {' or '.join(names)}" if names else "There is no method for it"


def _with_original(config: dict[str, Any], facts: Facts, form: ConfigForm) -> dict[str, Any]:
    """The original length beside the block, where a reader looks for it there; the three fields that Phi-3 takes."""
    original = (form.scaling or {}).get(ORIGINAL)
    own = dict(positions_of(config))
    if original is not None and (form.original_beside or ORIGINAL in own):  # transformers 5 lets the outer one win
        own[ORIGINAL] = original
    if facts.model_type in THREE_FIELD_LONGROPE and form.scaling and form.scaling["rope_type"] == "longrope":
        if "attention_factor" in form.scaling:
            raise Refused(f"{facts.model_type} takes no attention_factor for its longrope: leave it out")
        block = own["rope_scaling"]
        own["rope_scaling"] = {"type": "longrope", **{key: block[key] for key in ("short_factor", "long_factor")}}
    return own if facts.section is None else {**config, facts.section: own}


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
    own = positions_of(config)
    rope, beside = _rope_keys(own, facts, theta, scaling)
    after: dict[str, Any] = {}
    for key, value in own.items():
        if key == "max_position_embeddings":
            after[key] = window
            after |= rope
        elif key not in ROPE_KEYS:
            after[key] = beside.pop(key, value)
    after |= beside
    return after if facts.section is None else {**config, facts.section: after}


def _rope_keys(
    own: Mapping[str, Any], facts: Facts, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rope settings behind the window, and what stands beside them under a model type's own names."""
    scaling = {**scaling, **facts.mrope} if scaling else {"rope_type": "default", **facts.mrope}
    block: dict[str, Any] = {**scaling, "rope_theta": theta}
    beside: dict[str, Any] = dict(missing_head_dim(own, facts.model_type, scaling["rope_type"]))
    if facts.partial_rotary_factor is not None:
        block["partial_rotary_factor"] = facts.partial_rotary_factor
    flat = {"rope_theta": theta, "rope_scaling": _older_scaling(facts.model_type, scaling)}
    if facts.layer_type is not None:
        nested = {"rope_parameters": {**facts.other_layers, facts.layer_type: block}}
        return {**(flat if facts.model_type in FLAT_BESIDE_NESTED else {}), **nested}, beside | _sliding_theta(facts)
    if facts.model_type in THETA_NAMES:
        beside[THETA_NAMES[facts.model_type]] = theta
    if facts.partial_rotary_factor is not None:
        beside[PARTIAL_NAMES.get(facts.model_type, "partial_rotary_factor")] = facts.partial_rotary_factor
    return {**flat, "rope_parameters": block}, beside


def _older_scaling(model_type: str, scaling: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The scaling as transformers 4 reads it; plain rope is null there."""
    if scaling == {"rope_type": "default"}:
        return scaling if model_type in SCALING_NEVER_NULL else None
    if model_type in TWO_FIELD_SCALING:
        return {"type": scaling["rope_type"], "factor": scaling["factor"]}
    return scaling


def _sliding_theta(facts: Facts) -> dict[str, Any]:
    """The sliding layers' theta under the name that transformers 4 reads, where it reads one."""
    name = FLAT_BESIDE_NESTED.get(facts.model_type)
    return {name: facts.other_layers["sliding_attention"]["rope_theta"]} if name else {}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*after, *(key for key in before if key not in after)]
    changed = [key for key in keys if before.get(key) is not after.get(key) and before.get(key) != after.get(key)]
    return {key: (before.get(key), after.get(key)) for key in changed}  # "is not": NaN, left alone, is no change
