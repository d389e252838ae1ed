"""The extension that a checkpoint carries already, by ropext or by its makers, and the method that lengthens it.

Lengths are in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropext.errors import Refused, UsageError, short
from ropext.facts import FLOAT32_MAX, Facts, positions_of
from ropext.lengths import LONGEST
from ropext.rope import ORIGINAL, SETTINGS, Method, method_named

# Keys found in public rope blocks that no reader reads, and the key that one would read.
NO_EFFECT = {"attn_factor": "attention_factor", "finetuned": None}
_COMMON = frozenset({"rope_type", "type", "factor", ORIGINAL, "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """A scaling in force."""

    method: str
    inner: str | None  # of progressive
    factor: float | None  # None where config.json holds none that a table can be computed from
    original_length: int | None  # what its formula starts from; None where nothing states it
    window: int  # that it serves
    stated_theta: float | None  # None where ropext.json lost it
    settings: Mapping[str, Any]  # explicit ones
    extras: Mapping[str, Any]  # keys of the block that are no setting of the method and stay as they are
    no_effect: tuple[str, ...]  # keys of the block that nothing reads
    by_ropext: bool  # a patch, whose unstated settings are ropext's defaults

    @property
    def theta(self) -> float:
        """What its formula starts from. Raises Refused where ropext.json lost it."""
        theta = self.stated_theta
        if theta is None or not 1 < theta <= FLOAT32_MAX:
            raise Refused(f"ropext.json must hold the theta of before: theta_before is {short(theta)}. Restore it")
        return theta

    def lengthened(self, target: int, settings: Mapping[str, Any]) -> Method:
        """The same method for a longer window: its original length and explicit settings, its factor times
        target / window. `settings` are new lists for longrope. Raises Refused where that is not defined."""
        if self.factor is None:
            raise Refused(f"the factor in force must be a number from 1 to {LONGEST}: correct it in config.json")
        if self.method == "abf":
            raise Refused("abf has no factor to multiply: use --replace-scaling with a larger --theta")
        if self.method == "longrope" and not settings:
            raise Refused("the lists of longrope belong to one factor: add --longrope-factors for the longer window")
        if self.original_length is None and self.method != "linear":
            raise Refused(
                f"{self.method} needs the length that it starts from, and config.json has no {ORIGINAL}: readers take "
                "max_position_embeddings. Use --replace-scaling with --native-length, the length trained without it"
            )
        factor = self.factor * target / self.window
        if self.original_length and math.floor(self.factor * self.original_length) == self.window:
            factor = target / self.original_length  # exactly, or both majors warn of yarn
        kept = {name: value for name, value in self.settings.items() if name not in settings}
        self._check_kept(kept)
        return method_named(self.method, factor, self.original_length or self.window, {**kept, **settings})

    def _check_kept(self, kept: Mapping[str, Any]) -> None:
        for name in SETTINGS["llama3"]:
            if self.method == "llama3" and name not in kept and not self.by_ropext:
                raise Refused(f"llama3 needs {name}, no default stands for it: config.json has none. Restore it")
        for name, value in kept.items():
            number = isinstance(value, int | float | tuple) and not isinstance(value, bool)
            if not (number or name in ("truncate", "inner")):
                raise Refused(f"{name} must be a number: config.json has {short(value)}. Correct it")


def carried(config: Mapping[str, Any], facts: Facts, record: Mapping[str, Any] | None) -> Carried | None:
    """The extension of a checkpoint with this config and ropext.json; None where its rope is plain, or where training
    has made the extension its own (ropext.json of a fine-tuned one, by theta alone)."""
    rope = (record or {}).get("rope", {})
    patched = record is not None and record["kind"] == "patch"
    # what was natively scaled before a patch keeps its own original length, which only the block tells of
    if facts.scaling is not None and not (patched and rope.get("original_length") == rope.get("native_length")):
        return _from_block(config, facts, rope)
    if not patched:
        return None
    settings = rope.get("settings")
    return Carried(
        method=short(rope.get("method")).strip("'"),
        inner=rope.get("inner"),
        factor=_factor(rope.get("factor")),
        original_length=_whole(rope.get("original_length", rope.get("native_length"))),
        window=max(_whole(rope.get("target_length")) or 0, facts.window),
        stated_theta=_number(rope.get("theta_before")),
        settings={key: _frozen(value) for key, value in settings.items()} if isinstance(settings, dict) else {},
        extras={},
        no_effect=(),
        by_ropext=True,
    )


def _from_block(config: Mapping[str, Any], facts: Facts, rope: Mapping[str, Any]) -> Carried:
    assert facts.scaling is not None
    block = facts.scaling
    method = str(block.get("rope_type", block.get("type")))
    factor, original = _factor(block.get("factor")), _original_length(config, facts, method, rope)
    window = facts.window
    if method in ("yarn", "dynamic") and factor and original:
        window = math.floor(original * factor)  # many model cards leave max_position_embeddings as it was
    if method in ("yarn", "longrope") and factor is None and original:
        factor = facts.window / original  # as readers do
    own = SETTINGS.get(method, ())
    return Carried(
        method=method,
        inner=None,
        factor=factor,
        original_length=original,
        window=window,
        stated_theta=facts.theta,
        settings={key: _frozen(block[key]) for key in own if block.get(key) is not None},
        extras={key: block[key] for key in block if key not in {*own, *_COMMON, *NO_EFFECT, *facts.mrope}},
        no_effect=tuple(key for key in block if key in NO_EFFECT),
        by_ropext=False,
    )


def _original_length(config: Mapping[str, Any], facts: Facts, method: str, rope: Mapping[str, Any]) -> int | None:
    """As the files state it: transformers fills the gap with max_position_embeddings, which may be the raised one."""
    if method == "dynamic":
        return facts.window
    if method == "linear":
        return _whole(rope.get("original_length"))
    own = positions_of(config)
    places = [own]
    for block in (own.get("rope_scaling"), own.get("rope_parameters")):
        if isinstance(block, dict):
            nested = block.get(facts.layer_type)
            places.append(nested if isinstance(nested, dict) else block)
    stated = [place[ORIGINAL] for place in places if place.get(ORIGINAL) is not None]
    return _whole(stated[0]) if stated else None


def same_kind(asked: str, present: Carried) -> bool:
    """Whether the asked method is the one in force; ntk-by-parts is the yarn whose attention factor is 1."""
    by_parts = present.method == "yarn" and present.settings.get("attention_factor") == 1.0
    return asked == present.method or (asked == "ntk-by-parts" and by_parts)


def check_nothing_given(settings: Mapping[str, Any]) -> None:
    """Raises UsageError for settings beside --extend-scaling, which keeps those in force."""
    for name in settings:
        if name not in ("short_factor", "long_factor"):
            raise UsageError(
                f"--extend-scaling keeps the settings in force: found --{name.replace('_', '-')}. Leave it out, or use "
                "--replace-scaling"
            )


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _factor(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and 1 <= number <= LONGEST else None


def _whole(value: object) -> int | None:
    """Tokens of a length that a formula can start from, or None for anything else."""
    number = _number(value)
    return int(number) if number is not None and 2 <= number <= LONGEST else None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
