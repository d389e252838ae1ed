"""Rules about the window: was it raised without the rotary embedding, and do all the places that state it agree?

Lengths are in tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ropext.checkpoint import CONFIG, TOKENIZER_CONFIG, Checkpoint
from ropext.errors import short
from ropext.facts import NO_LIMIT, WINDOW_KEYS
from ropext.safety.rule import Case, rule
from ropext.safety.views import (
    LAYOUTS,
    ORIGINAL,
    PARTIAL_KEYS,
    THETA_KEYS,
    Block,
    blocks,
    instead_of_rope,
    learned_tables,
    number,
    text_configs,
    windows,
)

_PI = "Chen et al. 2023, arXiv:2306.15595, section 2.2: extrapolation fails at once"
_SLACK = 1.01  # a target length is a whole number, so window / original length is the factor but for rounding


@rule("RPX001", "refuse", _PI)
def raw_window_edit(case: Case) -> Iterator[tuple[str, str]]:
    """The window of a checkpoint that ropext wrote is not changed by hand.

    ropext.json records the window that was written together with its rotary embedding. A window raised afterwards, in
    whatever key of the config or in the tokenizer, lets the model read positions at angles that it never saw, and its
    perplexity explodes there. Set it back, or patch the source again with the factor that the longer window needs.
    """
    for place, found, written in _edited_windows(case.checkpoint):
        yield (
            f"a window must not be changed without its rotary embedding, positions that the model never saw "
            f"ruin it: {place} is {short(found)}, ropext.json wrote {short(written)}",
            "Set it back, then `ropext patch MODEL --method ntk --factor F`",
        )


def _edited_windows(checkpoint: Checkpoint) -> Iterator[tuple[str, object, object]]:
    """Place, value found and value written of each window that is another one than ropext wrote."""
    if checkpoint.record is None:
        return
    window, written = checkpoint.record["window"], written_config(checkpoint.record)
    if written is None:
        found = next((value for _, holder in text_configs(checkpoint.config) for _, value in windows(holder)), None)
        if found != window:
            yield WINDOW_KEYS[0], found, window
    else:
        yield from _edited(checkpoint.config, written, WINDOW_KEYS)
    limit = _tokenizer_limit(checkpoint)
    served = _served(checkpoint.record)
    if TOKENIZER_CONFIG in checkpoint.record.get("original_files", {}) and limit is not None and limit > served:
        yield f"model_max_length of {TOKENIZER_CONFIG}", limit, served


def _served(record: Mapping[str, Any]) -> int:
    """Tokens that a written checkpoint serves: its window, or the target of dynamic, whose window stays as it was."""
    target = record["rope"].get("target_length")
    return target if isinstance(target, int) and target > record["window"] else int(record["window"])


def written_config(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config as a patch wrote it: the original with the recorded changes. None where the record does not tell."""
    changes, originals = record.get("config_changes"), record.get("original_files")
    if not isinstance(changes, dict) or not isinstance(originals, dict):
        return None
    try:
        original = json.loads(originals[CONFIG])
        return {**original, **{key: after for key, (_, after) in changes.items()}}
    except (LookupError, TypeError, ValueError, RecursionError):
        return None


def _edited(
    config: Mapping[str, Any], written: Mapping[str, Any], keys: tuple[str, ...]
) -> Iterator[tuple[str, object, object]]:
    found = dict(text_configs(config))
    for inside, holder in text_configs(written):
        for key in keys:
            if found.get(inside, {}).get(key) != holder.get(key):
                yield inside + key, found.get(inside, {}).get(key), holder.get(key)


@rule("RPX030", "refuse", _PI)
def rope_edited_after_patch(case: Case) -> Iterator[tuple[str, str]]:
    """The rope settings of a checkpoint that ropext wrote are not changed by hand.

    A patch verifies the whole table that its config gives, and training fits the weights to that table. Settings
    changed afterwards were neither verified nor trained, and ropext.json describes a model that is no longer there. Set
    them back, or patch the source again with the settings that you want.
    """
    record, keys = case.checkpoint.record or {}, (*LAYOUTS, *THETA_KEYS, *PARTIAL_KEYS, ORIGINAL)
    written = written_config(record)
    edits = list(_edited(case.checkpoint.config, written, keys)) if written is not None else []
    theta = record.get("rope", {}).get("theta") if written is None and case.known is not None else None
    if theta is not None and theta != case.facts.theta:
        edits.append((THETA_KEYS[0], case.facts.theta, theta))
    for place, found, before in edits:
        yield (
            f"rope settings must stay as they were written: {place} is {short(found)}, ropext.json wrote "
            f"{short(before)}",
            "Set it back, or patch the source again",
        )


