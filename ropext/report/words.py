"""Figures in words: numbers, intervals, changes between two models, and what the figures mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropext.figures import Interval, LengthScore, Measurement, Paired

SHOWN_DIGITS = 12  # of a hash, enough to tell two apart by eye


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What one model lost or won against another at one length."""

    figure: str  # perplexity +5.6%
    interval: str  # +5.1% to +6.2%; empty without one
    word: str  # worse, better, undecided; "no interval" where it cannot be said
    size: float  # the difference of loss or of bits per byte; above 0 is worse


def number(value: float) -> str:
    """Two decimals while they fit, then an exponent: a blown-up model must not widen its column."""
    return f"{value:.2f}" if value < 100_000 else f"{value:.2e}"


def signed(value: float) -> str:
    """Three decimals with a sign; zero has a plus."""
    return f"{round(value, 3) + 0.0:+.3f}"


def percent(ratio: float) -> str:
    """A ratio as a change: 1.056 -> "+5.6%"; from ten times on as a multiple."""
    if ratio >= 10:
        return f"{ratio:.3g} times"
    change = 100 * (ratio - 1)
    digits = 2 if abs(change) < 1 else 1
    return f"{round(change, digits) + 0.0:+.{digits}f}%"


def interval(bounds: Interval | None, form: Callable[[float], str] = number) -> str:
    """ "low to high", or nothing without an interval."""
    return f"{form(bounds[0])} to {form(bounds[1])}" if bounds else ""


def counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def missing(figure: LengthScore | None) -> str:
    """Why a figure is missing."""
    return "failed" if figure and figure.windows else "not measured"


def perplexity(figure: LengthScore | None) -> str:
    """The perplexity, or in words why there is none: never empty."""
    if figure is None or figure.nll is None:
        return missing(figure)
    return f"exp({figure.nll:.1f})" if figure.perplexity is None else number(figure.perplexity)


def change(pair: Paired) -> Change | None:
    """The change of perplexity; where that overflows, of loss; of bits per byte between different tokenizers."""
    if pair.nll_difference is not None:
        if pair.perplexity_ratio is not None:
            figure = f"perplexity {percent(pair.perplexity_ratio)}"
            shown = interval(pair.perplexity_ratio_ci95, percent)
        else:
            figure, shown = f"loss {signed(pair.nll_difference)} nats", interval(pair.nll_ci95, signed)
        return Change(figure=figure, interval=shown, word=_word(pair.nll_ci95), size=pair.nll_difference)
    if pair.bits_per_byte_difference is not None:
        return Change(
            figure=f"bits per byte {signed(pair.bits_per_byte_difference)}",
            interval=interval(pair.bits_per_byte_ci95, signed),
            word=_word(pair.bits_per_byte_ci95),
            size=pair.bits_per_byte_difference,
        )
    return None


def _word(bounds: Interval | None) -> str:
    """What an interval of a difference says: that of a loss, so above 0 is worse."""
    if bounds is None:
        return "no interval"
    return "worse" if bounds[0] > 0 else "better" if bounds[1] < 0 else "undecided"


def definition(measurement: Measurement) -> str:
    """What the perplexities are, with everything that must be equal for a comparison."""
    protocol = measurement.protocol
    stride = "consecutive" if protocol.stride is None else f"stride {protocol.stride}"
    bos = "one BOS at the start of each" if protocol.bos else "no BOS"
    sizes = dict.fromkeys(_size(scores.results) for scores in measurement.models if scores.results)
    return (
        f"Perplexity (95% interval, resampling documents), {protocol.definition}: {' / '.join(sizes)}, {stride}, "
        f"{bos}; {protocol.dtype}; {protocol.data} ({protocol.data_hash[:SHOWN_DIGITS]})."
    )


def _size(results: Sequence[LengthScore]) -> str:
    """Windows, their length and documents."""
    widest = max(results, key=lambda figure: figure.length if figure.windows else 0)
    length = widest.length if widest.windows else 0
    return f"{counted(widest.windows, 'window')} of {length} tokens from {counted(widest.documents, 'document')}"


def gaps(measurement: Measurement) -> list[str]:
    """A line for each reason why a figure is missing: "4096 (source, tuned): not measured: ..."."""
    found: dict[tuple[str, str], list[str]] = {}
    for scores in measurement.models:
        for figure in scores.results:
            if figure.status != "ok":
                found.setdefault((str(figure.length), figure.status), []).append(scores.label)
        for context in scores.by_context:
            if context.status != "ok":
                found.setdefault((f"context of {context.length}", context.status), []).append(scores.label)
    return [f"{where} ({', '.join(labels)}): {status}." for (where, status), labels in found.items()]


def notes(measurement: Measurement) -> list[str]:
    """The notes of all models, each with whom it concerns."""
    found: dict[str, list[str]] = {}
    for scores in measurement.models:
        for note in scores.notes:
            found.setdefault(note, []).append(scores.label)
    return [f"{', '.join(labels)}: {note}" for note, labels in found.items()]


def advice(measurement: Measurement) -> list[str]:
    """Where the judged model loses within the trained length and serves more than was asked for: the factor that the
    asked lengths need."""
    first, judged = measurement.first_and_judged
    native, window = first.native_length, judged.window
    lengths = [figure.length for figure in judged.results if figure.nll is not None]
    worse = any(
        pair.label == judged.label
        and native
        and pair.length <= native
        and (found := change(pair))
        and found.word == "worse"
        for pair in measurement.comparisons
    )
    if not (worse and native and window and native < max(lengths, default=0) < window):
        return []
    return [
        f"{judged.label} serves {window} tokens and pays for them at short context: if {max(lengths)} are enough, "
        f"`ropext patch --to {max(lengths)}` takes the smallest factor that serves them, {max(lengths) / native:g}."
    ]
