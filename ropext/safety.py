"""Rules over a checkpoint, its facts and a plan -> findings -> a verdict that allows or refuses.

A rule reads and reports; only `Verdict.require` raises. Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ropext.checkpoint import Checkpoint
from ropext.errors import Refused
from ropext.facts import PROVEN, WINDOW_KEYS, Facts, short
from ropext.plan import RopePlan
from ropext.rope import unfinished_pair

Severity = Literal["refuse", "warn", "note"]
LARGE_FACTOR = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing a rule found."""

    code: str  # stable: RPX001 ...
    severity: Severity
    message: str  # the rule and the value found
    fix: str  # what to do


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Every finding of the rules, in their order."""

    findings: tuple[Finding, ...]

    def require(self) -> None:
        """Raise Refused with the first finding that refuses, if any does."""
        for finding in self.findings:
            if finding.severity == "refuse":
                raise Refused(f"{finding.message}. {finding.fix} [{finding.code}]")


def judge_source(checkpoint: Checkpoint, facts: Facts, *, native_length_stated: bool = False) -> Verdict:
    """Is the window that this checkpoint claims one that it was trained for, or that a rope change serves?"""
    findings = [*_raw_window_edit(checkpoint), *_disagreeing_windows(checkpoint.config)]
    if not native_length_stated and checkpoint.record is None:  # a record proves more than a tokenizer's limit
        findings += _tokenizer_against_window(facts)
    return Verdict(findings=tuple(findings))


def judge_patch(
    checkpoint: Checkpoint, facts: Facts, plan: RopePlan, *, verified: bool, native_length_stated: bool
) -> Verdict:
    """May this plan be written over this checkpoint's config?"""
    source = judge_source(checkpoint, facts, native_length_stated=native_length_stated)
    findings = [
        *source.findings,
        *_already_scaled(checkpoint, facts),
        *_unproven_type(facts, verified),
        *_unknown_rope_keys(facts),
        *_code_beside(checkpoint.config),
        *_native_length_taken(facts, plan, native_length_stated),
        *_large_factor(plan),
        *_sliding_window(facts, plan),
        *_reach_of_ntk(plan),
    ]
    return Verdict(findings=tuple(findings))


def _raw_window_edit(checkpoint: Checkpoint) -> Iterator[Finding]:
    """RPX001: ropext.json knows the window that was written; another one was set by hand."""
    if checkpoint.record is None:
        return
    window = checkpoint.config.get("max_position_embeddings")
    written = checkpoint.record.get("window")
    if window != written:
        yield Finding(
            code="RPX001",
            severity="refuse",
            message=f"a window must not be changed without its rotary embedding, positions that the model never saw "
            f"ruin it: max_position_embeddings is {short(window)}, ropext.json wrote {short(written)}",
            fix="Set it back, then `ropext patch MODEL --method ntk --factor F`",
        )


def _disagreeing_windows(config: Mapping[str, Any]) -> Iterator[Finding]:
    """RPX002: a second window key is above max_position_embeddings."""
    window = config.get("max_position_embeddings")
    for key in WINDOW_KEYS[1:]:
        value = config.get(key)
        if isinstance(value, int) and isinstance(window, int) and value > window:
            yield Finding(
                code="RPX002",
                severity="refuse",
                message=f"window keys must agree: {key} is {short(value)}, max_position_embeddings {window}",
                fix="Set both to the trained length, then `ropext patch MODEL --method ntk --factor F`",
            )


def _tokenizer_against_window(facts: Facts) -> Iterator[Finding]:
    """RPX003: no scaling, and a tokenizer that states a shorter limit: the window may have been raised by hand."""
    if facts.scaling is None and facts.tokenizer_length is not None and facts.tokenizer_length < facts.window:
        yield Finding(
            code="RPX003",
            severity="refuse",
            message=f"a window must be the trained length, or come with a rotary embedding changed for it: "
            f"max_position_embeddings is {facts.window}, the tokenizer states {facts.tokenizer_length}",
            fix=f"Say what was trained, for instance `ropext patch MODEL --native-length {facts.tokenizer_length} ...`",
        )


