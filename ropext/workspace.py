"""Which checkpoint a command means when none is named: the newest fitting one of `ropext-runs/` here.

An empty workspace means the built-in checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ropext import hub
from ropext.checkpoint import RECORD, Checkpoint, open_checkpoint
from ropext.demo import CHECKPOINT
from ropext.errors import RopextError, UsageError
from ropext.provenance import BUILT_IN, lineage

RUNS = Path("ropext-runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A checkpoint, how it is recorded, and why it was taken."""

    path: Path
    model: str  # "built-in", an absolute path, or a hub id with its commit
    name: str  # short, for naming outputs
    why: str


def named(model: str) -> Choice:
    """The checkpoint that the user named: by directory, by hub id, or as "built-in"."""
    if not model.strip():
        raise UsageError(f"a MODEL is a checkpoint directory, or a hub id such as org/name: found {model!r}")
    if model == BUILT_IN:
        return built_in("named")
    path = Path(model)
    if hub.is_hub_id(model) and path.parts[0] != RUNS.name and not os.path.lexists(model):
        snapshot = hub.fetch(model)
        return Choice(path=snapshot.path, model=snapshot.model, name=snapshot.id.split("/")[1], why="named")
    return Choice(path=path, model=str(path.absolute()), name=path.resolve().name, why="named")


def built_in(why: str) -> Choice:
    """The checkpoint inside the package."""
    return Choice(path=CHECKPOINT, model=BUILT_IN, name="demo", why=why)


def for_patch() -> Choice:
    """The source of the newest lineage."""
    newest = _newest(lambda checkpoint: True)
    if newest is None:
        return built_in("the workspace is empty")
    first = lineage(newest, CHECKPOINT)[0][1]
    return _chosen(first, "the source of the newest lineage")


def for_finetune() -> Choice:
    """The newest patched checkpoint."""
    newest = _newest(lambda checkpoint: checkpoint.record is not None and checkpoint.record["kind"] == "patch")
    if newest is None:
        return built_in("no patched checkpoint in the workspace")
    return _chosen(newest.path, "the newest patched checkpoint")


def for_eval() -> Choice:
    """The newest output."""
    newest = _newest(lambda checkpoint: True)
    return built_in("the workspace is empty") if newest is None else _chosen(newest.path, "the newest output")


def is_built_in_lineage(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is the built-in one or descends from it."""
    return lineage(checkpoint, CHECKPOINT)[0][1].resolve() == CHECKPOINT.resolve()


def _chosen(path: Path, why: str) -> Choice:
    if path.resolve() == CHECKPOINT.resolve():
        return built_in(why)
    if model := hub.model_of(path):
        return Choice(path=path, model=model, name=model.split("@")[0].split("/")[1], why=why)
    return Choice(path=path, model=str(path.absolute()), name=path.resolve().name, why=why)


def _newest(fits: Callable[[Checkpoint], bool]) -> Checkpoint | None:
    found = []
    for record in RUNS.glob(f"*/{RECORD}"):
        if record.parent.name.startswith("."):
            continue
        try:
            checkpoint = open_checkpoint(record.parent)
        except RopextError:  # not a checkpoint any more: somebody else's business, never this command's default
            continue
        if fits(checkpoint):
            found.append(checkpoint)
    return max(found, key=lambda checkpoint: str((checkpoint.record or {}).get("created", "")), default=None)
