"""What a checkpoint is as it lies there: the rotary embedding in force, its lengths, and where it comes from.

Needs no torch for the model types that ropext knows. Frequencies in radians per token, suffix F pairs, lengths in
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ropext.carried import Carried, carried
from ropext.checkpoint import Checkpoint, open_checkpoint
from ropext.errors import Refused, RopextError, short
from ropext.facts import Facts, positions_of, read_facts
from ropext.provenance import lineage
from ropext.rope import Method, Plain, changes_with_length, frequencies_at, method_named


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One pair of head dimensions."""

    frequency: float  # radians per token
    wavelength: float  # tokens of a whole turn
    turns: float  # within the native length


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The pairs of a head for inputs of one length."""

    length: int
    pairs: tuple[Pair, ...]  # [F], the fastest first


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One checkpoint of a lineage."""

    label: str  # source, patched, tuned
    path: str
    window: int | None
    native_length: int | None
    method: str | None
    factor: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What `show --json` prints."""

    model: str
    model_type: str
    method: str  # that ropext recorded, else the rope type of the config
    rope_type: str
    factor: float | None
    original_length: int | None  # that the formula starts from
    attention_scaling: float | None  # on cos and sin
    rope_theta: float
    rotary_dims: int
    window: int  # max_position_embeddings
    target_length: int  # what the method serves: more than the window for dynamic
    native_length: int
    tokenizer_length: int | None
    sliding_window: int | None
    tables: tuple[Table, ...]  # one, or that of short and that of the longest inputs
    not_computed: str | None  # why there is no table
    lineage: tuple[Step, ...]


def inspect(path: Path, model: str, built_in: Path) -> Inspection:
    """Everything about the positions of the checkpoint in `path`. Raises Refused where they cannot be told."""
    checkpoint = open_checkpoint(path)
    facts = read_facts(checkpoint)
    present = carried(checkpoint.config, facts, checkpoint.record)
    recorded = (checkpoint.record or {}).get("rope", {})
    method, why_not = _tried(present, facts)
    return Inspection(
        model=model,
        model_type=facts.model_type,
        method=str(recorded.get("method") or (present.method if present else "default")),
        rope_type=present.method if present and facts.scaling is not None else "default",
        factor=_finite((present.factor if present else None) or recorded.get("factor")),
        original_length=present.original_length if present else recorded.get("native_length"),
        attention_scaling=None if method is None else method.attention_scaling,
        rope_theta=facts.theta,
        rotary_dims=facts.rotary_dims,
        window=facts.window,
        target_length=present.window if present else facts.window,
        native_length=facts.native_length,
        tokenizer_length=facts.tokenizer_length,
        sliding_window=facts.sliding_window,
        tables=() if method is None else _tables(method, present, facts),
        not_computed=why_not,
        lineage=steps(checkpoint, built_in),
    )


def _finite(factor: float | None) -> float | None:
    return factor if factor is not None and math.isfinite(factor) else None  # JSON has no other numbers


def _tried(present: Carried | None, facts: Facts) -> tuple[Method | None, str | None]:
    """The method whose table readers compute, or why there is none."""
    try:
        return method_in_force(present, facts), None
    except (RopextError, TypeError, ValueError, ArithmeticError) as error:  # of settings that are no numbers
        return None, str(error)


def method_in_force(present: Carried | None, facts: Facts) -> Method:
    """The method that readers make of the scaling block; where it states no original length, they take the window."""
    if present is None or facts.scaling is None or present.factor == 1:
        return Plain()
    if present.factor is None:
        raise Refused(f"a factor must be a number: config.json has {short(facts.scaling.get('factor'))}")
    return method_named(present.method, present.factor, present.original_length or facts.window, present.settings)


def _tables(method: Method, present: Carried | None, facts: Facts) -> tuple[Table, ...]:
    longest = facts.window if present is None else present.window
    lengths = [longest]
    if changes_with_length(method) and present is not None:
        lengths = [present.original_length or facts.window, longest]
    return tuple(
        Table(
            length=length,
            pairs=tuple(
                _pair(frequency, facts) for frequency in frequencies_at(method, length, facts.theta, facts.rotary_dims)
            ),
        )
        for length in lengths
    )


def _pair(frequency: float, facts: Facts) -> Pair:
    wavelength = 2 * math.pi / frequency
    return Pair(frequency=frequency, wavelength=wavelength, turns=facts.native_length / wavelength)


def steps(checkpoint: Checkpoint, built_in: Path) -> tuple[Step, ...]:
    """The lineage with its numbers; a first source that is no longer there is named all the same."""
    found = [_step(label, path) for label, path in lineage(checkpoint, built_in)]
    first = open_checkpoint(Path(found[0].path)).record
    if first is not None:
        gone = str(first["source"]["model"])
        found.insert(0, Step(label="source", path=gone, window=None, native_length=None, method=None, factor=None))
    return tuple(found)


def _step(label: str, path: Path) -> Step:
    checkpoint = open_checkpoint(path)
    record = checkpoint.record or {}
    window = record.get("window", positions_of(checkpoint.config).get("max_position_embeddings"))
    return Step(
        label=label,
        path=str(path),
        window=window,
        native_length=record.get("native_length", window),
        method=record.get("rope", {}).get("method"),
        factor=record.get("rope", {}).get("factor"),
    )
