"""Whether an extension costs the short context more than is allowed: `--max-regression`, for use in CI.

Lengths in tokens, shares as fractions: 0.02 is 2%.
"""

from __future__ import annotations

from collections.abc import Collection

from ropext.figures import Measurement, ModelScores


def regression(measurement: Measurement, allowed: float, judged: Collection[str]) -> str | None:
    """How the models with these labels miss the gate, in words; None where they meet it.

    Each is compared with the first model, by perplexity on the same documents, at every measured length up to the first
    one's native length. A model with no such comparison is not proved to be as good, so it misses.
    """
    first = measurement.models[0]
    native = first.native_length or 0
    compared: set[str] = set()
    worst: dict[str, tuple[float, str]] = {}
    for pair in measurement.comparisons:
        if pair.label in judged and pair.length <= native and pair.perplexity_ratio is not None:
            compared.add(pair.label)
            lost = pair.perplexity_ratio - 1
            interval = ""
            if pair.perplexity_ratio_ci95:
                low, high = (100 * (bound - 1) for bound in pair.perplexity_ratio_ci95)
                interval = f" (95% interval {low:+.2f}% to {high:+.2f}%)"
            text = f"{pair.label} at {pair.length} tokens: {100 * lost:+.2f}%{interval} against {pair.against}"
            if lost > worst.get(pair.label, (allowed, ""))[0]:
                worst[pair.label] = lost, text
    problems = [text for _, text in worst.values()]
    for scores in measurement.models:
        if scores.label in judged and scores.label not in compared:
            problems.append(f"{scores.label} cannot be compared with {first.label}: {_why_not(first, scores)}")
    return "; ".join(problems) or None


def _why_not(first: ModelScores, other: ModelScores) -> str:
    """Why two models have no perplexities to compare within the native length of the first."""
    native = first.native_length or 0
    near = [figure for scores in (first, other) for figure in scores.results if figure.length <= native]
    if not any(figure.windows for figure in near):
        return f"nothing was measured up to the native length {native}; add such a length to --lengths, and text for it"
    for figure in near:
        if figure.status != "ok":
            return f"at {figure.length} tokens, {figure.status}"
    return "their tokenizers differ, so only bits per byte compare"
