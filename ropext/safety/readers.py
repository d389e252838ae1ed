"""Rules about what readers make of right settings: another layout, a table that moves, half precision, no rotary.

Lengths are in tokens, angles in radians.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ropext.errors import short
from ropext.facts import Facts
from ropext.rope import Plain
from ropext.safety.rule import Case, rule
from ropext.safety.views import (
    LAYOUTS,
    PARTIAL_KEYS,
    THETA_KEYS,
    Block,
    blocks,
    full_attention,
    instead_of_rope,
    text_configs,
)

_OLD_DEFAULT = 10000.0  # theta of transformers 4 where a config states none, in most classes
_HALF = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


@rule("RPX035", "warn", "measured on transformers 5.24 and 4.57: one public case cost 0.765 nats a token")
def new_layout_alone(case: Case) -> Iterator[tuple[str, str]]:
    """A config in the layout of transformers 5 alone is another model in transformers 4.

    save_pretrained of transformers 5 writes rope_parameters and drops rope_theta, rope_scaling and
    partial_rotary_factor beside it. transformers 4 and readers built on it never look there: they load the file without
    a word, with theta 10000 and no scaling. Write the older keys too, equal to the new ones; `ropext patch` writes both
    layouts.
    """
    for inside, holder in text_configs(case.checkpoint.config):
        block = full_attention(holder.get(LAYOUTS[1]))
        if holder.get(LAYOUTS[0]) or not block:
            continue
        lost = [*_lost(block, holder)]
        if lost:
            yield (
                f"transformers 4 reads no {inside}{LAYOUTS[1]}: it would lose {', '.join(lost)} without a word",
                f"Add the same as {', '.join((*THETA_KEYS[:1], LAYOUTS[0]))} beside it, for readers of that layout",
            )


def _lost(block: Mapping[str, Any], holder: Mapping[str, Any]) -> Iterator[str]:
    theta = block.get(THETA_KEYS[0])
    if theta not in (None, _OLD_DEFAULT) and all(holder.get(key) is None for key in THETA_KEYS):
        yield f"theta {short(theta)}"
    kind = block.get("rope_type", block.get("type", "default"))
    if kind != "default":
        yield f"the scaling {short(kind)}"
    share = block.get(PARTIAL_KEYS[0])
    if share not in (None, 1) and all(holder.get(key) is None for key in PARTIAL_KEYS):
        yield f"{PARTIAL_KEYS[0]} {short(share)}"


@rule("RPX032", "warn", "transformers, dynamic_rope_update; measured: cached and uncached logits differ by 7.7e-4")
def table_moves(case: Case) -> Iterator[tuple[str, str]]:
    """dynamic disagrees with its own cache.

    Dynamic NTK takes its base from the longest text read so far. Keys cached before the text grew were turned by
    another base than the queries that meet them, so generation with a cache is not the model that a whole pass scores,
    and one long text changes the next short one. Prefer ntk or yarn, whose table is fixed.
    """
    grows = [block for block in _blocks(case) if block.kind == "dynamic" and block.values.get("factor") != 1]
    if grows:  # HunYuan's has a factor of 1, and a fixed base by alpha
        yield (
            "a table must not move under its cache: dynamic changes its base with the length, so generation with a "
            "cache mixes bases and is not equal to scored numbers",
            "Prefer --method ntk or yarn, whose table is fixed",
        )


@rule("RPX041", "note", "transformers, longrope_frequency_update")
def table_switches(case: Case) -> Iterator[tuple[str, str]]:
    """longrope switches its table at the original length.

    Up to the original length the short list is in force, above it the long one, chosen by the longest row of a batch. A
    text that grows past it during generation keeps cached keys of the short list. Score rows of one length together.
    """
    if any(block.kind in ("longrope", "su") for block in _blocks(case)):
        yield (
            "longrope has one table up to the original length and another beyond, chosen by the longest row of a batch",
            "Batch texts of one side of it together",
        )


def _blocks(case: Case) -> list[Block]:
    """Of the planned config, where there is one."""
    return blocks(case.planned.config if case.planned is not None else case.checkpoint.config)


@rule("RPX033", "warn", "transformers, register_buffer('inv_freq', persistent=False)")
def stored_table(case: Case) -> Iterator[tuple[str, str]]:
    """A rotary table stored beside the weights speaks against the config.

    Old checkpoints hold their frequencies as a tensor named inv_freq, often in half precision. Stock transformers
    ignores it and computes the table in float32, but readers that load it get positions that drift (bfloat16: by
    radians within a few thousand tokens), and after a patch they get the table of before. Remove the tensor where you
    can.
    """
    tables = {name: header for name, header in case.checkpoint.tensors.items() if name.endswith("inv_freq")}
    half = sorted({header.dtype for header in tables.values()} - {"F32", "F64"})
    if tables and (half or case.planned is not None or case.checkpoint.record is not None):
        kind = f"in {', '.join(half)}" if half else "as it was before the patch"
        yield (
            f"a rotary table is computed in float32 from the config: {min(tables)} stores one {kind}",
            "Stock transformers ignores it; for readers that load it, remove the tensor",
        )


@rule(
    "RPX034", "note", "measured on transformers 5.24 and 4.57: model.to(bfloat16) casts inv_freq, from_pretrained not"
)
def half_precision(case: Case) -> Iterator[tuple[str, str]]:
    """Positions need float32, also where the weights are half.

    bfloat16 holds eight bits: whole positions collide from 257 on, and a frequency that is rounded to it makes an error
    that grows with the position. `from_pretrained(dtype=...)` keeps the rotary table in float32; `model.to(bfloat16)`,
    `model.half()` and some trainers cast it.
    """
    config = case.checkpoint.config
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if stored in _HALF and case.known is not None:
        error = phase_error(case.facts, _HALF[stored])
        yield (
            f"weights are {stored}: a rotary table cast to it would be off by {error:.2g} rad at the end of the window",
            f"Load with from_pretrained(dtype='{stored}'), which keeps the table in float32; never model.to({stored})",
        )


def phase_error(facts: Facts, dtype: str) -> float:
    """Radians that the worst pair is off at the last position, where its frequency is rounded to a half type."""
    plain = Plain().frequencies(facts.theta, facts.rotary_dims)
    return max(abs(rounded(frequency, dtype) - frequency) for frequency in plain) * (facts.window - 1)


def rounded(value: float, dtype: str) -> float:
    """The nearest value of a half type, ties to even."""
    if dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + (bits >> 16 & 1)  # bfloat16 is the upper half of a float32
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])


@rule("RPX040", "warn", "measured: gpt2, mpt, bloom and falcon with alibi load such keys without complaint")
def no_rotary_to_scale(case: Case) -> Iterator[tuple[str, str]]:
    """Rope settings do nothing in a model without a rotary embedding.

    Models with learned positions, ALiBi or rotary code of their own load rope keys without complaint and ignore them:
    their context does not grow, and a raised window only fails later. Choose a model whose stock code reads the keys.
    """
    instead = instead_of_rope(case.checkpoint.config)
    scaled = [block for block in blocks(case.checkpoint.config) if block.kind != "default"]
    if instead and scaled:
        yield (
            f"rope settings need a rotary embedding that reads them: {case.checkpoint.config['model_type']} has "
            f"{instead}, so {scaled[0].where} has no effect",
            "Remove it; choose a RoPE model for longer contexts",
        )


@rule("RPX044", "warn", "transformers, get_text_config")
def outside_the_text_config(case: Case) -> Iterator[tuple[str, str]]:
    """In a multimodal config, only text_config speaks to the language model.

    A rope block at the top of a config that has a text_config is loaded without complaint and never read. Put it
    inside.
    """
    config = case.checkpoint.config
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return
    for layout in LAYOUTS:
        block = full_attention(config.get(layout))
        if block.get("rope_type", block.get("type", "default")) != "default" and inner.get(layout) != config[layout]:
            yield (
                f"rope settings of a multimodal model stand in text_config: {layout} at the top has no effect",
                "Move it into text_config if the model was trained with it, else remove it",
            )
