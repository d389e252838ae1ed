"""The page: one HTML file that asks for nothing outside itself and is read without a script.

Labels, paths and notes come from elsewhere: the template escapes everything but the plots, which are drawn here.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from ropext.figures import Measurement, ModelScores
from ropext.report import grids, plots, words
from ropext.report.grids import Cell, Grid
from ropext.report.headline import statements


def page(measurement: Measurement) -> str:
    """The whole page. A section without figures is left out."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = resources.files("ropext.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    first, last = measurement.first_and_judged
    ropes = [scores for scores in ([first] if first is last else [first, last]) if scores.rope]
    return environment.from_string(source).render(
        title=last.label if first is last else f"{last.label} against {first.label}",
        path=last.model,
        statements=statements(measurement),
        perplexity=grids.perplexity(measurement),
        perplexity_plot=Markup(plots.perplexity(measurement)),
        bits_per_byte=grids.bits_per_byte(measurement),
        changes=grids.changes(measurement),
        positions=any(scores.by_position for scores in measurement.models),
        position_plot=Markup(plots.loss_by_position(measurement)),
        contexts=[
            (grid, Markup(plots.contexts(measurement, count))) for count, grid in grids.contexts(measurement).items()
        ],
        heat_maps=grids.heat_maps(measurement),
        tasks=grids.tasks_by_length(measurement),
        effective=grids.effective_lengths(measurement),
        other_tasks=grids.other_tasks(measurement),
        rope=_rope(ropes) if ropes else None,
        rope_plot=Markup(plots.wavelengths(measurement)),
        models=_models(measurement),
        protocol=_protocol(measurement),
        gaps=words.gaps(measurement),
        notes=words.notes(measurement),
    )


def _rope(models: list[ModelScores]) -> Grid:
    """Wavelength of each pair, and how much longer it became."""
    tables = [scores.rope.wavelengths if scores.rope else () for scores in models]
    compared = len(models) == 2

    def cells(pair: int) -> tuple[Cell, ...]:
        found = [table[pair] if pair < len(table) else None for table in tables]
        shown = [Cell(text="none" if one is None else f"{one:.1f}") for one in found]
        if compared:
            before, after = found
            shown.append(Cell(text=f"{after / before:.3f}" if before and after else "none"))
        return tuple(shown)

    return Grid(
        title="Rotary frequencies",
        note="Wavelength: tokens in which a pair of rotary dimensions turns once, at the longest inputs. "
        "A pair whose wavelength is above the native length never completed a turn in training.",
        corner="pair",
        columns=(*(scores.label for scores in models), *(["ratio"] if compared else [])),
        rows=tuple((str(pair), cells(pair)) for pair in range(max(map(len, tables)))),
    )


def _models(measurement: Measurement) -> Grid:
    """Who was measured, a column each."""

    def known(value: object, form: str = "{}") -> Cell:
        return Cell(text="not known" if value is None else form.format(value))

    def row(name: str, attribute: str, form: str = "{}") -> tuple[str, tuple[Cell, ...]]:
        return name, tuple(known(getattr(scores, attribute), form) for scores in measurement.models)

    def rope_row(name: str, attribute: str, form: str = "{}") -> tuple[str, tuple[Cell, ...]]:
        return name, tuple(
            known(getattr(scores.rope, attribute) or "none", form if getattr(scores.rope, attribute) else "{}")
            if scores.rope
            else known(None)
            for scores in measurement.models
        )

    return Grid(
        title="Models",
        note="Full passes: tokens run through the model, as passes over the longest windows; 0: scores were kept.",
        corner="field",
        columns=tuple(scores.label for scores in measurement.models),
        rows=(
            row("path", "model"),
            row("window (tokens)", "window"),
            row("native length (tokens)", "native_length"),
            rope_row("rope method", "method"),
            rope_row("rope factor", "factor", "{:g}"),
            rope_row("rope theta", "theta", "{:.10g}"),
            rope_row("attention scaling", "attention_scaling", "{:.6g}"),
            row("weights sha256", "weights_sha256"),
            row("full passes", "passes", "{:.2f}"),
        ),
    )


def _protocol(measurement: Measurement) -> list[tuple[str, str, str]]:
    """Name, value and meaning of every field of the protocol."""
    protocol = measurement.protocol

    def listed(values: Any) -> str:
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"

    return [
        ("definition", protocol.definition, "How documents are cut into what is scored."),
        (
            "stride",
            "consecutive windows" if protocol.stride is None else f"{protocol.stride} tokens",
            "How far a window starts behind the one before.",
        ),
        (
            "window",
            "the length itself" if protocol.window is None else f"{protocol.window} tokens",
            "Tokens of a window.",
        ),
        ("BOS", "one at the start of each window" if protocol.bos else "none", "The token that opens a text."),
        ("data", protocol.data, "The corpus."),
        ("data hash", protocol.data_hash, "Over the digests of the scored documents: equal for equal text."),
        ("dtype", protocol.dtype, "Of the arithmetic."),
        ("device", protocol.device, "Where it ran."),
        ("versions", listed(protocol.versions), "Of the libraries."),
        ("tasks", listed(protocol.tasks), "How tasks were made."),
    ]
