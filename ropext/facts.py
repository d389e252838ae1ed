"""What is true of a checkpoint's positions: theta, rotary dimensions, native length, scaling in force.

Of the model types that ropext knows, read from the config alone, by the rules of transformers 5: `rope_scaling` wins
over `rope_parameters`, which wins over the keys beside them. Of any other, what the config leaves open is read from
stock transformers: the settings as it standardises them, and the tables that it computes. Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ropext.checkpoint import Checkpoint
from ropext.errors import Refused, RopextError, short
from ropext.families import (
    DEFAULT_PARTIAL,
    DEFAULT_SLIDING_WINDOW,
    DEFAULT_THETA,
    FLAT_BESIDE_NESTED,
    NEEDS_HEAD_DIM,
    NOT_EXTENDABLE,
    PARTIAL_NAMES,
    PROVEN,
    ROPE_IN_SLIDING_LAYERS,
    SLIDING_ONLY_IF_ASKED,
    THETA_NAMES,
    WITHOUT_ATTENTION,
)
from ropext.lengths import LONGEST
from ropext.stock import TEXT, StockReading, Table, read_stock

# Keys that hold a context window in one family or another; none of them is ever raised alone.
WINDOW_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length")
PLAIN_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
MROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})  # which pairs turn by image row and column; carried over
SCALED_TYPES = frozenset({"linear", "dynamic", "yarn", "longrope", "llama3"})
PLAIN_TYPES = frozenset({"default", "mrope"})
FLOAT32_MAX = 3.4e38  # readers compute their tables in float32; a larger theta is infinite there
NO_LIMIT = 10**9  # tokens; a tokenizer's model_max_length above it means "not stated"
TOLERANCE = 1e-5  # relative; float32 pow differs from float64 by a few 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The positions of one checkpoint."""

    model_type: str  # of the language model, where a multimodal config holds one
    theta: float  # base of the rotary frequencies, in force
    rotary_dims: int  # dimensions of a head that are rotated, even
    partial_rotary_factor: float | None  # rotary_dims / head_dim where the config states it
    window: int  # tokens, max_position_embeddings
    native_length: int  # tokens seen in training, as far as the files tell
    tokenizer_length: int | None  # tokens, model_max_length where it states a limit
    scaling: Mapping[str, Any] | None  # the scaling block in force; None for plain rope
    rope_extras: tuple[str, ...]  # settings beside those of plain rope, where there is no scaling
    sliding_window: int | None  # tokens, where no rotary layer attends further
    section: str | None = None  # key of the config inside config.json that holds the positions
    mrope: Mapping[str, Any] = field(default_factory=dict)  # settings of M-RoPE, which stay as they are
    layer_type: str | None = None  # of the layers that are extended, where rope settings are nested by layer type
    other_layers: Mapping[str, Any] = field(default_factory=dict)  # settings of the other layer types, which stay
    kept_tables: tuple[Table, ...] = ()  # of modules and layers that an extension must not touch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rope:
    """The rotary embedding that is to be extended."""

    block: Mapping[str, Any]  # its settings in force
    theta: float
    rotary_dims: int
    partial: float | None
    sliding_window: int | None
    layer_type: str | None = None
    other_layers: Mapping[str, Any] = field(default_factory=dict)
    kept_tables: tuple[Table, ...] = ()


def read_facts(checkpoint: Checkpoint, *, stock: bool = True) -> Facts:
    """Facts of a checkpoint. Raises Refused where the config leaves one open or contradicts itself.

    Without `stock`, transformers is asked nothing (and torch not imported), whatever the model type.
    """
    config = checkpoint.config
    own = positions_of(config)
    section = None if own is config else TEXT
    model_type = _model_type(own if section and own.get("model_type") else config)
    _refuse_what_has_no_rope(config, own, model_type)
    known = model_type in PROVEN and section is None
    if not stock and (section or (not known and _is_nested(own))):
        raise Refused(
            f"the rotary table of a model type must be proved: this {model_type} config is read by stock transformers "
            "alone. Leave out --no-verify"
        )
    rope = _from_stock(config, own, model_type) if stock and not known else _from_config(own, model_type)
    window = _whole(own, "max_position_embeddings")
    plain = _rope_type(rope.block) in PLAIN_TYPES
    return Facts(
        model_type=model_type,
        theta=rope.theta,
        rotary_dims=rope.rotary_dims,
        partial_rotary_factor=rope.partial,
        window=window,
        native_length=_native_length(checkpoint, window),
        tokenizer_length=_tokenizer_length(checkpoint.tokenizer_config),
        scaling=None if plain else rope.block,
        rope_extras=tuple(sorted(rope.block.keys() - PLAIN_ROPE_KEYS - MROPE_KEYS)) if plain else (),
        sliding_window=rope.sliding_window,
        section=section,
        mrope={key: value for key, value in rope.block.items() if key in MROPE_KEYS},
        layer_type=rope.layer_type,
        other_layers=rope.other_layers,
        kept_tables=rope.kept_tables,
    )