@rule("RPX002", "refuse", "configuration classes of transformers 5.24")
def disagreeing_windows(case: Case) -> Iterator[tuple[str, str]]:
    """Every key that states a window states the same one.

    Families name their window differently (n_positions, seq_length, max_seq_len ...), and some configs hold two of the
    names. One that is above max_position_embeddings was raised alone: a reader that goes by it feeds positions that the
    model never saw. A linear or dynamic factor in force accounts for a second key that is larger by it. Set both to the
    trained length, then extend with a patch.
    """
    for inside, holder in text_configs(case.checkpoint.config):
        (first, window), *others = windows(holder) or [("", 0)]
        factors = [number(block.values.get("factor")) for block in blocks(holder) if block.inside == ""]
        reach = window * max([1.0, *(factor for factor in factors if factor is not None)])
        for key, value in others:
            if value > reach:
                yield (
                    f"window keys must agree: {inside}{key} is {short(value)}, {inside}{first} {short(window)}",
                    "Set both to the trained length, then `ropext patch MODEL --method ntk --factor F`",
                )


@rule("RPX003", "refuse", _PI)
def tokenizer_against_window(case: Case) -> Iterator[tuple[str, str]]:
    """An unscaled window is not above what the tokenizer states.

    tokenizer_config.json often still holds the length that the model was trained at. Where it is smaller than the
    window and no rotary scaling is in force, the window may have been raised by hand, which ruins everything beyond the
    trained length. Only you can know: say what was trained with --native-length.
    """
    checkpoint = case.checkpoint
    if case.native_length_stated or checkpoint.record is not None:  # a record proves more than a tokenizer's limit
        return
    if "rotary" not in (instead_of_rope(checkpoint.config) or "rotary") or learned_tables(checkpoint.tensors):
        return  # no rotary embedding: RoBERTa's window is its tokenizer's limit and two more
    limit = _tokenizer_limit(checkpoint)
    stated = next((found for _, holder in text_configs(checkpoint.config) for found in windows(holder)), None)
    scaled = any(block.kind != "default" for block in blocks(checkpoint.config))
    scaled = scaled or checkpoint.config.get("rope_ratio", 1) != 1  # ChatGLM's own factor on theta
    if limit is not None and stated is not None and limit < stated[1] and not scaled:
        yield (
            f"a window must be the trained length, or come with a rotary embedding changed for it: "
            f"{stated[0]} is {short(stated[1])}, the tokenizer states {limit}",
            f"Say what was trained, for instance `ropext patch MODEL --native-length {limit} ...`",
        )


def _tokenizer_limit(checkpoint: Checkpoint) -> int | None:
    limit = number(checkpoint.tokenizer_config.get("model_max_length"))
    return int(limit) if limit is not None and 0 < limit < NO_LIMIT else None


@rule("RPX028", "refuse", "Peng et al. 2023, arXiv:2309.00071, section 3.2; transformers, standardize_rope_params")
def original_length_missing(case: Case) -> Iterator[tuple[str, str]]:
    """yarn, llama3 and longrope state the length that they start from.

    Where original_max_position_embeddings is missing, readers take the window, which a hand edit has usually raised
    already. The bands of the table then lie in the wrong place (measured at 256 to 1024: pair 2 turns by 0.0813 a token
    in place of 0.0625) and transformers 5 says nothing. State the length the model was trained at before the extension.
    """
    if case.native_length_stated:
        return
    for block in blocks(case.checkpoint.config):
        if block.kind in ("yarn", "llama3", "longrope", "su") and block.original_length is None:
            window = block.holder.get(WINDOW_KEYS[0])
            yield (
                f"{block.kind} must state {ORIGINAL}: {block.where} has none, so readers take the window "
                f"{short(window)}",
                "Add the length that the model was trained at before it was extended",
            )


