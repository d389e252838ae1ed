"""Plots of a measurement as SVG: equal input gives equal bytes.

A plot is drawn once in stand-in colours; the file gets fixed ones, the page CSS variables that follow light and dark.
Losses in nats per token, lengths, positions and wavelengths in tokens.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ropext.figures import ContextScore, Interval, LengthScore, Measurement
from ropext.lengths import format_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X"  # lines stay apart in print and for the colour-blind
DASHES = ("-", "--", ":", "-.")  # for more models than there are colours
MOST_MARKERS = 32  # on one line
LONGEST_NAME = 24  # characters of a label in a plot
LEGEND_COLUMNS = 3
MOST_NAMED = 2  # models that the mark of a shared window names
SIZE = (5.0, 3.3)  # inches, in the page: text is still read where a phone scales it down
# CSS variable of the page -> its stand-in, a colour that nothing else uses, and what it is in a file of its own.
COLOURS = {
    "ink": ("#010203", "#1b1f24"),
    "muted": ("#010204", "#57606a"),
    "line": ("#010205", "#d0d7de"),
    "s0": ("#010210", "#1f5fa8"),
    "s1": ("#010211", "#b3470f"),
    "s2": ("#010212", "#1a7a3c"),
    "s3": ("#010213", "#8b2fa0"),
    "s4": ("#010214", "#a01f3c"),
    "s5": ("#010215", "#0b7285"),
    "s6": ("#010216", "#6b5b00"),
    "s7": ("#010217", "#444c56"),
}
INK, MUTED, GRID, *SERIES = (stand_in for stand_in, _ in COLOURS.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One model's figures: where, how much, between what."""

    label: str
    places: Sequence[float]
    figures: Sequence[float | None]
    intervals: Sequence[Interval | None] = ()


def loss_by_position_file(measurement: Measurement) -> str:
    """A whole SVG file, one line a model; text as paths, so that it looks alike everywhere."""
    source = _svg(lambda: _loss_by_position(measurement, (8, 4.5)), fonttype="path")
    for stand_in, colour in COLOURS.values():
        source = source.replace(stand_in, colour)
    return source


def loss_by_position(measurement: Measurement) -> str:
    """The same for the page."""
    return _for_page("position", "Loss by position", lambda: _loss_by_position(measurement, SIZE))


def perplexity(measurement: Measurement) -> str:
    """Perplexity by length with intervals."""
    lines = [
        Line(
            label=scores.label,
            places=[one.length for one in results],
            figures=[one.perplexity for one in results],
            intervals=[one.ci95 for one in results],
        )
        for scores, results in ((scores, sorted(scores.results, key=_length)) for scores in measurement.models)
    ]
    drawing = partial(_by_length, lines, "length (tokens)", "perplexity", _marks(measurement))
    return _for_page("perplexity", "Perplexity by length", drawing)


def contexts(measurement: Measurement, last_tokens: int) -> str:
    """Loss of the same last tokens by context, with intervals."""
    lines = []
    for scores in measurement.models:
        found = sorted((one for one in scores.by_context if one.last_tokens == last_tokens), key=_length)
        lines.append(
            Line(
                label=scores.label,
                places=[one.length for one in found],
                figures=[one.nll for one in found],
                intervals=[one.ci95 for one in found],
            )
        )
    drawing = partial(_by_length, lines, "context (tokens)", "mean loss (nats per token)", _marks(measurement))
    return _for_page(f"context{last_tokens}", f"Loss of the last {last_tokens} tokens by context", drawing)


def wavelengths(measurement: Measurement) -> str:
    """Tokens of a whole turn of each pair, before and after: pairs above the native length never completed a turn."""
    return _for_page("wavelength", "Wavelength by pair", lambda: _wavelengths(measurement))


