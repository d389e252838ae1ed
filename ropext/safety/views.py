"""A config as the rules read it: every place that states rope settings or a window, whatever is wrong with the values.

Lengths are in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ropext.checkpoint import TensorHeader
from ropext.facts import WINDOW_KEYS
from ropext.families import NOT_EXTENDABLE

LAYOUTS = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5
ORIGINAL = "original_max_position_embeddings"
FULL = "full_attention"  # the layer type that an extension is about
THETA_KEYS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Rope settings that one reader or another takes together."""

    where: str  # dotted, as in config.json
    values: Mapping[str, Any]
    holder: Mapping[str, Any]  # the config that the settings stand in
    inside: str  # dotted prefix of the holder: "" or "text_config."

    @property
    def kind(self) -> object:
        """The rope type, under its new or its old name."""
        return self.values.get("rope_type", self.values.get("type", "default"))

    @property
    def original_length(self) -> object:
        """The length that the formulas start from, in the block or beside it."""
        return self.values.get(ORIGINAL, self.holder.get(ORIGINAL))

    @property
    def original_beside(self) -> object:
        """The same length beside the block; where it is not stated there, the block's own."""
        return self.holder.get(ORIGINAL, self.values.get(ORIGINAL))


def text_configs(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config, and those inside it that describe a language model, each with its dotted prefix."""
    yield "", config
    for key in _TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, dict):
            yield f"{key}.", inner
            deeper = inner.get("text_config")
            if isinstance(deeper, dict):
                yield f"{key}.text_config.", deeper


def blocks(config: Mapping[str, Any]) -> list[Block]:
    """Every block of rope settings; the same settings in both layouts are one block."""
    found = []
    for inside, holder in text_configs(config):
        flat: dict[str, Mapping[str, Any]] = {}
        for layout in LAYOUTS:
            for name, values in _parts(layout, holder.get(layout)):
                flat[name] = values
        scaling, parameters = flat.get(LAYOUTS[0]), flat.get(LAYOUTS[1])
        if scaling and parameters and not differences(scaling, parameters):
            flat = {LAYOUTS[1]: {**parameters, **scaling}}
        found += [
            Block(where=inside + name, values=values, holder=holder, inside=inside) for name, values in flat.items()
        ]
    return found


def _parts(layout: str, block: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A flat block is one part; one nested by layer type has a part for each."""
    if not isinstance(block, dict) or not block:
        return
    nested = {key: value for key, value in block.items() if isinstance(value, dict)}
    if nested:
        yield from ((f"{layout}.{key}", value) for key, value in nested.items() if value)
    else:
        yield layout, block


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys that two blocks both hold, with other values; the two names of the type count as one."""
    one, other = _canonical(one), _canonical(other)
    return [key for key in one if key in other and not same(one[key], other[key])]


def _canonical(block: Mapping[str, Any]) -> dict[str, Any]:
    named = {key: value for key, value in block.items() if key != "type"}
    return named | {"rope_type": block.get("rope_type", block.get("type", "default"))}


def same(one: object, other: object) -> bool:
    """Equality in which NaN equals itself."""
    return one == other or (one != one and other != other)


def number(value: object) -> float | None:
    """A finite number, or None for anything else (text, true, NaN, more digits than a float has)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def windows(holder: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Key and tokens of each window that a config states as a whole number, max_position_embeddings first."""
    values = ((key, holder.get(key)) for key in WINDOW_KEYS)
    return [(key, value) for key, value in values if isinstance(value, int) and number(value) is not None]


def full_attention(block: object) -> Mapping[str, Any]:
    """A flat block, or the part of a nested one that belongs to full attention; empty where there is neither."""
    if not isinstance(block, dict):
        return {}
    inner = block.get(FULL)
    if isinstance(inner, dict):
        return inner
    return {} if any(isinstance(value, dict) for value in block.values()) else block


def instead_of_rope(config: Mapping[str, Any]) -> str | None:
    """What a model type has in place of a rotary embedding that reads rope keys, in words; None where it has one."""
    model_type = config.get("model_type")
    if model_type == "falcon" and config.get("alibi"):
        return "ALiBi"
    return NOT_EXTENDABLE.get(model_type) if isinstance(model_type, str) else None


def learned_tables(tensors: Mapping[str, TensorHeader]) -> dict[str, int]:
    """Rows of each table of learned positions, by tensor name; OPT and its kin keep two rows aside."""
    names = ("wpe.weight", "position_embeddings.weight", "embed_positions.weight")
    return {name: header.shape[0] for name, header in tensors.items() if name.endswith(names) and header.shape}


def pairs(holder: Mapping[str, Any], partial: object = None) -> int | None:
    """Rotated pairs of a head, where the config tells: half of its rotary dimensions."""
    dims = number(holder.get("qk_rope_head_dim") or holder.get("head_dim"))
    hidden, heads = number(holder.get("hidden_size")), number(holder.get("num_attention_heads"))
    if dims is None and hidden and heads:
        dims = hidden // heads
    shares = [partial, *(holder.get(key) for key in PARTIAL_KEYS)]
    share = number(next((value for value in shares if value is not None), 1.0))
    return None if dims is None or share is None else int(dims * share) // 2
