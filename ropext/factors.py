"""LongRoPE's two lists of factors, read from a JSON or CSV file.

JSON: an object with long_factor and, unless short inputs stay as they are, short_factor: the names of config.json. CSV:
one row a pair; one column is the long list, two are the short and the long one; a row of names may stand first.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from ropext.errors import UsageError

NAMES = ("short_factor", "long_factor")


def read_factors(path: Path) -> dict[str, tuple[float, ...]]:
    """Both lists, under the names of config.json. Raises UsageError where the file holds none."""
    try:
        text = path.read_text(encoding="utf-8")
        lists = _from_json(text) if path.suffix.lower() == ".json" else _from_csv(text)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise UsageError(
            f"--longrope-factors is a JSON file with long_factor and short_factor, or a CSV file with one row a pair: "
            f"{path} is not ({reason})"
        ) from None
    if len(lists["short_factor"]) != len(lists["long_factor"]):
        raise UsageError(
            f"short_factor and long_factor have one number a pair: {path} has {len(lists['short_factor'])} and "
            f"{len(lists['long_factor'])}"
        )
    return lists


def _from_json(text: str) -> dict[str, tuple[float, ...]]:
    found = json.loads(text)
    long = _numbers(found["long_factor"])
    short = _numbers(found["short_factor"]) if "short_factor" in found else (1.0,) * len(long)
    return {"short_factor": short, "long_factor": long}


def _from_csv(text: str) -> dict[str, tuple[float, ...]]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    names = rows.pop(0) if rows and not _is_number(rows[0][0]) else list(NAMES[-len(rows[0]) :])
    if not rows or not set(names) <= set(NAMES) or any(len(row) != len(names) for row in rows):
        raise ValueError("its columns are one or two numbers a row, named short_factor and long_factor if at all")
    columns = {name: _numbers([row[number] for row in rows]) for number, name in enumerate(names)}
    return {"short_factor": columns.get("short_factor", (1.0,) * len(rows)), "long_factor": columns["long_factor"]}


def _numbers(values: Sequence[object]) -> tuple[float, ...]:
    if isinstance(values, str) or any(isinstance(value, bool | None) for value in values):
        raise ValueError("a list holds numbers")
    return tuple(float(value) for value in values)  # type: ignore[arg-type]  # TypeError is caught above


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
