"""Loads a config in stock transformers and compares the rotary tables that it computes with the plan.

Frequencies in radians per token, suffix F pairs.
"""

from __future__ import annotations

from ropext.errors import Refused, RopextError
from ropext.facts import TOLERANCE
from ropext.families import PROVEN, THREE_FIELD_LONGROPE
from ropext.plan import RopePlan
from ropext.stock import StockReading, Table, read_stock


def verify(plan: RopePlan) -> str:
    """Check the planned config in the installed transformers. Returns its version.

    Raises RopextError where a table differs from the plan, where there is none, or where transformers warns about rope;
    Refused where the model type is none whose table is known, so that the plan may be what is wrong.
    """
    try:
        return _verify(plan)
    except RopextError as error:
        if plan.config.get("model_type") in PROVEN:
            raise
        raise Refused(
            f"{error}. Stock {plan.model_type} code cannot carry {plan.method}: try another method"
        ) from error


def _verify(plan: RopePlan) -> str:
    changing = plan.long_frequencies != plan.frequencies
    lengths = (plan.original_length, plan.target_length) if changing else ()
    reading = read_stock(plan.config, [length for length in lengths if length])
    before = {(table.module, table.layer_type): table for table in plan.kept_tables}
    extended = [table for table in reading.tables if (table.module, table.layer_type) not in before]
    if not extended:
        raise RopextError(f"the rotary table must be provable: {reading.reader} builds none for this config")
    rule = f"the table that a reader computes must be the planned one: {reading.reader}"
    for table in extended:
        if problem := _difference(table, plan, plan.frequencies):
            raise RopextError(f"{rule}, {problem}")
    _verify_long(plan, reading, rule)
    for table in reading.tables:
        if before.pop((table.module, table.layer_type), table) != table:
            raise RopextError(f"{rule}, the table of {_name(table)} changes, though it is none to be extended")
    if before:
        raise RopextError(f"{rule}, the table of {_name(min(before.values(), key=_name))} is gone")
    if warnings := [line for line in reading.warnings if not _known(line, plan)]:
        raise RopextError(f"a written config must load without a rope warning: {reading.reader} says {warnings[0]!r}")
    return reading.reader


def _verify_long(plan: RopePlan, reading: StockReading, rule: str) -> None:
    """A table that depends on the input: as planned up to the length that it starts from, and at the target."""
    kept = {(table.module, table.layer_type) for table in plan.kept_tables}
    for length, tables in reading.at.items():
        planned = plan.long_frequencies if length == plan.target_length else plan.frequencies
        for table in tables:
            problem = _difference(table, plan, planned)
            if problem and (table.module, table.layer_type) not in kept:
                raise RopextError(f"{rule} for an input of {length} tokens, {problem}")


def _known(warning: str, plan: RopePlan) -> bool:
    """Phi-3 in transformers 4 takes no factor, and transformers 5 asks for one: it computes the same without."""
    return plan.model_type in THREE_FIELD_LONGROPE and plan.method == "longrope" and "set the `factor` field" in warning


def _name(table: Table) -> str:
    return f"{table.module}, {table.layer_type}" if table.layer_type else table.module


def _difference(table: Table, plan: RopePlan, frequencies: tuple[float, ...]) -> str | None:
    """What is unlike the plan in a table, in words; None where nothing is."""
    if len(table.frequencies) != len(frequencies):
        return f"{_name(table)} rotates {len(table.frequencies)} pairs, planned were {len(frequencies)}"
    for pair, (found, planned) in enumerate(zip(table.frequencies, frequencies, strict=True)):
        if not abs(found - planned) <= TOLERANCE * planned:
            return f"{_name(table)} turns pair {pair} by {found:.8g} a token, planned was {planned:.8g}"
    if not abs(table.attention_scaling - plan.attention_scaling) <= TOLERANCE:
        return f"{_name(table)} scales attention by {table.attention_scaling:g}, planned was {plan.attention_scaling:g}"
    return None
