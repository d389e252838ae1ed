"""The tables of a report as plain values, which terminal and page only lay out.

A row is a length, a task or a depth; a column is a model, but a length in a heat map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ropext.figures import ContextScore, LengthScore, Measurement, ModelScores, TaskScore
from ropext.lengths import format_length
from ropext.report import words


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One figure: what is missing is spelled, never left empty."""

    text: str
    interval: str = ""
    word: str = ""  # worse, better, undecided
    share: float | None = None  # 0 to 1, how full a heat map colours it


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """One table."""

    title: str
    note: str  # what its figures are
    corner: str  # what the rows are
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def perplexity(measurement: Measurement) -> Grid | None:
    """Perplexity by length, in ascending order; None where only tasks were asked for."""
    if not any(scores.results for scores in measurement.models):
        return None

    def cell(figure: LengthScore | None) -> Cell:
        return Cell(text=words.perplexity(figure), interval=words.interval(figure.ci95 if figure else None))

    return _by_length(
        measurement,
        title="Perplexity",
        note=words.definition(measurement),
        figures=lambda scores: {figure.length: figure for figure in scores.results},
        cell=cell,
    )


def bits_per_byte(measurement: Measurement) -> Grid | None:
    """Bits per byte by length; None where nothing has it."""
    if not any(figure.bits_per_byte is not None for scores in measurement.models for figure in scores.results):
        return None

    def cell(figure: LengthScore | None) -> Cell:
        known = figure.bits_per_byte if figure else None
        return Cell(text=words.missing(figure) if known is None else f"{known:.3f}")

    return _by_length(
        measurement,
        title="Bits per byte",
        note="Loss of the same tokens in bits, per byte of their UTF-8 text: comparable across tokenizers.",
        figures=lambda scores: {figure.length: figure for figure in scores.results},
        cell=cell,
    )


def changes(measurement: Measurement) -> Grid | None:
    """Each later model against the first, by length; None without a pair."""
    if not measurement.comparisons:
        return None
    found = {(pair.length, pair.label): words.change(pair) for pair in measurement.comparisons}
    labels = tuple(dict.fromkeys(pair.label for pair in measurement.comparisons))

    def cell(length: int, label: str) -> Cell:
        change = found.get((length, label))
        if change is None:
            return Cell(text="not measured")
        return Cell(text=change.figure, interval=change.interval, word=change.word)

    return Grid(
        title=f"Change against {measurement.comparisons[0].against}",
        note="Both models on the same documents, with the 95% interval of the difference (resampling documents): "
        "undecided where no change lies within the interval.",
        corner="length",
        columns=labels,
        rows=tuple(
            (str(length), tuple(cell(length, label) for label in labels)) for length in sorted({n for n, _ in found})
        ),
    )


def contexts(measurement: Measurement) -> dict[int, Grid]:
    """Loss of the last tokens by context, a grid for each number of last tokens."""

    def cell(figure: ContextScore | None) -> Cell:
        if figure is None or figure.nll is None:
            return Cell(text="not measured" if figure is None or not figure.tokens else "failed")
        return Cell(text=f"{figure.nll:.3f}", interval=words.interval(figure.ci95, "{:.3f}".format))

    def grid(last: int) -> Grid:
        return _by_length(
            measurement,
            title=f"Loss of the last {last} tokens with a context of",
            note=f"Mean loss (nats per token, 95% interval) of the same {last} tokens of each window when a context of "
            "that many tokens ends with them: where it falls, more context helps.",
            figures=lambda scores: {one.length: one for one in scores.by_context if one.last_tokens == last},
            cell=cell,
        )

    return {last: grid(last) for last in sorted({one.last_tokens for one in _contexts(measurement)})}


def tasks_by_length(measurement: Measurement) -> list[Grid]:
    """Score by length over all depths, a grid for each task and metric."""
    grids = []
    for task, metric in _task_names(measurement, lambda score: score.length is not None and score.depth is None):
        found = [
            {score.length: score for score in _of(scores, task, metric) if score.length and score.depth is None}
            for scores in measurement.models
        ]
        everything = [score for one in found for score in one.values()]
        grids.append(
            Grid(
                title=f"{task} ({metric}; {_basis(everything)})",
                note="Score by length over all depths, with its 95% interval; chance is the score of guessing.",
                corner="length",
                columns=_labels(measurement),
                rows=tuple(
                    (str(length), tuple(_task_cell(one.get(length)) for one in found))
                    for length in sorted({score.length for score in everything if score.length})
                ),
            )
        )
    return grids


