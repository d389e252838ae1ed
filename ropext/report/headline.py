"""What a report says first: the window, the gain at long context and the cost at short, last model against first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropext.figures import Measurement, ModelScores, Paired
from ropext.report import words
from ropext.report.words import Change


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One thing to know: its figure, what that says, and how it was found."""

    title: str
    figure: str
    word: str  # better, worse, undecided ...; empty where nothing is judged
    lines: tuple[str, ...]
    definition: str


def statements(measurement: Measurement) -> tuple[Statement, ...]:
    """Window, long context, short context, and the effective lengths where retrieval was measured."""
    return (_window(measurement), _long(measurement), _short(measurement), *_effective(measurement))


def _window(measurement: Measurement) -> Statement:
    first, last = measurement.first_and_judged
    if len(measurement.models) == 1:
        figure, lines = _tokens(first.window), [_trained(first)]
    else:
        figure, lines = f"{first.window or 'unknown'} → {_tokens(last.window)}", [_trained(first), _trained(last)]
        if first.window and last.window:
            times = f"{last.window / first.window:.3g} times" if last.window != first.window else "the same as"
            lines.insert(0, f"{times} the window of {first.label}")
    return Statement(
        title="Window",
        figure=figure,
        word="",
        lines=tuple(lines),
        definition="How many tokens the config of the model serves: a promise, which the figures below keep or not.",
    )


def _tokens(length: int | None) -> str:
    return "unknown" if length is None else f"{length} tokens"


def _trained(scores: ModelScores) -> str:
    length = "an unknown length" if scores.native_length is None else f"{scores.native_length} tokens"
    return f"{scores.label}: trained at {length}"


def _long(measurement: Measurement) -> Statement:
    """The longest length beyond the first model's native one, within the last model's window if one was measured."""
    first, last = measurement.first_and_judged
    found = [
        (pair, change) for pair, change in _pairs(measurement) if pair.length > (first.native_length or pair.length)
    ]
    within = [(pair, change) for pair, change in found if last.window and pair.length <= last.window]
    definition = (
        "Change at the longest measured length beyond what the first model was trained at, on the same documents."
    )
    if not found:
        return _missing("Long context", measurement, definition, "no length beyond the trained one was compared")
    pair, change = max(within or found, key=lambda one: one[0].length)
    beyond = [] if within else [f"{pair.length} tokens are beyond the window of {last.label}"]
    return _compared("Long context", measurement, definition, pair, change, beyond)


def _short(measurement: Measurement) -> Statement:
    """The worst length of those that the first model was trained at."""
    native = measurement.models[0].native_length or 0
    found = [(pair, change) for pair, change in _pairs(measurement) if pair.length <= native]
    definition = (
        "Change at the worst measured length of those that the first model was trained at, on the same documents."
    )
    if not found:
        return _missing("Short context", measurement, definition, "no length within the trained one was compared")
    pair, change = max(found, key=lambda one: one[1].size)
    lengths = sorted(pair.length for pair, _ in found)
    worst = [f"the worst of {words.listed([str(length) for length in lengths])} tokens"] if len(lengths) > 1 else []
    return _compared("Short context", measurement, definition, pair, change, [*worst, *words.advice(measurement)])


def _pairs(measurement: Measurement) -> list[tuple[Paired, Change]]:
    """The last model against the first, at each length where both have a figure."""
    first, last = (scores.label for scores in measurement.first_and_judged)
    pairs = [pair for pair in measurement.comparisons if (pair.label, pair.against) == (last, first)]
    return [(pair, change) for pair in pairs if (change := words.change(pair))]


def _missing(title: str, measurement: Measurement, definition: str, reason: str) -> Statement:
    if len(measurement.models) == 1:
        reason = "there is no other model to compare with"
    elif measurement.models[0].native_length is None:
        reason = f"what {measurement.models[0].label} was trained at is not known"
    return Statement(title=title, figure="not measured", word="", lines=(reason,), definition=definition)


VERDICTS = {
    "better": "better than {against}",
    "worse": "regression: worse than {against}",
    "undecided": "undecided: no change lies within the interval",
    "no interval": "no interval: fewer than two documents",
}


def _compared(
    title: str, measurement: Measurement, definition: str, pair: Paired, change: Change, more: Sequence[str]
) -> Statement:
    figures = [
        words.perplexity(next((one for one in scores.results if one.length == pair.length), None))
        for scores in measurement.first_and_judged
    ]
    return Statement(
        title=f"{title}: {pair.length} tokens",
        figure=change.figure,
        word=change.word,
        lines=(
            VERDICTS[change.word].format(against=pair.against),
            *([f"95% interval: {change.interval}"] if change.interval else []),
            f"perplexity {' → '.join(figures)}, on {words.counted(pair.documents, 'document')}",
            *more,
        ),
        definition=definition,
    )


def _effective(measurement: Measurement) -> list[Statement]:
    """A line for each task that the last model was measured on."""
    first, last = measurement.first_and_judged
    before = {(one.task, one.threshold): one.length for one in first.effective_lengths}
    lines = []
    for one in last.effective_lengths:
        known = before.get((one.task, one.threshold))
        old = "" if last is first else f"{'not measured' if known is None else known or 'none'} → "
        lines.append(f"{one.task} (at least {one.threshold:g}): {old}{one.length or 'none'}")
    if not lines:
        return []
    common = min(one.length for one in last.effective_lengths)
    return [
        Statement(
            title="Effective length",
            figure=f"{common} tokens" if common else "none",
            word="",
            lines=tuple(lines),
            definition="The longest measured length up to which every length scores at least the threshold; "
            "of several tasks the shortest.",
        )
    ]
