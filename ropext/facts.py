"""What is true of a checkpoint's positions: theta, rotary dimensions, native length, scaling in force.

Read from the config alone, by the rules of transformers 5: `rope_scaling` wins over `rope_parameters`, which wins over
the keys beside them. Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ropext.checkpoint import Checkpoint
from ropext.errors import Refused
from ropext.lengths import LONGEST

Scheme = Literal["rope", "learned", "alibi", "none"]

# Model types whose stock code reads the keys that ropext writes; any other needs verification to prove it.
PROVEN = frozenset({"llama", "mistral", "qwen2", "qwen3", "gpt_neox"})
# Older names of theta and of the rotated share of a head, by model type.
THETA_NAMES = {"gpt_neox": "rotary_emb_base"}
PARTIAL_NAMES = {"gpt_neox": "rotary_pct"}
# What transformers takes where the config is silent.
DEFAULT_THETA = dict.fromkeys(PROVEN, 10000.0)
DEFAULT_PARTIAL = {"gpt_neox": 0.25}
DEFAULT_SLIDING_WINDOW = {"mistral": 4096}
SLIDING_ONLY_IF_ASKED = frozenset({"qwen2", "qwen3"})  # sliding_window counts where use_sliding_window is true
# Model types without a rotary embedding, and what they have instead.
OTHER_SCHEMES: Mapping[str, Scheme] = {
    **dict.fromkeys(
        ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "xglm", "biogpt", "openai-gpt", "bert", "roberta"), "learned"
    ),
    **dict.fromkeys(("bloom", "mpt"), "alibi"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), "none"),
}
# Keys that hold a context window in one family or another; none of them is ever raised alone.
WINDOW_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length")
PLAIN_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
FLOAT32_MAX = 3.4e38  # readers compute their tables in float32; a larger theta is infinite there
NO_LIMIT = 10**9  # tokens; a tokenizer's model_max_length above it means "not stated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The positions of one checkpoint."""

    model_type: str
    scheme: Scheme
    theta: float  # base of the rotary frequencies, in force
    rotary_dims: int  # dimensions of a head that are rotated, even
    partial_rotary_factor: float | None  # rotary_dims / head_dim where the config states it
    window: int  # tokens, max_position_embeddings
    native_length: int  # tokens seen in training, as far as the files tell
    tokenizer_length: int | None  # tokens, model_max_length where it states a limit
    scaling: Mapping[str, Any] | None  # the scaling block in force; None for plain rope
    rope_extras: tuple[str, ...]  # settings beside those of plain rope, where there is no scaling
    sliding_window: int | None  # tokens, where layers attend no further


def read_facts(checkpoint: Checkpoint) -> Facts:
    """Facts of a checkpoint. Raises Refused where the config leaves one open or contradicts itself."""
    config = checkpoint.config
    model_type = _model_type(config)
    _refuse_what_is_not_built(config, model_type)
    scheme = _scheme(config, model_type)
    if scheme != "rope":
        raise Refused(
            f"only a rotary embedding can be extended: {model_type} has {_SCHEME_WORDS[scheme]}. "
            "Choose a RoPE model (llama, mistral, qwen, ...)"
        )
    block = rope_block(config)
    window = _whole(config, "max_position_embeddings")
    partial = _partial_rotary_factor(config, model_type, block)
    rope_type = block.get("rope_type", block.get("type", "default"))
    return Facts(
        model_type=model_type,
        scheme=scheme,
        theta=_theta(config, model_type, block),
        rotary_dims=_rotary_dims(config, partial),
        partial_rotary_factor=partial,
        window=window,
        native_length=_native_length(checkpoint, window),
        tokenizer_length=_tokenizer_length(checkpoint.tokenizer_config),
        scaling=None if rope_type == "default" else block,
        rope_extras=tuple(sorted(block.keys() - PLAIN_ROPE_KEYS)) if rope_type == "default" else (),
        sliding_window=_sliding_window(config, model_type),
    )


_SCHEME_WORDS = {"learned": "learned positions", "alibi": "ALiBi", "none": "no position embedding"}


def rope_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings in force as one flat dict. Raises Refused where the two layouts disagree."""
    blocks = {}
    for key in ("rope_scaling", "rope_parameters"):
        block = {} if config.get(key) is None else config[key]
        if not isinstance(block, dict):
            raise Refused(f"{key} is an object or null: config.json has {short(block)}")
        if any(isinstance(value, dict) for value in block.values()):
            raise Refused(f"{key} nested by layer type is not built yet: config.json has {short(sorted(block))}")
        if "type" in block and block.get("rope_type", block["type"]) != block["type"]:
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


def _refuse_what_is_not_built(config: Mapping[str, Any], model_type: str) -> None:
    if "text_config" in config:
        raise Refused(f"multimodal configs are not built yet: {model_type} keeps its positions in text_config")
    if config.get("auto_map") and model_type not in PROVEN:
        raise Refused(
            f"code from a checkpoint is never run: {model_type} brings its own (auto_map), so its rotary table cannot "
            "be proved. Use a model type that transformers knows"
        )
    raised = [key for key in WINDOW_KEYS[1:] if key in config and "max_position_embeddings" not in config]
    if raised and model_type not in OTHER_SCHEMES:
        raise Refused(
            f"the window must be max_position_embeddings: {model_type} has {raised[0]}, which is not built yet"
        )


def _scheme(config: Mapping[str, Any], model_type: str) -> Scheme:
    if model_type == "falcon" and config.get("alibi"):
        return "alibi"
    return OTHER_SCHEMES.get(model_type, "rope")


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


def _whole(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LONGEST:
        raise Refused(f"{key} must be a whole number from 1 to {LONGEST}: config.json has {short(value)}")
    return value


def short(value: object) -> str:
    """A value for a message of one line, however long it is in the file."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of more than 4300 digits
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."
