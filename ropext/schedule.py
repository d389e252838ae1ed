"""Stages of training: for each length its factor, its optimizer steps and its sequences per step.

Arithmetic only. Lengths and windows are in tokens; a rate is the learning rate of one optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropext.errors import Refused, UsageError
from ropext.lengths import format_length

STEPS_PER_STAGE = 20  # where neither steps nor tokens are asked for
WARM_UP_SHARE = 0.1  # of all steps
REFERENCE_WIDTH, REFERENCE_RATE = 4096, 2e-5  # Llama-2-7B in PI (arXiv:2306.15595) and YaRN (arXiv:2309.00071)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Training at one length."""

    length: int  # tokens that its positions reach
    factor: float  # of the rotary tables while this stage trains
    steps: int  # optimizer steps
    tokens: int  # in all steps together: steps * batch * row
    batch: int  # rows per optimizer step
    peak_rate: float | None = None  # of its part of the rate curve; None for the run's
    window: int | None = None  # tokens in a row where positions are skipped to reach `length` (PoSE)

    @property
    def row(self) -> int:
        """Tokens in a row."""
        return self.window or self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is asked of one stage; None: the default."""

    length: int  # tokens
    tokens: int | None = None  # in all steps together
    steps: int | None = None
    batch_tokens: int | None = None  # of an optimizer step
    peak_rate: float | None = None
    factor: float | None = None  # of a progressive patch


def plan_stages(
    wishes: Sequence[Wish], *, native_length: int, window: int, progressive: bool, skips: bool = False
) -> tuple[Stage, ...]:
    """Stages of growing length within the patched `window`.

    A fixed patch trains every stage at window / native length, a progressive one at stage length / native length
    (at least 1) unless a larger factor is asked for. An optimizer step takes about as many tokens as the longest row
    unless told. With `skips` a row is no longer than the native length, whatever its positions reach.

    Raises UsageError for contradicting or empty amounts, Refused for a schedule that the patch does not fit.
    """
    lengths = [wish.length for wish in wishes]
    for wish in wishes:
        _check_amounts(wish)
    for shorter, longer in zip(lengths, lengths[1:], strict=False):
        if longer <= shorter:
            raise UsageError(f"each stage is longer than the one before: found {longer} after {shorter}")
    _check_window(lengths, native_length=native_length, window=window, progressive=progressive)
    rows = [min(length, native_length) if skips else length for length in lengths]
    stages = []
    for wish, row in zip(wishes, rows, strict=True):
        batch = max(1, (wish.batch_tokens or max(rows)) // row)
        steps = wish.steps or STEPS_PER_STAGE
        if wish.tokens is not None:
            steps = -(-wish.tokens // (batch * row))
        stages.append(
            Stage(
                length=wish.length,
                factor=_factor(wish, native_length=native_length, window=window, progressive=progressive),
                steps=steps,
                tokens=steps * batch * row,
                batch=batch,
                window=row if skips else None,
                peak_rate=wish.peak_rate,
            )
        )
    if progressive and stages[-1].factor < window / native_length:
        raise Refused(
            f"the last stage of a progressive patch has its whole factor, {window / native_length:g}: found "
            f"{stages[-1].factor:g}; leave it out of the recipe"
        )
    return tuple(stages)


def _check_amounts(wish: Wish) -> None:
    if wish.tokens is not None and wish.steps is not None:
        raise UsageError("a stage is as long as --tokens-per-stage or --steps-per-stage says: found both, give one")
    for option, amount in (
        ("--tokens-per-stage", wish.tokens),
        ("--steps-per-stage", wish.steps),
        ("--batch-tokens", wish.batch_tokens),
    ):
        if amount is not None and amount < 1:
            raise UsageError(f"{option} is a whole number above 0: found {amount}")


def _factor(wish: Wish, *, native_length: int, window: int, progressive: bool) -> float:
    if not progressive:
        if wish.factor is not None and wish.factor != window / native_length:
            raise Refused(
                f"a fixed patch trains every stage at its factor, {window / native_length:g}: found {wish.factor:g} at "
                f"{format_length(wish.length)}; patch with --method progressive to let it grow"
            )
        return window / native_length
    least = max(1.0, wish.length / native_length)
    if wish.factor is not None and not least <= wish.factor <= window / native_length:
        raise Refused(
            f"a stage of {format_length(wish.length)} takes a factor from {least:g} to the patch's "
            f"{window / native_length:g}: found {wish.factor:g}"
        )
    return least if wish.factor is None else wish.factor


def _check_window(lengths: Sequence[int], *, native_length: int, window: int, progressive: bool) -> None:
    longest = max(lengths)
    if longest > window:
        raise Refused(
            f"a stage may not be longer than the patched window of {format_length(window)}: found "
            f"{format_length(longest)}, which needs factor {longest / native_length:.10g}: patch the source with "
            f"`ropext patch ... --factor {longest / native_length:.10g}`, then tune that"
        )
    if progressive and longest < window:
        raise Refused(
            f"a progressive schedule ends at the patch's target of {format_length(window)}: found "
            f"{format_length(longest)} at the end; add {format_length(window)} to --schedule"
        )


def rate_at(step: int, total_steps: int, peak: float) -> float:
    """Learning rate of optimizer step `step` (from 0): one curve over the steps of all stages together.

    Linear warm-up over the first tenth, then linear towards zero, which the step after the last would reach. Linear
    to zero, since a run of fixed length ends best where the noise of its last steps is averaged away (Bergsma et
    al. 2025, arXiv:2502.15938), and since the curve then has no floor to choose.
    """
    warm_up = max(1, round(WARM_UP_SHARE * total_steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (total_steps - step) / (total_steps - warm_up + 1)


def default_learning_rate(hidden_size: int) -> float:
    """Peak rate for a model of this width: 2e-5 at 4096, inversely proportional to the width.

    The inverse is Adam's rule for matrices in muP (Yang et al. 2022, arXiv:2203.03466, table 3).
    """
    return REFERENCE_RATE * REFERENCE_WIDTH / hidden_size
