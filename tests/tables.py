"""Prints, as JSON, the rotary tables that the installed transformers (4 or 5) builds for configs, without weights.

    python -I tests/tables.py LIST.json

LIST.json holds pairs of a directory with a config.json and a length in tokens. Models are built on the meta device,
with few layers where that works, then each rotary module again from its own config. Imports nothing of ropext.
Frequencies in radians per token of each pair. Output, per pair: {"tables": {buffer: [frequency]}, "long": the same for
an input of that length, "scaling": {buffer: factor on cos and sin}, "log": rope lines of transformers' log}, or
{"unknown": true} where this version does not know the model type, or {"error": one line}.
"""

import inspect
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
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


def with_few_layers(config: dict[str, Any]) -> dict[str, Any]:
    """The config cut to the shortest run of layers that has every kind of layer, at least two."""
    cut = {
        key: with_few_layers(value) if isinstance(value, dict) and "model_type" in value else value
        for key, value in config.items()
    }
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(layers, int) and layers > 2:
        few = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]) if isinstance(kinds, list) else 2
        cut |= {key: value[:few] for key, value in cut.items() if isinstance(value, list) and len(value) == layers}
        cut["num_hidden_layers"] = few
    if isinstance(config.get("num_layers"), int):  # longcat_flash counts its layers in pairs
        cut["num_layers"] = min(2, config["num_layers"])
    return cut


def loaded(config: dict[str, Any]) -> Any:
    """The config object, read as from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return transformers.AutoConfig.from_pretrained(folder)


def model_of(config: Any) -> torch.nn.Module:
    """A model on the meta device: causal, or one that reads images and writes text."""
    auto = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        try:
            return auto.from_config(config)
        except (ImportError, AttributeError):  # a tower that wants another package; 4.57 builds some only from the text
            if type(config.text_config) in transformers.AutoModelForCausalLM._model_mapping:
                return transformers.AutoModelForCausalLM.from_config(config.text_config)
            return auto._model_mapping[type(config)]._from_config(config.text_config)


def is_table(buffer: str) -> bool:
    return buffer.endswith("inv_freq") and "original" not in buffer


def tables(model: torch.nn.Module, length: int) -> dict[str, dict[str, Any]]:
    """Frequencies and attention scaling of each rotary buffer, and its frequencies for an input of `length` tokens."""
    found: dict[str, dict[str, Any]] = {"tables": {}, "scaling": {}, "long": {}}
    for path, module in model.named_modules():
        if hasattr(module, "config") and (hasattr(module, "rope_init_fn") or any(map(is_table, buffers(module)))):
            fresh = rebuilt(module)
            found["tables"] |= {f"{path}.{name}": values for name, values in buffers(fresh).items() if is_table(name)}
            for name in buffers(fresh):
                own = getattr(fresh, name.replace("inv_freq", "attention_scaling"), None)
                found["scaling"][f"{path}.{name}"] = float(own or getattr(fresh, "attention_scaling", 1.0))
            settle(fresh, length)
            found["long"] |= {f"{path}.{name}": values for name, values in buffers(fresh).items() if is_table(name)}
    return found


def buffers(module: torch.nn.Module) -> dict[str, list[float]]:
    """The rotary buffers of one module; phimoe of 4.57 holds none and computes its table in each forward pass."""
    found = {
        name: [] if value.is_meta else value.double().tolist()
        for name, value in module.named_buffers(recurse=False)
        if is_table(name)
    }
    if not found and hasattr(module, "rope_init_fn"):
        found["inv_freq"] = module.rope_init_fn(module.config, "cpu")[0].double().tolist()
    return found


def rebuilt(module: torch.nn.Module) -> torch.nn.Module:
    """The same rotary module with numbers in it. olmo3 of 4.57 states the type of its sliding layers apart from the
    config, moshi of 4.57 wants the config by name."""
    named = inspect.signature(type(module).__init__).parameters
    return type(module)(config=module.config, **({"rope_type": module.rope_type} if "rope_type" in named else {}))


def settle(module: torch.nn.Module, length: int) -> None:
    """Lets a module whose table depends on the input see one of `length` tokens."""
    kinds = getattr(module, "rope_type", None)
    for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        if kind == "dynamic":
            named = {} if layer_type is None else {"layer_type": layer_type}
            positions = torch.tensor([[length - 1]])
            try:
                module(torch.zeros(1, 1, 1), positions, **named)
            except IndexError:  # M-RoPE of 4.57 wants positions in time, height and width
                module(torch.zeros(1, 1, 1), positions.expand(3, 1, 1), **named)


def read(folder: str, length: int) -> dict[str, Any]:
    """What transformers makes of one config."""
    logging.Logger.warning_once.cache_clear()
    log, config = Lines(), json.loads((Path(folder) / "config.json").read_text())
    logger = transformers.utils.logging.get_logger("transformers")
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        return {"unknown": True}
    logger.addHandler(log)
    try:
        whole = loaded(config)
    except Exception as error:
        return {"error": line(error)}
    finally:
        logger.removeHandler(log)
    try:
        found: dict[str, Any] = tables(model_of(loaded(with_few_layers(config))), length)
    except Exception:  # some families do not take fewer layers
        try:
            found = tables(model_of(whole), length)
        except Exception as error:
            found = {"error": line(error)}
    return found | {"log": [line for line in log.lines if "rope" in line.lower() or "rotary" in line.lower()]}


def line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_warning()
    pairs = json.loads(Path(sys.argv[1]).read_text())
    readings = [read(folder, length) for folder, length in pairs]
    print(json.dumps({"version": transformers.__version__, "readings": readings}))