@rule("RPX029", "refuse", _PI)
def window_beyond_factor(case: Case) -> Iterator[tuple[str, str]]:
    """A scaled window is not beyond the original length times the factor.

    A table stretched by a factor serves the original length times that factor. A window above it was raised alone, and
    positions between the two turn by angles that the model never saw. An original length above the window is the same
    mistake the other way round. Patch with the factor that the window needs.
    """
    if case.native_length_stated:
        return
    for block, original, factor, window in _stretched(case):
        if window > original * factor * _SLACK:
            yield (
                f"a window must be within original length times factor: {block.where} has {original:g} times "
                f"{factor:g}, the window is {window:g}",
                f"Set the window to {original * factor:g}, or patch the original with factor {window / original:.4g}",
            )
        elif original > window:
            yield (
                f"an original length must not be above the window: {block.where} has {original:g}, the window is "
                f"{window:g}",
                "Restore the length that the model was trained at before it was extended",
            )


@rule("RPX042", "warn", "transformers, _validate_yarn_rope_parameters")
def window_short_of_factor(case: Case) -> Iterator[tuple[str, str]]:
    """A factor that the window does not use costs quality for nothing.

    Scaling a table blurs short distances a little at every length. Where the window is shorter than the original length
    times the factor, servers stop there, and the rest of the factor only costs; transformers warns of the mismatch.
    Raise the window to what the factor gives, or patch with the factor that the window needs.
    """
    for block, original, factor, window in _stretched(case):
        if original <= window < original * factor / _SLACK:
            yield (
                f"a factor serves the window that it stretches to: {block.where} has {original:g} times {factor:g}, "
                f"the window is {window:g}",
                f"Patch the original with --to {window:g}, or with --factor {factor:g} for {original * factor:g}",
            )


def _stretched(case: Case) -> Iterator[tuple[Block, float, float, float]]:
    """Blocks that say how far they stretch, with original length, factor and window.

    llama3 does not (Llama 3.1 was trained to 16 times its original length at factor 8), and dynamic stretches as it
    reads, from the window.
    """
    for block in blocks(case.checkpoint.config):
        original, factor = number(block.original_length), number(block.values.get("factor"))
        window = number(block.holder.get(WINDOW_KEYS[0]))
        if block.kind in ("yarn", "linear", "longrope") and original and factor and window:
            yield block, original, factor, window


@rule("RPX031", "note", "Chen et al. 2023, arXiv:2306.15595, section 3.4: quality after 200 steps of tuning")
def beyond_trained_length(case: Case) -> Iterator[tuple[str, str]]:
    """Which part of the window the model was never trained at.

    A patch makes positions readable, training makes them good. Until the checkpoint is tuned at its whole window, what
    lies beyond the trained length rests on the scaling alone.
    """
    record = case.checkpoint.record
    if record is not None and record["native_length"] < _served(record):
        yield (
            f"the model was trained at up to {record['native_length']} of {_served(record)} tokens, the rest stands on "
            "the scaling alone",
            f"`ropext finetune MODEL --schedule {_served(record)}`",
        )


@rule("RPX037", "note", "vLLM, get_and_verify_max_len")
def tokenizer_caps(case: Case) -> Iterator[tuple[str, str]]:
    """A tokenizer that states less than an extended window caps some servers.

    transformers only warns about longer text, but vLLM takes model_max_length of tokenizer_config.json as a limit on
    its window. Raise it to the window if you serve the model.
    """
    limit = _tokenizer_limit(case.checkpoint)
    stated = next((found for _, holder in text_configs(case.checkpoint.config) for found in windows(holder)), None)
    scaled = case.checkpoint.record is not None or any(
        block.kind != "default" for block in blocks(case.checkpoint.config)
    )
    if scaled and limit is not None and stated is not None and limit < stated[1]:
        yield (
            f"the tokenizer states {limit} tokens, {stated[0]} {short(stated[1])}: vLLM stops at the smaller",
            f"Set model_max_length of {TOKENIZER_CONFIG} to {short(stated[1])} to serve it",
        )
