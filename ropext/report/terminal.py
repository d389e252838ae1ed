"""A measurement as a table for rich's print, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropext.figures import Measurement
from ropext.report import grids, words
from ropext.report.grids import Cell, Grid

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

MOST_MODELS = 3  # that fit as columns; of more, each is a row
MOST_LENGTHS = 3  # that then fit as columns of one table
MOST_LINES = 9  # of comparisons; more are a table


def table(measurement: Measurement) -> Group:
    """Perplexity by length, one column a model; the comparisons; what else was measured; what the figures are.

    Lines under a table may be wider than it, which a caption could not.
    """
    from rich.console import Group
    from rich.text import Text

    perplexity = grids.perplexity(measurement)
    parts: list[Table | Text] = _laid_out(perplexity) if perplexity else []
    changes, lines = grids.changes(measurement), comparison_lines(measurement)
    if changes and len(lines) > MOST_LINES:
        parts += _titled(changes)
    elif lines:
        parts.append(Text("\n".join([*lines, ""])))
    others = [grids.other_tasks(measurement), grids.effective_lengths(measurement)]
    for grid in [*grids.contexts(measurement).values(), *grids.tasks_by_length(measurement), *filter(None, others)]:
        parts += _titled(grid)
    below = words.advice(measurement) + ([perplexity.note] if perplexity else [])
    return Group(*parts, Text("\n".join(below + words.gaps(measurement))))


def comparison_lines(measurement: Measurement) -> list[str]:
    """A line for each later model and length: what it cost or won against the first model."""
    lines = []
    order = [scores.label for scores in measurement.models]
    for pair in sorted(measurement.comparisons, key=lambda pair: (order.index(pair.label), pair.length)):
        change = words.change(pair)
        if change:
            interval = f" ({change.interval})" if change.interval else ""
            lines.append(
                f"{pair.label} at {pair.length}: {change.figure}{interval} against {pair.against}, {change.word}"
            )
    return lines


def _titled(grid: Grid) -> list[Table | Text]:
    from rich.text import Text

    return [Text(grid.title, style="bold"), *_laid_out(grid)]


def _laid_out(grid: Grid) -> list[Table | Text]:
    """The grid as it is, or turned and in pieces where so many models would not fit."""
    if len(grid.columns) <= MOST_MODELS:
        return [_table(grid.corner, grid.columns, grid.rows)]
    pieces = [grid.rows[start : start + MOST_LENGTHS] for start in range(0, len(grid.rows), MOST_LENGTHS)]
    return [
        _table(
            f"model \\ {grid.corner}",
            [label for label, _ in piece],
            [(model, [cells[number] for _, cells in piece]) for number, model in enumerate(grid.columns)],
        )
        for piece in pieces
    ]


def _table(corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD)
    result.add_column(corner, justify="left" if rows and not rows[0][0].isdigit() else "right", overflow="fold")
    for column in columns:
        result.add_column(Text(column), justify="right", overflow="fold")
    for label, cells in rows:
        result.add_row(Text(label), *map(_cell, cells))
    return result


def _cell(cell: Cell) -> Text:
    """The figure with its interval, then its word below."""
    from rich.text import Text

    text = Text(cell.text)
    for line in filter(None, (cell.interval, cell.word)):
        text.append(f"\n{line}", style="dim")
    return text
