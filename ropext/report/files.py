"""What a report leaves on disk: a JSON document, a plot and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ropext.figures import Measurement
from ropext.staging import whole_file

JSON_NAME = "report.json"
PLOT_NAME = "loss_by_position.svg"
PAGE_NAME = "report.html"


def to_json(measurement: Measurement) -> dict[str, Any]:
    """The document that `eval --json` prints (DESIGN.md, the commands): a figure not measured is null.

    Raises ValueError for NaN and infinity, which JSON does not have and no figure may be.
    """
    document: dict[str, Any] = _plain(measurement, "")
    return document


def _plain(value: Any, where: str) -> Any:
    """`value` in the types of JSON; `where` names it in the error."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), f"{where}.{field.name}") for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one, f"{where}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a figure is a finite number, or None with a status: found {value} at {where.lstrip('.')}")
    return value


def write_report(folder: Path, measurement: Measurement) -> tuple[Path, ...]:
    """Writes document, plot and page into `folder`, each whole or not at all; gives their paths."""
    from ropext.report.page import page
    from ropext.report.plots import loss_by_position_file

    document = json.dumps(to_json(measurement), indent=2, allow_nan=False) + "\n"
    made = {JSON_NAME: document, PLOT_NAME: loss_by_position_file(measurement), PAGE_NAME: page(measurement)}
    return tuple(whole_file(folder / name, _text(text)) for name, text in made.items())


def _text(content: str) -> Callable[[Path], object]:
    """Fills a file with it, the same bytes on every system."""
    return lambda part: part.write_text(content, encoding="utf-8", newline="\n")
