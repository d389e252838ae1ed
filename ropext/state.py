"""Saved states of a run: folders `state-N` after N optimizer steps, each whole or never taken for one.

What is in a state is the caller's; here it gets a manifest with the size and hash of every file, reaches the disk, and
only then its name. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ropext.errors import Refused

STATES_KEPT = 2  # unless told otherwise: one damaged state does not lose the run
MANIFEST = "manifest.json"
NEW = "state.new"  # where a state is filled


@contextmanager
def lock(run_folder: Path) -> Iterator[None]:
    """One process at a time in a run folder. The system drops the lock with the process, however that ends."""
    with (run_folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(
                f"one process trains in a run folder: found another at work in {run_folder}; wait for it, or start in "
                "another folder with --out"
            ) from None
        yield


def saved_states(run_folder: Path) -> list[Path]:
    """The states of a run, newest first, whole or damaged."""
    states = [path for path in run_folder.glob("state-*") if path.name.removeprefix("state-").isdecimal()]
    return sorted(states, key=_steps, reverse=True)


def read_manifest(state: Path) -> dict[str, Any] | None:
    """What `write_state` was told about a state, or None unless every file is there with its size and hash."""
    try:
        manifest = json.loads((state / MANIFEST).read_text())
        whole = all(_identity(state / name) == identity for name, identity in manifest["files"].items())
        about: dict[str, Any] = manifest["about"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return about if whole else None


def new_state(run_folder: Path) -> None:
    """An empty folder NEW to fill with a state, which `name_state` then makes one of the run's."""
    shutil.rmtree(run_folder / NEW, ignore_errors=True)
    (run_folder / NEW).mkdir()


def name_state(run_folder: Path, steps: int, about: dict[str, Any], keep: int = STATES_KEPT) -> Path:
    """The state after `steps` optimizer steps: what was put into NEW, and `about` (JSON).

    Then the oldest go until `keep` are left, and what lies beyond `steps`: damaged states that this run went on from
    behind.
    """
    new, final = run_folder / NEW, run_folder / f"state-{steps}"
    files = sorted(path for path in new.rglob("*") if path.is_file())
    manifest = {"about": about, "files": {path.relative_to(new).as_posix(): _identity(path) for path in files}}
    (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in (*new.rglob("*"), new):
        _sync(path)
    shutil.rmtree(final, ignore_errors=True)  # there only if it was damaged
    new.rename(final)
    _sync(run_folder)
    states = saved_states(run_folder)
    kept = states[states.index(final) :][:keep]
    for state in states:
        if state not in kept:
            shutil.rmtree(state)
    return final


def _steps(state: Path) -> int:
    return int(state.name.removeprefix("state-"))


def _identity(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
