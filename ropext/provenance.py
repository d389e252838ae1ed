"""ropext.json: where a checkpoint comes from, what was changed in it, and the original bytes of what was.

Lies beside the weights of each checkpoint that ropext writes. Lengths are in tokens, sizes in bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ropext import hub
from ropext.checkpoint import (
    CONFIG,
    RECORD,
    SCHEMA,
    TOKENIZER_CONFIG,
    Checkpoint,
    open_checkpoint,
    read_record,
    read_weights,
    require_directory,
    unreadable,
)
from ropext.errors import Refused
from ropext.plan import RopePlan
from ropext.safety import Finding
from ropext.version import __version__

BUILT_IN = "built-in"  # the name of the checkpoint inside the package, on every machine


def patch_record(
    source: Checkpoint, model: str, plan: RopePlan, findings: Sequence[Finding], changed: Mapping[str, bytes]
) -> dict[str, Any]:
    """The record of a patched checkpoint. `model` is how the source is named; `changed` maps file to its new bytes."""
    return {
        **_head("patch", source, model),
        "window": plan.window,
        "native_length": plan.native_length,
        "rope": rope_record(plan),
        "findings": [asdict(finding) for finding in findings],
        "config_changes": {key: list(pair) for key, pair in plan.config_changes.items()},
        "original_files": {name: source.read(name).decode() for name in changed},
    }


def finetune_record(
    source: Checkpoint,
    model: str,
    *,
    rope: Mapping[str, Any],
    window: int,
    native_length: int,
    training: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of a stage's output. `native_length` is the longest length trained at, from now on."""
    return {
        **_head("finetune", source, model),
        "window": window,
        "native_length": native_length,
        "rope": dict(rope),
        "training": dict(training),
        "source_record": source.record,
    }


def rope_record(plan: RopePlan) -> dict[str, Any]:
    """The method's numbers, enough to make the plan again."""
    return {
        "method": plan.method,
        "inner": plan.inner,
        "settings": dict(plan.settings),
        "factor": plan.factor,
        "native_length": plan.native_length,
        "original_length": plan.original_length,
        "target_length": plan.target_length,
        "theta_before": plan.theta_before,
        "theta": plan.theta,
        "rotary_dims": plan.rotary_dims,
    }


def before_patch(path: Path) -> tuple[Checkpoint, dict[str, bytes]]:
    """A patched checkpoint and the bytes that its changed files had before, whatever became of those files since.

    Raises Refused where that is not what a revert would be.
    """
    require_directory(path)
    try:
        record = read_record(path)
        tensors, weight_files = read_weights(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if record is None:
        raise Refused(f"only what ropext patched can be reverted: {path} has no {RECORD}. Take its source")
    source = record["source"]
    if record["kind"] != "patch":
        raise Refused(
            f"training cannot be reverted, it changed the weights: {path} was tuned from {source['model']}. Take that"
        )
    if {name: asdict(file) for name, file in weight_files.items()} != source.get("weights"):
        raise Refused(f"a revert needs the weights that were patched: those of {path} are others. Take its source")
    checkpoint = Checkpoint(
        path=path, config={}, tokenizer_config={}, record=record, tensors=tensors, weight_files=weight_files
    )
    return checkpoint, _originals(record)


def _originals(record: Mapping[str, Any]) -> dict[str, bytes]:
    """Recorded bytes by file name, each proved by the digest that was recorded with it."""
    texts, digests = record.get("original_files"), record["source"].get("files")
    if not isinstance(texts, dict) or not isinstance(digests, dict) or CONFIG not in texts:
        raise Refused(f"a revert needs the original files: {RECORD} holds none. Take the source")
    found = {name: text.encode("utf-8", "replace") for name, text in texts.items() if isinstance(text, str)}
    for name in texts:
        if name not in (CONFIG, TOKENIZER_CONFIG) or sha256(found.get(name, b"")) != digests.get(name):
            raise Refused(f"original files must be as they were recorded: {name!r} of {RECORD} is not. Take the source")
    return found


def lineage(checkpoint: Checkpoint, built_in: Path) -> list[tuple[str, Path]]:
    """(label, directory) from the first source to this checkpoint; stops at a source that is no longer there."""
    steps: list[tuple[str, Path]] = []
    while True:
        kind = checkpoint.record["kind"] if checkpoint.record else None
        steps.append(({"patch": "patched", "finetune": "tuned", None: "source"}[kind], checkpoint.path))
        if checkpoint.record is None:
            break
        folder = source_path(checkpoint, built_in)
        if folder is None or folder in (path for _, path in steps):
            break
        checkpoint = open_checkpoint(folder)
    return steps[::-1]


def source_path(checkpoint: Checkpoint, built_in: Path) -> Path | None:
    """Where the source of a written checkpoint lies now; None where it is gone."""
    assert checkpoint.record is not None
    model = checkpoint.record["source"]["model"]
    folder = built_in if model == BUILT_IN else Path(model)
    if not folder.is_absolute():
        return hub.cached(model)
    return folder if folder.is_dir() else None


def weights_sha256(source: Checkpoint) -> str:
    """Identity of the weights: hex digest over the weight files in order of their names."""
    digest = hashlib.sha256()
    for name in sorted(source.weight_files):
        with (source.path / name).open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def _head(kind: str, source: Checkpoint, model: str) -> dict[str, Any]:
    small = [CONFIG, *([TOKENIZER_CONFIG] if source.tokenizer_config else [])]
    return {
        "schema": SCHEMA,
        "kind": kind,
        "version": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "source": {
            "model": model,
            "files": {name: sha256(source.read(name)) for name in small},
            "weights": {name: asdict(file) for name, file in source.weight_files.items()},
        },
    }