def other_tasks(measurement: Measurement) -> Grid | None:
    """Tasks that have no length, a row each; None without any."""
    rows = []
    for task, metric in _task_names(measurement, lambda score: score.length is None):
        found = [next(iter(_of(scores, task, metric)), None) for scores in measurement.models]
        basis = _basis([score for score in found if score])
        rows.append((f"{task} ({metric}; {basis})", tuple(_task_cell(score) for score in found)))
    if not rows:
        return None
    return Grid(
        title="Other tasks",
        note="Score with its 95% interval, as lm-eval defines task and metric.",
        corner="task",
        columns=_labels(measurement),
        rows=tuple(rows),
    )


def effective_lengths(measurement: Measurement) -> Grid | None:
    """The effective length of each task, a row each; None without any."""
    names = dict.fromkeys(
        (one.task, one.threshold) for scores in measurement.models for one in scores.effective_lengths
    )
    if not names:
        return None

    def cell(scores: ModelScores, name: tuple[str, float]) -> Cell:
        lengths = [one.length for one in scores.effective_lengths if (one.task, one.threshold) == name]
        return Cell(text=(str(lengths[0]) if lengths[0] else "none") if lengths else "not measured")

    return Grid(
        title="Effective length",
        note="The longest measured length up to which every length scores at least the threshold.",
        corner="task",
        columns=_labels(measurement),
        rows=tuple(
            (
                f"{task} (at least {threshold:g})",
                tuple(cell(scores, (task, threshold)) for scores in measurement.models),
            )
            for task, threshold in names
        ),
    )


def heat_maps(measurement: Measurement) -> list[tuple[str, str, list[Grid]]]:
    """Depth by length: task with metric, what was counted, and a grid for each model that was measured."""
    maps = []
    for task, metric in _task_names(measurement, lambda score: score.length is not None and score.depth is not None):
        grids: list[Grid] = []
        everything: list[TaskScore] = []
        for scores in measurement.models:
            found = {
                (score.depth, score.length): score
                for score in _of(scores, task, metric)
                if score.depth is not None and score.length is not None
            }
            everything += found.values()
            if found:
                grids.append(_heat_map(scores.label, found))
        maps.append((f"{task} ({metric})", _basis(everything), grids))
    return maps


def _heat_map(label: str, found: dict[tuple[float, int], TaskScore]) -> Grid:
    lengths = sorted({length for _, length in found})
    return Grid(
        title=label,
        note="",
        corner="depth",
        columns=tuple(map(format_length, lengths)),
        rows=tuple(
            (f"{depth:.0%}", tuple(_task_cell(found.get((depth, length))) for length in lengths))
            for depth in sorted({depth for depth, _ in found})
        ),
    )


def _by_length(
    measurement: Measurement,
    *,
    title: str,
    note: str,
    figures: Callable[[ModelScores], dict[int, object]],
    cell: Callable[..., Cell],
) -> Grid:
    """Rows of lengths, columns of models."""
    found = [figures(scores) for scores in measurement.models]
    lengths = sorted(set().union(*found))
    return Grid(
        title=title,
        note=note,
        corner="length",
        columns=_labels(measurement),
        rows=tuple((str(length), tuple(cell(one.get(length)) for one in found)) for length in lengths),
    )


def _task_cell(score: TaskScore | None) -> Cell:
    if score is None or score.score is None:
        return Cell(text="not measured")
    return Cell(
        text=f"{score.score:.2f}" if abs(score.score) < 10 else f"{score.score:.4g}",
        interval=words.interval(score.ci95),
        share=min(max(score.score, 0.0), 1.0),
    )


def _basis(scores: Sequence[TaskScore]) -> str:
    """How many samples a score has, and what guessing would score: "n = 200, chance 0.10"."""
    counts = [score.n for score in scores]
    chances = [score.chance for score in scores if score.chance is not None]
    known = f"n = {_range(counts, '{:d}')}"
    return f"{known}, chance {_range(chances, '{:.2f}')}" if chances else known


def _range(values: Sequence[float], form: str) -> str:
    """The one value, or "least to most"."""
    return " to ".join(dict.fromkeys(form.format(value) for value in (min(values), max(values))))


def _task_names(measurement: Measurement, which: Callable[[TaskScore], bool]) -> list[tuple[str, str]]:
    """Task and metric of every score asked for, in the order measured."""
    scores = (score for one in measurement.models for score in one.tasks if which(score))
    return list(dict.fromkeys((score.task, score.metric) for score in scores))


def _of(scores: ModelScores, task: str, metric: str) -> list[TaskScore]:
    return [score for score in scores.tasks if (score.task, score.metric) == (task, metric)]


def _contexts(measurement: Measurement) -> Iterable[ContextScore]:
    return (one for scores in measurement.models for one in scores.by_context)


def _labels(measurement: Measurement) -> tuple[str, ...]:
    return tuple(scores.label for scores in measurement.models)
