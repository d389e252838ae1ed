"""Loads a checkpoint's model in stock transformers, and refuses one that is not what its files say.

No code from a checkpoint runs, no pickle is read, and nothing is left to random initialisation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.errors import RopextError, UsageError, first_line

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")
TABLE_TOLERANCE = 1e-6  # relative; float32 rounding, far below the 4e-3 of a table cast to bf16


def load_model(path: str | Path, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The checkpoint's model in eval mode, every weight from its files and its rotary table checked.

    `dtype` is torch's name of it; rotary tables stay float32. Raises RopextError if it cannot be loaded whole.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with _silent_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="sdpa",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        if "ignore_mismatched_sizes" in str(error):  # it points to a report that is on stderr
            reason = "a tensor has another shape than config.json gives it"
        raise RopextError(f"transformers cannot load {path}: {reason}") from error
    model, info = loaded
    check_weights(path, info)
    check_rotary_tables(model)
    placed: PreTrainedModel = model.to(device).eval()  # a move alone: a dtype here would cast the rotary tables
    return placed


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer. Raises RopextError if it has none that transformers can load."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raise bare exceptions of many kinds on damaged files
        reason = " ".join(str(error).split())[:200]  # its first line alone often ends in the middle of a sentence
        raise RopextError(f"transformers cannot load the tokenizer of {path}, are its files there? {reason}") from error
    return tokenizer


def check_arithmetic(device: str, dtype: str) -> None:
    """Raises UsageError for a device that is not here, and for a dtype that no model is run in."""
    import torch

    if dtype not in DTYPES:
        raise UsageError(f"--dtype is one of {', '.join(DTYPES)}: found {dtype!r}")
    try:
        works = torch.zeros(1, device=device).sum().item() == 0
    except (RuntimeError, AssertionError, NotImplementedError):
        works = False
    if not works:
        raise UsageError(f"--device is one that PyTorch has here, such as cpu: found {device!r}")


def default_device() -> str:
    """A GPU where torch sees one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_weights(path: str | Path, info: dict[str, Any]) -> None:
    """Raises RopextError if `info`, from from_pretrained, names a weight that the files did not give."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise RopextError(
            f"every weight must come from the checkpoint: {path} lacks {len(missing)}, such as {missing[0]}; "
            "get the whole checkpoint"
        )


def check_rotary_tables(model: nn.Module) -> None:
    """Raises RopextError unless each rotary table on the model is the one that its config gives.

    A table left uninitialised by loading, or cast to half precision, costs quality in silence (the loss is then random
    from step 1, or drifts with position), so a fresh module of the same class is the oracle.
    """
    for name, module in model.named_modules():
        if _is_rotary(module):
            expected: dict[str, Any] = dict(type(module)(module.config).named_buffers())
            for buffer, table in module.named_buffers():
                if buffer.endswith("inv_freq"):
                    _check_table(f"{name}.{buffer}", table, expected[buffer])


def set_rotary(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Give a loaded model the rotary tables, the window and the rope settings of another config of the same model.

    Raises RopextError where a table does not become what that config gives.
    """
    loaded: Any = stock_config(config)
    own: Any = model.config
    for key in ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings"):
        if hasattr(loaded, key):
            setattr(own, key, getattr(loaded, key))
    refresh_rotary(model)
    check_rotary_tables(model)


def stock_config(config: Mapping[str, Any]) -> PretrainedConfig:
    """What transformers makes of the content of a config.json."""
    from transformers import CONFIG_MAPPING

    own_copy = copy.deepcopy(dict(config))  # transformers adds its own keys to the nested ones
    made: PretrainedConfig = CONFIG_MAPPING[config["model_type"]].from_dict(own_copy)
    return made


def refresh_rotary(model: nn.Module) -> None:
    """New rotary modules from the configs of the old ones: dynamic and longrope remember what they have seen."""
    for name, module in list(model.named_modules()):
        if _is_rotary(module):
            model.set_submodule(name, type(module)(module.config).to(next(module.buffers()).device))


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "config")


def _check_table(name: str, table: Any, expected: Any) -> None:
    """Raises RopextError unless both tensors `[F]` hold the same frequencies (radians per token)."""
    table, expected = table.detach().cpu().double(), expected.double()
    if table.shape != expected.shape:
        raise RopextError(
            f"rotary table does not match config: {name} has {table.numel()} frequencies, not {expected.numel()}"
        )
    wrong = ((table - expected).abs() <= TABLE_TOLERANCE * expected.abs()).logical_not().nonzero()
    if len(wrong):
        pair = int(wrong[0])
        raise RopextError(
            f"rotary table does not match config: {name} turns pair {pair} by {table[pair]:.6g} radians per token, "
            f"the config gives {expected[pair]:.6g}; reload the checkpoint in float32"
        )


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """No progress bars of transformers, and no reports of what ropext says itself; afterwards as they were."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