def _svg(draw: Callable[[], Figure], fonttype: str) -> str:
    """The drawing as SVG without date, with fixed element names, and without a matplotlibrc of the user's."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        style: dict[Any, Any] = {
            "svg.hashsalt": "ropext",
            "svg.fonttype": fonttype,
            "text.parse_math": False,  # a label may hold dollar signs
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": MUTED,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "grid.color": GRID,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
        matplotlib.rcParams.update(style)
        written = io.StringIO()
        draw().savefig(written, format="svg", metadata={"Date": None}, transparent=fonttype == "none")
    return written.getvalue()


def _for_page(name: str, title: str, draw: Callable[[], Figure]) -> str:
    """The drawing as an element of a page: names of its own, colours and font of the page, a title to be read out."""
    source = _svg(draw, fonttype="none")
    source = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>", "", source[source.index("<svg") :], flags=re.DOTALL)
    source = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", source)
    source = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", source)
    for variable, (stand_in, _) in COLOURS.items():
        source = source.replace(stand_in, f"var(--{variable})")
    opening, rest = source.split(">", 1)
    return f'{opening} role="img" aria-labelledby="{name}-title"><title id="{name}-title">{title}</title>{rest}'


def _loss_by_position(measurement: Measurement, size: tuple[float, float]) -> Figure:
    """Loss against position, positions in octaves: context lengths double, and so does what each model was made for."""
    figure, axes = _axes(size, "position in the window (tokens)", "mean loss (nats per token)")
    for number, scores in enumerate(measurement.models):
        blocks = scores.by_position
        line = Line(
            label=scores.label,
            places=[(block.start + block.end) / 2 for block in blocks],
            figures=[block.nll for block in blocks],
        )
        _draw(axes, number, line)
    ends = [block.end for scores in measurement.models for block in scores.by_position]
    if ends:
        _octaves(axes, min(ends) // 2, max(ends))
        _draw_marks(axes, _marks(measurement))
        _legend(axes)
    return figure


def _by_length(lines: Sequence[Line], across: str, up: str, marks: Mapping[int, str]) -> Figure:
    """Figures against lengths in octaves; upwards logarithmic where the models lie far apart."""
    figure, axes = _axes(SIZE, across, up)
    for number, line in enumerate(lines):
        aside = 1.1 ** ((number + 0.5) / len(lines) - 0.5)  # so that intervals do not cover each other
        _draw(axes, number, replace(line, places=[place * aside for place in line.places]))
    found = [value for line in lines for value in line.figures if value]
    if found:
        if min(found) > 0 and max(found) / min(found) > 8:
            _logarithmic(axes, (1, 2, 5) if max(found) / min(found) < 1000 else (1,))
        places = [int(place) for line in lines for place in line.places]
        _octaves(axes, min(places), max(places))
        _draw_marks(axes, marks)
        _legend(axes)
    return figure


def _wavelengths(measurement: Measurement) -> Figure:
    """The first model and the last."""
    figure, axes = _axes(SIZE, "pair of rotary dimensions", "wavelength (tokens)")
    for number in sorted({0, len(measurement.models) - 1}):
        scores = measurement.models[number]
        if scores.rope:
            table = scores.rope.wavelengths
            _draw(axes, number, Line(label=scores.label, places=range(len(table)), figures=table))
    _logarithmic(axes, (1,))
    native_length = measurement.models[0].native_length
    if native_length:
        axes.axhline(native_length, color=MUTED, linestyle=":", linewidth=1.2)
        axes.annotate(
            f"native {format_length(native_length)}",
            (1, native_length),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
    _legend(axes)
    return figure


def _axes(size: tuple[float, float], across: str, up: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid()
    axes.set_axisbelow(True)
    return figure, axes


def _draw(axes: Axes, number: int, line: Line) -> None:
    """One line in the colour, marker and dash of its number; a figure that was not measured leaves a gap."""
    colour = SERIES[number % len(SERIES)]
    axes.plot(
        line.places,
        [float("nan") if figure is None else figure for figure in line.figures],
        color=colour,
        linestyle=DASHES[number // len(SERIES) % len(DASHES)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=3.5,
        markevery=max(1, len(line.places) // MOST_MARKERS),
        label=_short(line.label),
    )
    for place, bounds in zip(line.places, line.intervals, strict=False):
        if bounds:
            axes.vlines(place, *bounds, color=colour, linewidth=1, alpha=0.7)


def _logarithmic(axes: Axes, digits: Sequence[float]) -> None:
    """Upwards by powers of ten, with plain numbers at these multiples of each."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=digits))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.minorticks_off()


def _octaves(axes: Axes, first: int, last: int) -> None:
    """Ticks at powers of two, named as lengths are (512, 1k, 2k ...); at both ends where there is none between."""
    ticks = [2**power for power in range(last.bit_length()) if first <= 2**power <= last] or sorted({first, last})
    axes.set_xscale("log", base=2)
    axes.set_xlim(first * 0.9, last * 1.25)  # with room for the name of a mark at the end
    axes.set_xticks(ticks, [format_length(tick) for tick in ticks])
    axes.xaxis.minorticks_off()


def _marks(measurement: Measurement) -> dict[int, str]:
    """Lengths worth a line: what the first model was trained at, and the window of each."""
    windows: dict[int, list[str]] = {}
    for scores in measurement.models:
        if scores.window:
            windows.setdefault(scores.window, []).append(_short(scores.label))
    marks = {}
    for window, labels in windows.items():
        if len(labels) == len(measurement.models):
            marks[window] = f"window {format_length(window)}"
        else:
            whose = ", ".join(labels) if len(labels) <= MOST_NAMED else f"{len(labels)} models"
            marks[window] = f"window {format_length(window)} ({whose})"
    native = measurement.models[0].native_length
    if native:
        marks[native] = ", ".join([f"native {format_length(native)}", *([marks[native]] if native in marks else [])])
    return marks


def _draw_marks(axes: Axes, marks: Mapping[int, str]) -> None:
    """A dotted line with its name at each mark in sight."""
    first, last = axes.get_xlim()
    for length, name in marks.items():
        if first <= length <= last:
            axes.axvline(length, color=MUTED, linestyle=":", linewidth=1.2)
            axes.annotate(
                name,
                (length, 1),
                xycoords=("data", "axes fraction"),
                xytext=(2, -2),
                textcoords="offset points",
                rotation=90,
                ha="left",
                va="top",
                fontsize=8,
                color=MUTED,
            )


def _legend(axes: Axes) -> None:
    """Names of the lines, above the plot, where they cover none of it."""
    named = [line for line in axes.get_lines() if line.get_marker() != "None"]  # a mark has none
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * ((len(named) - 1) // LEGEND_COLUMNS))
    labels = [str(line.get_label()) for line in named]
    figure.legend(named, labels, loc="outside upper left", ncols=LEGEND_COLUMNS, frameon=False)


def _short(label: str) -> str:
    """A label that fits."""
    return label if len(label) <= LONGEST_NAME else label[: LONGEST_NAME - 1] + "…"


def _length(figure: LengthScore | ContextScore) -> int:
    return figure.length