def positions_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that holds the positions: the language model's, in a multimodal one."""
    text = config.get(TEXT)
    return text if isinstance(text, dict) else config


def _refuse_what_has_no_rope(config: Mapping[str, Any], own: Mapping[str, Any], model_type: str) -> None:
    """Raises Refused for what a rope key cannot extend, before anything else about the config is asked."""
    outer = _model_type(config)
    for name in (outer, model_type):
        instead = "ALiBi" if name == "falcon" and config.get("alibi") else NOT_EXTENDABLE.get(name)
        if instead:
            raise Refused(
                f"only a rotary embedding that reads rope keys can be extended: {name} has {instead}. "
                "Choose a RoPE model (llama, mistral, qwen, ...)"
            )
    if config.get("auto_map") and outer not in PROVEN:
        raise Refused(
            f"code from a checkpoint is never run: {outer} brings its own (auto_map), so its rotary table cannot "
            "be proved. Use a model type that transformers knows"
        )
    raised = [key for key in WINDOW_KEYS[1:] if key in own and "max_position_embeddings" not in own]
    if raised:
        raise Refused(
            f"the window must be max_position_embeddings: {model_type} has {raised[0]}, which rope scaling in stock "
            "transformers does not read"
        )


def _from_config(own: Mapping[str, Any], model_type: str) -> _Rope:
    """By the rules of transformers 5, and the defaults of the known model types."""
    block = rope_block(own)
    partial = _partial_rotary_factor(own, model_type, block)
    kinds = own.get("layer_types")
    return _Rope(
        block=block,
        theta=_theta(own, model_type, block),
        rotary_dims=_rotary_dims(own, partial),
        partial=partial,
        sliding_window=_reach(_sliding_window(own, model_type), kinds if isinstance(kinds, list) else (), model_type),
    )


def _from_stock(config: Mapping[str, Any], own: Mapping[str, Any], model_type: str) -> _Rope:
    """What stock transformers makes of the config. The tables it computes must be those of the settings it reports."""
    if not _is_nested(own):
        rope_block(own)  # refuses layouts that disagree, of which stock transformers would take one
    reading = _read(config, own, model_type)
    layer_type, block = _extended_block(reading, model_type)
    _check_rope_type(block, model_type)
    flat = layer_type is None or model_type in FLAT_BESIDE_NESTED
    theta = _theta(own if flat else {}, model_type, block)
    extended, kept = _split(reading, model_type, layer_type, theta, block)
    return _Rope(
        block=block,
        theta=theta,
        rotary_dims=2 * len(extended[0].frequencies),
        partial=block.get("partial_rotary_factor"),
        sliding_window=_reach(reading.sliding_window, reading.layer_types, model_type),
        layer_type=layer_type,
        other_layers={key: value for key, value in reading.rope.items() if key != layer_type} if layer_type else {},
        kept_tables=kept,
    )


def _read(config: Mapping[str, Any], own: Mapping[str, Any], model_type: str) -> StockReading:
    completed = {**own, **missing_head_dim(own, model_type, "default")}
    try:
        return read_stock(completed if own is config else {**config, TEXT: completed})
    except RopextError as error:
        raise Refused(f"{error}. Without it, the rotary table of this {model_type} cannot be proved") from error


