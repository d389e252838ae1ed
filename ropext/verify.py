"""Loads a config in stock transformers and compares the rotary tables that it computes with the plan.

Builds the model on the meta device, so no weight is allocated. Frequencies in radians per token, suffix F pairs.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.checkpoint import CONFIG
from ropext.errors import Refused, RopextError
from ropext.facts import PROVEN
from ropext.plan import RopePlan

if TYPE_CHECKING:
    from torch import nn

TOLERANCE = 1e-5  # relative; float32 pow differs from float64 by a few 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What one rotary module of a model computes."""

    module: str
    frequencies: tuple[float, ...]  # [F]
    attention_scaling: float


def verify(plan: RopePlan) -> str:
    """Check the planned config in the installed transformers. Returns its version.

    Raises RopextError where a table differs from the plan, where there is none, or where transformers warns about rope;
    Refused where the model type is none whose table is known, so that the plan may be what is wrong.
    """
    try:
        return _verify(plan)
    except RopextError as error:
        model_type = plan.config.get("model_type")
        if model_type in PROVEN:
            raise
        raise Refused(f"{error}. {model_type} is not built yet with {plan.method}: try another method") from error


def _verify(plan: RopePlan) -> str:
    tables, warnings = tables_of(plan.config)
    import transformers

    reader = f"transformers {transformers.__version__}"
    if not tables:
        raise RopextError(f"the rotary table must be provable: {reader} builds none for this config")
    for table in tables:
        if problem := _difference(table, plan):
            raise RopextError(f"the table that a reader computes must be the planned one: {reader}, {problem}")
    if warnings:
        raise RopextError(f"a written config must load without a rope warning: {reader} says {warnings[0]!r}")
    return reader


def tables_of(config: Mapping[str, Any]) -> tuple[list[Table], list[str]]:
    """The rotary tables that stock transformers computes for a config, and what it says about rope meanwhile."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, _rope_warnings() as warnings:
        (Path(folder) / CONFIG).write_text(json.dumps(dict(config)))
        try:
            loaded = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=False)
            tables = [_table(name, type(module)(module.config)) for name, module in rotary_modules(model)]
        except Exception as error:  # whatever stock code raises on a config is the answer to "can it be read?"
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RopextError(
                f"stock transformers must be able to read the config: it fails with {reason[:200]!r}"
            ) from error
    return tables, warnings


def rotary_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each stock rotary embedding of a model: those that hold an `inv_freq` buffer."""
    for name, module in model.named_modules():
        if (
            type(module).__name__.endswith("RotaryEmbedding")
            and hasattr(module, "inv_freq")
            and hasattr(module, "config")
        ):
            yield name, module


def _table(name: str, module: Any) -> Table:
    frequencies = tuple(module.inv_freq.double().tolist())
    return Table(module=name, frequencies=frequencies, attention_scaling=float(module.attention_scaling))


def _difference(table: Table, plan: RopePlan) -> str | None:
    """What is unlike the plan in a table, in words; None where nothing is."""
    if len(table.frequencies) != len(plan.frequencies):
        return f"{table.module} rotates {len(table.frequencies)} pairs, planned were {len(plan.frequencies)}"
    for pair, (found, planned) in enumerate(zip(table.frequencies, plan.frequencies, strict=True)):
        if not abs(found - planned) <= TOLERANCE * planned:
            return f"{table.module} turns pair {pair} by {found:.8g} a token, planned was {planned:.8g}"
    if not abs(table.attention_scaling - plan.attention_scaling) <= TOLERANCE:
        return f"{table.module} scales attention by {table.attention_scaling:g}, planned was {plan.attention_scaling:g}"
    return None


@contextmanager
def _rope_warnings() -> Iterator[list[str]]:
    """Collects what transformers logs about rope, instead of printing it."""
    from transformers.utils import logging as transformers_logging

    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if record.levelno >= logging.WARNING and ("rope" in message.lower() or "rotary" in message.lower()):
                heard.append(message)

    logger, listener = transformers_logging.get_logger("transformers"), Listener()
    propagate, handlers = logger.propagate, list(logger.handlers)
    logger.handlers, logger.propagate = [listener], False
    try:
        yield heard
    finally:
        logger.handlers, logger.propagate = handlers, propagate