def _already_scaled(checkpoint: Checkpoint, facts: Facts) -> Iterator[Finding]:
    """RPX004: a factor on top of a factor is never what was meant."""
    record = checkpoint.record or {}
    if record.get("kind") == "patch":
        yield Finding(
            code="RPX004",
            severity="refuse",
            message=f"factors never multiply: this checkpoint was already extended by {record['rope'].get('factor')}",
            fix=f"Patch its source again with the whole factor ({record['source']['model']}), or fine-tune it first",
        )
    elif facts.scaling is not None:
        kind, factor = facts.scaling.get("rope_type", facts.scaling.get("type")), facts.scaling.get("factor")
        yield Finding(
            code="RPX004",
            severity="refuse",
            message=f"factors never multiply: this checkpoint is already scaled ({short(kind)}, factor "
            f"{short(factor)})",
            fix="Patch the unscaled original with the whole factor; extending a scaling is not built yet",
        )


def _unproven_type(facts: Facts, verified: bool) -> Iterator[Finding]:
    """RPX005: only stock transformers can prove the table of a model type that ropext does not know."""
    if facts.model_type not in PROVEN and not verified:
        yield Finding(
            code="RPX005",
            severity="refuse",
            message=f"the rotary table of a model type must be proved: {facts.model_type} is not one of "
            f"{', '.join(sorted(PROVEN))}",
            fix="Leave out --no-verify",
        )


def _unknown_rope_keys(facts: Facts) -> Iterator[Finding]:
    """RPX006: plain rope with settings that the plan would drop, such as M-RoPE sections."""
    unknown = facts.rope_extras
    if unknown and facts.scaling is None:
        yield Finding(
            code="RPX006",
            severity="refuse",
            message=f"rope settings that a plan does not cover must not be lost: found {short(', '.join(unknown))}",
            fix="Such models are not built yet",
        )


def _code_beside(config: Mapping[str, Any]) -> Iterator[Finding]:
    """RPX011: the proof holds for the stock class; code of the checkpoint's own may read other keys."""
    if config.get("auto_map"):
        yield Finding(
            code="RPX011",
            severity="warn",
            message="a table is proved for stock transformers: this checkpoint brings its own code too (auto_map), "
            "which is not run here",
            fix="Load the output without trust_remote_code",
        )


def _native_length_taken(facts: Facts, plan: RopePlan, stated: bool) -> Iterator[Finding]:
    """RPX007: which of the numbers was taken as the trained length."""
    if not stated:
        yield Finding(
            code="RPX007",
            severity="note",
            message=f"taking {plan.native_length} as the native length",
            fix="If it was trained shorter, say so with --native-length",
        )


def _large_factor(plan: RopePlan) -> Iterator[Finding]:
    """RPX008: no published result reaches this far in one step."""
    if plan.factor > LARGE_FACTOR:
        yield Finding(
            code="RPX008",
            severity="warn",
            message=f"a factor above {LARGE_FACTOR} is beyond what any method was shown to bear: found {plan.factor:g}",
            fix="Extend in steps, with training between them",
        )


def _sliding_window(facts: Facts, plan: RopePlan) -> Iterator[Finding]:
    """RPX009: layers that look back less far than the target gain nothing from it (Mistral v0.1)."""
    if facts.sliding_window is not None and facts.sliding_window < plan.target_length:
        yield Finding(
            code="RPX009",
            severity="warn",
            message=f"attention must reach as far as the window: sliding_window is {facts.sliding_window}, the target "
            f"{plan.target_length}. Where every layer has it, nothing is gained beyond it",
            fix="It is left as it is; prefer a model without a sliding window",
        )


def _reach_of_ntk(plan: RopePlan) -> Iterator[Finding]:
    """RPX010: pairs that never completed a turn are divided by less than the factor, so new angles come earlier."""
    pair = unfinished_pair(plan.theta_before, plan.rotary_dims, plan.native_length)
    if "ntk" not in (plan.method, plan.inner) or not pair:
        return
    division = plan.theta_before ** (-2 * pair / plan.rotary_dims) / plan.frequencies[pair]
    reach = int(plan.native_length * division)
    if reach < plan.target_length:
        larger = plan.factor ** ((plan.rotary_dims // 2 - 1) / pair)
        yield Finding(
            code="RPX010",
            severity="note",
            message=f"static NTK divides the first unfinished pair by {division:.2f}, so without training it "
            f"reaches about {reach} of {plan.target_length} tokens",
            fix=f"Fine-tune at the target, or patch with factor {larger:.3g}",
        )
