"""What the installed transformers makes of a config: rope settings as it standardises them, and every rotary table.

Builds the model on the meta device, so no weight is allocated. Frequencies in radians per token, suffix F pairs,
lengths in tokens.
"""

from __future__ import annotations

import json
import warnings as python_warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.checkpoint import CONFIG
from ropext.errors import RopextError

if TYPE_CHECKING:
    from torch import nn

TEXT = "text_config"  # where a multimodal config keeps the settings of its language model


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What one rotary module of a model computes, for one layer type where it keeps one table for each."""

    module: str
    of_text: bool  # belongs to the language model, not to a vision or audio tower
    layer_type: str | None
    frequencies: tuple[float, ...]  # [F]
    attention_scaling: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StockReading:
    """One config as transformers reads it."""

    reader: str  # "transformers 5.24.0"
    rope: Mapping[str, Any]  # rope_parameters, standardised; empty where the config class has none
    layer_types: tuple[str, ...]  # of each layer; empty where the config class tells none apart
    sliding_window: int | None  # tokens, that the layers of a sliding or chunked type look back
    tables: tuple[Table, ...]
    at: Mapping[int, tuple[Table, ...]]  # those for an input of so many tokens
    warnings: tuple[str, ...]  # what was logged about rope


def read_stock(config: Mapping[str, Any], lengths: Sequence[int] = ()) -> StockReading:
    """Have the installed transformers read a config: its tables at the start, and for inputs of these lengths.

    Raises RopextError, in one line, where it cannot.
    """
    import tempfile  # with logging below, a tenth of the start of a patch that asks nothing here

    import transformers

    reader = f"transformers {transformers.__version__}"
    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        raise RopextError(
            f"stock transformers must know the model type: {reader} does not know {config.get('model_type')!r}"
        )
    with tempfile.TemporaryDirectory() as folder, _rope_warnings() as warnings:
        (Path(folder) / CONFIG).write_text(json.dumps(dict(config)))
        try:
            loaded = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            own = getattr(loaded, TEXT, loaded)
            rope = dict(getattr(own, "rope_parameters", None) or {})
            layer_types = tuple(getattr(own, "layer_types", None) or ())
            sliding = getattr(own, "sliding_window", None) or getattr(own, "attention_chunk_size", None)
            model = _on_meta(loaded)
            tables = tuple(_tables(model, type(own), None))
            at = {length: tuple(_tables(model, type(own), length)) for length in lengths}
        except Exception as error:  # whatever stock code raises on a config is the answer to "can it be read?"
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RopextError(
                f"stock transformers must be able to read the config: it fails with {reason[:200]!r}"
            ) from error
    return StockReading(
        reader=reader,
        rope=rope,
        layer_types=layer_types,
        sliding_window=sliding if isinstance(sliding, int) else None,
        tables=tables,
        at=at,
        warnings=tuple(warnings),
    )


def rotary_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each rotary embedding that can be built again: it has a config, and tables as buffers."""
    for name, module in model.named_modules():
        if hasattr(module, "config") and any(_is_table(buffer) for buffer, _ in module.named_buffers(recurse=False)):
            yield name, module


def _on_meta(loaded: Any) -> nn.Module:
    """The model of a config without memory for its weights: a causal one, or one that reads images and writes text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal = type(loaded) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    with torch.device("meta"):
        try:
            model: nn.Module = auto.from_config(loaded, trust_remote_code=False)
        except ImportError:  # a vision or audio tower that wants one more package: the language model does not
            if not hasattr(loaded, TEXT):
                raise
            model = AutoModelForCausalLM.from_config(getattr(loaded, TEXT), trust_remote_code=False)
    return model


def _tables(model: nn.Module, text: type, length: int | None) -> Iterator[Table]:
    """Every table, computed anew: on the meta device the model's own holds no numbers. A module that many layers
    share by class and config is computed once. `text` is the config class of the language model."""
    fresh: dict[tuple[Any, int], Any] = {}
    for name, module in rotary_modules(model):
        key = (type(module), id(module.config))
        if key not in fresh:
            fresh[key] = type(module)(module.config)
            _settle(fresh[key], length)
        for buffer, values in fresh[key].named_buffers(recurse=False):
            if _is_table(buffer):
                yield _table(name, fresh[key], text, buffer, values)


def _settle(module: Any, length: int | None) -> None:
    """Let a module see an input of `length` tokens: dynamic and longrope compute their table in the forward pass."""
    import torch

    kinds = getattr(module, "rope_type", None)
    by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
    for layer_type, kind in by_layer.items():
        if length is not None and kind in ("dynamic", "longrope"):
            named = {} if layer_type is None else {"layer_type": layer_type}
            module(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]), **named)


def _table(name: str, module: Any, text: type, buffer: str, values: Any) -> Table:
    layer_type = buffer.removesuffix("inv_freq").rstrip("_") or None
    own = f"{layer_type}_attention_scaling" if layer_type else "attention_scaling"
    scaling = getattr(module, own, getattr(module, "attention_scaling", 1.0))
    return Table(
        module=name,
        of_text=isinstance(module.config, text),
        layer_type=layer_type,
        frequencies=tuple(values.double().tolist()),
        attention_scaling=float(scaling),
    )


def _is_table(buffer: str) -> bool:
    return buffer.endswith("inv_freq") and "original" not in buffer


@contextmanager
def _rope_warnings() -> Iterator[list[str]]:
    """Collects what transformers logs about rope, instead of printing it."""
    import logging

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
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # else a second config warns of nothing
    try:
        with python_warnings.catch_warnings():
            python_warnings.simplefilter("ignore")  # stock config classes use what stock code deprecates
            yield heard
    finally:
        logger.handlers, logger.propagate = handlers, propagate
