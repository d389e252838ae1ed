"""Scores become a table to read, a JSON document to compute with, and a plot of the loss by position.

Nothing here measures. Losses in nats per token, lengths and positions in tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.lengths import format_length
from ropext.score import LengthScore, ModelScores, PositionScore, Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.text import Text

JSON_NAME = "report.json"
PLOT_NAME = "loss_by_position.svg"
SHOWN_DIGITS = 12  # of the corpus hash, enough to tell two corpora apart by eye
MARKERS = "osD^vP*X"  # lines stay apart in print and for the colour-blind


def table(models: Sequence[ModelScores], protocol: Protocol) -> Group:
    """Perplexity by length, one column a model, and under it the definition and what could not be measured.

    For rich's print; the lines under the table may be wider than it, which a caption could not.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("length", justify="right")
    for scores in models:
        result.add_column(Text(scores.label), justify="right")
    for row in zip(*(scores.results for scores in models), strict=True):
        result.add_row(str(row[0].length), *(_cell(figure) for figure in row))
    return Group(result, Text(_definition(models, protocol)))


def to_json(models: Sequence[ModelScores], protocol: Protocol) -> dict[str, Any]:
    """The document that `eval --json` prints (DESIGN.md, the commands): no NaN, a figure not measured is null."""
    return {"models": [{**asdict(scores), "tasks": []} for scores in models], "protocol": asdict(protocol)}


def plot_by_position(models: Sequence[ModelScores], path: Path, marks: Mapping[str, int]) -> None:
    """SVG of the loss by position, one line a model; `marks` names lengths to draw a vertical line at.

    Equal input gives equal bytes: no date, fixed element names, and no matplotlibrc of the user's.
    """
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "ropext"
        _figure(models, marks).savefig(path, format="svg", metadata={"Date": None})


def write_report(
    folder: Path, models: Sequence[ModelScores], protocol: Protocol, marks: Mapping[str, int]
) -> tuple[Path, Path]:
    """Writes report.json and loss_by_position.svg into `folder`, each whole or not at all; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps(to_json(models, protocol), indent=2, allow_nan=False) + "\n"
    report = _write_whole(folder / JSON_NAME, lambda part: part.write_text(document, encoding="utf-8"))
    plot = _write_whole(folder / PLOT_NAME, lambda part: plot_by_position(models, part, marks))
    return report, plot


def _write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Lets `write` fill a temporary sibling, then renames it to `path`."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _cell(figure: LengthScore) -> Text:
    """One figure of the table with its interval below; what is missing is spelled, never left empty."""
    from rich.text import Text

    if figure.nll is None:
        return Text("failed" if figure.windows else "not measured")
    if figure.perplexity is None:
        return Text(f"exp({figure.nll:.1f})")
    cell = Text(_number(figure.perplexity))
    if figure.ci95:
        cell.append(f"\n{_number(figure.ci95[0])} to {_number(figure.ci95[1])}", style="dim")
    return cell


def _number(perplexity: float) -> str:
    """Two decimals while they fit, then an exponent: a blown-up model must not widen its column."""
    return f"{perplexity:.2f}" if perplexity < 100_000 else f"{perplexity:.2e}"


def _definition(models: Sequence[ModelScores], protocol: Protocol) -> str:
    """The definition of the figures, then each reason for a missing one."""
    stride = "consecutive" if protocol.stride is None else f"stride {protocol.stride}"
    bos = "one BOS at the start of each" if protocol.bos else "no BOS"
    lines = [
        f"Perplexity (95% interval, resampling documents), {protocol.definition}: {_sizes(models)}, {stride}, {bos}; "
        f"{protocol.dtype}; {protocol.data} ({protocol.data_hash[:SHOWN_DIGITS]})."
    ]
    missing: dict[tuple[int, str], list[str]] = {}
    for scores in models:
        for figure in scores.results:
            if figure.status != "ok":
                missing.setdefault((figure.length, figure.status), []).append(scores.label)
    return "\n".join(
        lines + [f"{length} ({', '.join(labels)}): {status}." for (length, status), labels in missing.items()]
    )


def _sizes(models: Sequence[ModelScores]) -> str:
    """Window, windows and documents, once if all models were scored on the same cut."""
    found = {}
    for scores in models:
        widest = max(scores.results, key=lambda figure: figure.length if figure.windows else 0)
        window = widest.length if widest.windows else 0
        counted = (
            f"{_counted(widest.windows, 'window')} of {window} tokens from {_counted(widest.documents, 'document')}"
        )
        found[counted] = True
    return " / ".join(found)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _figure(models: Sequence[ModelScores], marks: Mapping[str, int]) -> Figure:
    """Loss against position, positions in octaves: context lengths double, and so does what each model was made for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, scores in enumerate(models):
        centres = [(block.start + block.end) / 2 for block in scores.by_position]
        losses = [float("nan") if block.nll is None else block.nll for block in scores.by_position]
        axes.plot(centres, losses, marker=MARKERS[number % len(MARKERS)], markersize=3, label=scores.label)
    blocks = [block for scores in models for block in scores.by_position]
    if blocks:
        _position_axis(axes, blocks, marks)
        axes.legend(frameon=False)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("mean loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _position_axis(axes: Axes, blocks: Sequence[PositionScore], marks: Mapping[str, int]) -> None:
    """Octave ticks named as lengths are (512, 1k, 2k ...), and a dotted line with its name at each mark in sight."""
    first, last = blocks[0].end // 2, max(block.end for block in blocks)
    ticks = [2**power for power in range(last.bit_length()) if first <= 2**power <= last]
    axes.set_xscale("log", base=2)
    axes.set_xlim(first * 0.9, last * 1.1)
    axes.set_xticks(ticks, [format_length(tick) for tick in ticks])
    axes.minorticks_off()
    for name, length in marks.items():
        if first <= length <= last:
            axes.axvline(length, color="0.4", linestyle=":", linewidth=1.2)
            axes.annotate(
                f"{name} {format_length(length)}",
                (length, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -3),
                textcoords="offset points",
                va="top",
                color="0.4",
            )