def missing_head_dim(own: Mapping[str, Any], model_type: str, rope_type: str) -> dict[str, int]:
    """The head_dim to state for a model type whose stock code fails without it; empty where none is needed."""
    if own.get("head_dim") is not None or rope_type not in NEEDS_HEAD_DIM.get(model_type, ()):
        return {}
    return {"head_dim": _whole(own, "hidden_size") // _whole(own, "num_attention_heads")}


def _is_nested(own: Mapping[str, Any]) -> bool:
    """Whether rope settings are kept by layer type."""
    block = own.get("rope_parameters")
    return isinstance(block, dict) and any(isinstance(value, dict) for value in block.values())


def _extended_block(reading: StockReading, model_type: str) -> tuple[str | None, dict[str, Any]]:
    """Layer type (None where settings are not nested) and settings of the layers that an extension is about."""
    rope = dict(reading.rope)
    if not any(isinstance(value, dict) for value in rope.values()):
        return None, rope
    full = {key: value for key, value in rope.items() if "sliding" not in key}
    if len(full) != 1:
        raise Refused(
            f"one kind of layers must see the whole context: {model_type} keeps tables for {short(sorted(full))}, and "
            "which of them to extend is not known"
        )
    ((layer_type, block),) = full.items()
    if not isinstance(block, dict):
        raise Refused(
            f"only rotary layers can be extended: the {layer_type} layers of this {model_type} have no position "
            "embedding, and its sliding layers see no further than their window. It needs no patch"
        )
    return layer_type, dict(block)


def _split(
    reading: StockReading, model_type: str, layer_type: str | None, theta: float, block: Mapping[str, Any]
) -> tuple[list[Table], tuple[Table, ...]]:
    """Tables that an extension changes, and those that it must leave alone. Plain rope is recognised by its numbers."""
    if not reading.tables:
        raise Refused(
            f"only a rotary embedding can be extended: {reading.reader} builds none for this {model_type} config"
        )
    candidates = [table for table in reading.tables if table.of_text and table.layer_type == layer_type]
    if layer_type and not candidates:
        raise Refused(
            f"one kind of layers must see the whole context: this {model_type} config has no {layer_type} layers, and "
            "the others see no further than their window"
        )
    scaled = _rope_type(block) in SCALED_TYPES
    extended = [table for table in candidates if scaled or _is_plain(table, theta)]
    if not extended:
        found = len(candidates[0].frequencies) if candidates else 0
        if found and _is_plain(candidates[0], theta, 2 * found - 1):
            raise Refused(
                f"rotary dimensions come in pairs: this {model_type} config rotates {2 * found - 1} of a head"
            )
        raise Refused(
            f"only plain rope can be extended: the table that {reading.reader} builds for this {model_type} is not "
            f"the one of theta {theta:g} and {2 * found} rotary dimensions"
        )
    return extended, tuple(table for table in reading.tables if table not in extended)


def _is_plain(table: Table, theta: float, dims: int | None = None) -> bool:
    pairs = len(table.frequencies)
    plain = [theta ** (-2 * pair / (dims or 2 * pairs)) for pair in range(pairs)]
    return all(abs(f - p) <= TOLERANCE * p for f, p in zip(table.frequencies, plain, strict=True))


def _check_rope_type(block: Mapping[str, Any], model_type: str) -> None:
    rope_type = _rope_type(block)
    if rope_type not in SCALED_TYPES | PLAIN_TYPES:
        raise Refused(
            f"only plain rope can be extended: {model_type} has rope_type {short(rope_type)}, which turns its pairs in "
            "another way"
        )


def _rope_type(block: Mapping[str, Any]) -> str:
    return str(block.get("rope_type", block.get("type", "default")))  # text: a list there has no hash


def rope_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings in force as one flat dict. Raises Refused where the two layouts disagree."""
    blocks = {}
    for key in ("rope_scaling", "rope_parameters"):
        block = {} if config.get(key) is None else config[key]
        if not isinstance(block, dict):
            raise Refused(f"{key} is an object or null: config.json has {short(block)}")
        if any(isinstance(value, dict) for value in block.values()):
            raise Refused(f"only flat rope settings are known of this model type: {key} has {short(sorted(block))}")
        if {"type", "rope_type"} <= block.keys() and block["rope_type"] != block["type"]:
            raise Refused(
                f"type is the old name of rope_type, transformers 4 obeys it: {key} has {short(block['type'])} against "
                f"{short(block['rope_type'])}. Keep the one that the model was trained with"
            )
        blocks[key] = block
    scaling, parameters = blocks["rope_scaling"], blocks["rope_parameters"]
    if scaling and parameters:
        for key, value in _canonical(scaling).items():
            if _canonical(parameters).get(key, value) != value:
                raise Refused(
                    f"rope_scaling and rope_parameters must agree: {key} is {short(value)} in one and "
                    f"{short(_canonical(parameters)[key])} in the other. Keep the one that the model was trained with"
                )
    return parameters | scaling


def _canonical(block: Mapping[str, Any]) -> dict[str, Any]:
    named = {key: value for key, value in block.items() if key != "type"}
    return named | {"rope_type": block.get("rope_type", block.get("type", "default"))}


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise Refused(f"config.json must name its model_type: found {short(model_type)}")
    return model_type


def _theta(config: Mapping[str, Any], model_type: str, block: Mapping[str, Any]) -> float:
    names = dict.fromkeys(("rope_theta", THETA_NAMES.get(model_type, "rope_theta")))
    stated = [value for value in (block.get("rope_theta"), *map(config.get, names)) if value is not None]
    theta, *others = stated or [DEFAULT_THETA.get(model_type)]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 < theta <= FLOAT32_MAX:
        raise Refused(f"rope_theta must be a number above 1: config.json of this {model_type} gives {short(theta)}")
    for other in others:
        if other != theta:
            raise Refused(
                f"theta must be the same wherever it stands: found {short(theta)} and {short(other)}. "
                "Keep the one that the model was trained with"
            )
    return float(theta)


def _partial_rotary_factor(config: Mapping[str, Any], model_type: str, block: Mapping[str, Any]) -> float | None:
    name = PARTIAL_NAMES.get(model_type, "partial_rotary_factor")
    partial = block.get("partial_rotary_factor", config.get(name, DEFAULT_PARTIAL.get(model_type)))
    if partial is None:
        return None
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise Refused(f"{name} must lie between 0 and 1: config.json has {short(partial)}")
    return float(partial)


def _rotary_dims(config: Mapping[str, Any], partial: float | None) -> int:
    if config.get("head_dim") is None:
        head_dim = _whole(config, "hidden_size") // _whole(config, "num_attention_heads")
    else:
        head_dim = _whole(config, "head_dim")
    dims = int(head_dim * (1.0 if partial is None else partial))
    if dims < 4 or dims % 2:
        raise Refused(f"at least two pairs of a head must rotate: this config rotates {dims} of {head_dim} dimensions")
    return dims


def _native_length(checkpoint: Checkpoint, window: int) -> int:
    """The trained length: what ropext recorded, else the window that the config states."""
    recorded = (checkpoint.record or {}).get("native_length", window)
    if isinstance(recorded, bool) or not isinstance(recorded, int) or recorded < 1:
        raise Refused(f"native_length in ropext.json must be a whole number: found {recorded!r}")
    return recorded


def _tokenizer_length(tokenizer_config: Mapping[str, Any]) -> int | None:
    length = tokenizer_config.get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, int | float) or not 0 < length < NO_LIMIT:
        return None
    return int(length)


def _sliding_window(config: Mapping[str, Any], model_type: str) -> int | None:
    window = config.get("sliding_window", DEFAULT_SLIDING_WINDOW.get(model_type))
    used = config.get("use_sliding_window", model_type not in SLIDING_ONLY_IF_ASKED)
    return window if used and isinstance(window, int) and not isinstance(window, bool) else None


def _reach(window: int | None, layer_types: Sequence[str], model_type: str) -> int | None:
    """The sliding window where no rotary layer sees further; None where one does."""
    attention = [kind for kind in map(str, layer_types) if kind not in WITHOUT_ATTENTION]
    sliding = [kind for kind in attention if "sliding" in kind or "chunked" in kind]
    everywhere = len(sliding) == len(attention) or (bool(sliding) and model_type in ROPE_IN_SLIDING_LAYERS)
    return window if everywhere else None


def _whole(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LONGEST:
        raise Refused(f"{key} must be a whole number from 1 to {LONGEST}: config.json has {short(value)}")
    return value
