"""Prints, as JSON, the rotary tables that the installed transformers (4 or 5) uses for checkpoints at given lengths.

    python -I tests/readback.py LENGTH,LENGTH... FOLDER...

Each checkpoint is loaded as its users load it and then reads that many tokens, for dynamic and longrope settle on
their frequencies during the forward pass. Imports nothing of ropext. Lengths in tokens, frequencies in radians per
token of each pair. Output, per folder: {"version", "tables": {length: {buffer: [frequency]}}, "scaling": {length:
{buffer: factor on cos and sin}}, "log": rope lines of transformers' log, "warnings": Python warnings}.
"""

import copy
import json
import logging
import sys
import warnings
from typing import Any

import torch
import transformers


class Lines(logging.Handler):
    """Keeps every message of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def rotary(model: torch.nn.Module) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Frequencies and attention scaling of each rotary buffer; some models have one a layer type, with a prefix."""
    tables, scaling = {}, {}
    for path, module in model.named_modules():
        for buffer, values in module.named_buffers(recurse=False):
            if buffer.endswith("inv_freq") and "original" not in buffer:
                name = f"{path}.{buffer}"
                tables[name] = values.double().tolist()
                prefixed = buffer.replace("inv_freq", "attention_scaling")
                scaling[name] = float(getattr(module, prefixed, getattr(module, "attention_scaling", 1.0)))
    return tables, scaling


def read(folder: str, lengths: list[int]) -> dict[str, Any]:
    """What transformers does with one checkpoint."""
    logging.Logger.warning_once.cache_clear()  # else a warning shows for the first of several checkpoints only
    log = Lines()
    transformers.utils.logging.get_logger("transformers").addHandler(log)
    found: dict[str, Any] = {"version": transformers.__version__, "tables": {}, "scaling": {}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
        for length in lengths:
            model = copy.deepcopy(loaded)  # dynamic remembers the longest length it has seen
            with torch.no_grad():
                model.base_model(torch.arange(length)[None] % model.config.vocab_size, use_cache=False)
            found["tables"][length], found["scaling"][length] = rotary(model)
    transformers.utils.logging.get_logger("transformers").removeHandler(log)
    found["log"] = [line for line in log.lines if "rope" in line.lower() or "rotary" in line.lower()]
    found["warnings"] = [str(warning.message) for warning in caught]
    return found


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_warning()
    print(json.dumps([read(folder, [int(length) for length in sys.argv[1].split(",")]) for folder in sys.argv[2:]]))
