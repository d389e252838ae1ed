"""Rules about rope settings as they stand in config.json: values, names, types, and places that contradict each other.

Each looks at the raw config, so that it works where the facts of a checkpoint cannot be told. Lengths are in tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from ropext.carried import NO_EFFECT
from ropext.errors import short
from ropext.facts import FLOAT32_MAX, WINDOW_KEYS
from ropext.safety.rule import Case, rule
from ropext.safety.views import (
    LAYOUTS,
    ORIGINAL,
    PARTIAL_KEYS,
    THETA_KEYS,
    Block,
    blocks,
    differences,
    full_attention,
    number,
    pairs,
    same,
    text_configs,
)

_READER = "transformers 5.24 and 4.57, modeling_rope_utils.py"
STOCK_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# Types of single families: M-RoPE is plain rope with sections, su is Phi-3's first name of longrope, Gemma 4 and the
# vision towers have the last two.
FAMILY_TYPES = ("mrope", "su", "proportional", "axial")
NEEDS_FACTOR = ("linear", "dynamic", "yarn", "llama3")
LISTS = ("short_factor", "long_factor")
# What stock code of some family reads from a block.
READ_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", ORIGINAL, "partial_rotary_factor", *LISTS),
        *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
        *("low_freq_factor", "high_freq_factor", "mrope_section", "mrope_interleaved", "alpha"),
        *("short_mscale", "long_mscale", "llama_4_scaling_beta"),
    }
)
# Names found in public configs for what stock code reads under another name.
MISSPELT: Mapping[str, str | None] = {
    **NO_EFFECT,
    "base": "rope_theta",
    "theta": "rope_theta",
    "scale": "factor",
    "scaling_factor": "factor",
    "original_length": ORIGINAL,
    "original_max_seq_len": ORIGINAL,
}


@rule("RPX022", "refuse", f"{_READER}; each reader obeys another of the places")
def contradictions(case: Case) -> Iterator[tuple[str, str]]:
    """Settings that stand in two places are the same in both.

    Configs carry rope settings in an old and a new layout (rope_theta and rope_scaling, rope_parameters), and the type
    under an old and a new name. Readers differ in which one they obey: transformers 5 lets rope_scaling win,
    transformers 4 never reads rope_parameters and obeys `type`. Where the places disagree, two readers run two models.
    Keep the values that the model was trained with, and remove the others.
    """
    for where, one, other in _contradictions(case.checkpoint.config):
        yield (
            f"what stands in two places must be the same in both: {where} is {short(one)} and {short(other)}",
            "Keep the one that the model was trained with",
        )


def _contradictions(config: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    for block in blocks(config):
        old, new = block.values.get("type"), block.values.get("rope_type")
        if old is not None and new is not None and old != new:
            yield f"type and rope_type of {block.where}", old, new
        if ORIGINAL in block.values and not same(block.values[ORIGINAL], block.original_beside):
            yield f"{ORIGINAL} in {block.where} and beside it", block.values[ORIGINAL], block.original_beside
    for inside, holder in text_configs(config):
        yield from _between_layouts(inside, holder)
        for keys in (THETA_KEYS, PARTIAL_KEYS):
            first, *others = _stated(inside, holder, keys) or [("", None)]
            for place, value in others:
                if not same(value, first[1]):
                    yield f"{first[0]} and {place}", first[1], value


def _between_layouts(inside: str, holder: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    scaling, parameters = holder.get(LAYOUTS[0]), full_attention(holder.get(LAYOUTS[1]))
    if isinstance(scaling, dict) and scaling and parameters:
        for key in differences(scaling, parameters):
            yield f"{key} of {inside}{LAYOUTS[0]} and {LAYOUTS[1]}", scaling.get(key), parameters.get(key)


def _stated(inside: str, holder: Mapping[str, Any], keys: tuple[str, ...]) -> list[tuple[str, object]]:
    """Every place of one setting: beside the blocks under its names, and in the block of the new layout."""
    places = [(inside + key, holder.get(key)) for key in keys]
    places.append((f"{inside}{LAYOUTS[1]}.{keys[0]}", full_attention(holder.get(LAYOUTS[1])).get(keys[0])))
    return [(place, value) for place, value in places if value is not None]


@rule("RPX023", "refuse", f"{_READER}; measured: 0.25 stretches every angle by 4, NaN makes the whole table NaN")
def unusable_values(case: Case) -> Iterator[tuple[str, str]]:
    """Every rope setting is a number that a table can be computed from.

    Readers check little: a factor below 1 only logs a line and turns every pair faster, NaN makes the whole table NaN,
    a number in quotes passes the load and fails when the model is built. Correct the value by hand, from the checkpoint
    that this one was made of.
    """
    for where, value, wanted in _unusable(case.checkpoint.config):
        yield f"{where} must be {wanted}: config.json has {short(value)}", "Correct it from the original checkpoint"


def _unusable(config: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    for inside, holder in text_configs(config):
        for layout in LAYOUTS:
            if holder.get(layout) is not None and not isinstance(holder[layout], dict):
                yield inside + layout, holder[layout], "an object or null"
        for key in (*WINDOW_KEYS, ORIGINAL, *THETA_KEYS, *PARTIAL_KEYS):
            if wanted := _problem(key, holder.get(key)):
                yield inside + key, holder[key], wanted
    for block in blocks(config):
        for key, value in block.values.items():
            if wanted := _problem(key, value):
                yield f"{key} of {block.where}", value, wanted
        if block.kind in NEEDS_FACTOR and block.values.get("factor") is None:
            yield f"factor of {block.where}", None, f"given for {block.kind}"


def _problem(key: str, value: object) -> str | None:
    """What a setting should have been; None where it is that, or is left to its default."""
    if value is None:
        return None
    found = number(value)
    if key in WINDOW_KEYS or key == ORIGINAL:
        whole = found is not None and found >= 1 and found == int(found)
        return None if whole and (key == ORIGINAL or isinstance(value, int)) else "a whole number above 0"
    if key in THETA_KEYS:
        return None if found is not None and 1 < found <= FLOAT32_MAX else "a finite number above 1"
    if key == "factor":
        return None if found is not None and found >= 1 else "a finite number from 1 up"
    if key in PARTIAL_KEYS:
        return None if found is not None and 0 < found <= 1 else "a number above 0, up to 1"
    if key in ("mscale", "mscale_all_dim"):
        return None if found is not None and found >= 0 else "a finite number from 0 up"
    if key in ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "alpha"):
        return None if found is not None and found > 0 else "a finite number above 0"
    if key in LISTS:
        entries = [number(entry) for entry in value] if isinstance(value, list) else [None]
        return None if all(entry is not None and entry > 0 for entry in entries) else "a list of numbers above 0"
    return None


@rule("RPX024", "refuse", "Ding et al. 2024, arXiv:2402.13753; transformers, _compute_longrope_parameters")
def list_lengths(case: Case) -> Iterator[tuple[str, str]]:
    """longrope has one number a pair in each of its two lists.

    The lists divide the frequencies pair by pair, so each needs half as many entries as the model has rotary dimensions
    (with a partial rotary embedding fewer than half of the head's). Lists searched for another model fail when the
    model is built, or stretch the wrong pairs. Take the lists that belong to this model.
    """
    for block in blocks(case.checkpoint.config):
        if block.kind not in ("longrope", "su"):
            continue
        wanted = pairs(block.holder, block.values.get("partial_rotary_factor"))
        for key in LISTS:
            found = block.values.get(key)
            if found is None or (isinstance(found, list) and wanted is not None and len(found) != wanted):
                has = "none" if found is None else f"{len(found)} entries"
                yield (
                    f"{key} of {block.where} needs one number for each of {wanted or 'the'} rotated pairs: it has "
                    f"{has}",
                    "Take the lists that were made for this model",
                )


@rule("RPX025", "warn", f"{_READER}, _check_received_keys")
def misspelt_keys(case: Case) -> Iterator[tuple[str, str]]:
    """Keys that no stock code reads have no effect.

    A setting under a name that a reader does not know is at most logged, and the default is used in its place;
    `attn_factor` for `attention_factor` is the usual one. ropext never renames it: giving it its right name changes
    what the model computes, and whoever trained the model did so without it.
    """
    if case.checkpoint.config.get("auto_map"):
        return  # its own code may read other keys
    for block in blocks(case.checkpoint.config):
        for key in sorted(block.values.keys() - READ_KEYS):
            close = [*difflib.get_close_matches(key, READ_KEYS, 1, 0.8), None]
            near = MISSPELT.get(key, close[0])
            yield (
                f"{short(key)} in {block.where} has no effect in transformers",
                f"{near} would; use it only if the model was trained with it" if near else "Leave it out",
            )


@rule("RPX026", "refuse", f"{_READER}, ROPE_INIT_FUNCTIONS; measured: config loads with a log line, the model does not")
def unknown_type(case: Case) -> Iterator[tuple[str, str]]:
    """The rope type is one that stock code knows.

    A config of an unknown type loads, and building the model then fails. Static NTK is the usual case: transformers has
    no type `ntk`, the method is plain rope with a larger theta, which is what `ropext patch --method ntk` writes. A
    block with a factor but no type is read as plain rope, and its factor is ignored.
    """
    if case.checkpoint.config.get("auto_map"):
        return  # its own code may know other types
    for block in blocks(case.checkpoint.config):
        if block.kind not in STOCK_TYPES + FAMILY_TYPES:
            yield (
                f"a rope type must be one that stock code knows: {block.where} has {short(block.kind)}",
                "Remove the block and use `ropext patch`" + (" --method ntk" if block.kind == "ntk" else ""),
            )
        elif "rope_type" not in block.values and "type" not in block.values and "factor" in block.values:
            yield (
                f"a rope type must be stated: {block.where} has factor {short(block.values['factor'])} and no type",
                "Add the rope_type that the model was trained with, or remove the block",
            )


@rule("RPX027", "refuse", "Grattafiori et al. 2024, arXiv:2407.21783; transformers, _compute_llama3_parameters")
def llama3_bands(case: Case) -> Iterator[tuple[str, str]]:
    """llama3 has two band edges, the high one above the low one, and an original length below the window.

    Wavelengths below original / high_freq_factor are kept, those above original / low_freq_factor are divided, and
    those between are blended. Missing edges fail when the model is built; edges in the wrong order, or an original
    length as long as the window, only log a line and give a wrong table. Restore the numbers that the model was trained
    with.
    """
    for block in blocks(case.checkpoint.config):
        if block.kind == "llama3" and (problem := _band_problem(block)):
            yield f"{block.where}: {problem}", "Restore the numbers that the model was trained with"


def _band_problem(block: Block) -> str | None:
    low, high = (number(block.values.get(key)) for key in ("low_freq_factor", "high_freq_factor"))
    original, window = number(block.original_length), number(block.holder.get(WINDOW_KEYS[0]))
    if low is None or high is None:
        missing = "low_freq_factor" if low is None else "high_freq_factor"
        return f"llama3 needs {missing}, it is {short(block.values.get(missing))}"
    if high <= low:
        return f"llama3 needs high_freq_factor above low_freq_factor, they are {high:g} and {low:g}"
    if original is not None and window is not None and original >= window:
        return f"llama3 needs an original length below the window, they are {original:g} and {window:g}"
    return None
