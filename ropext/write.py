"""An allowed plan -> a new directory: whole or absent, weights byte for byte as they were.

Everything is made in a hidden sibling of the destination and renamed at the end. Sizes are in bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ropext.checkpoint import RECORD, TOKENIZER_CONFIG, Checkpoint
from ropext.errors import Refused, RopextError, UsageError

Weights = Literal["clone", "link", "copy"]
WEIGHTS: tuple[Weights, ...] = ("clone", "link", "copy")
_FICLONE = 0x40049409  # ioctl of Linux that shares the blocks of a file (linux/fs.h)


def check_destination(out: Path, source: Path, *, overwrite: bool = False) -> None:
    """Refuse a destination that holds something, unless it is ropext's own and may be overwritten."""
    real, origin = out.resolve(), source.resolve()
    if real == origin or real in origin.parents or origin in real.parents:
        raise Refused(
            f"an output never lies in its source, nothing is changed in place: {out} and {source}. Choose --out"
        )
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise Refused(
            f"an existing output is not overwritten unasked: {out} is there. Choose --out, or add --overwrite"
        )
    if not (out / RECORD).is_file() or out.is_symlink():
        raise Refused(f"only what ropext wrote is overwritten: {out} has no {RECORD}. Choose --out")


def patched_files(source: Checkpoint, config: Mapping[str, Any], native_length: int, window: int) -> dict[str, bytes]:
    """New bytes of the files that a patch changes: the config, and the tokenizer's limit where it held the old one."""
    files = {"config.json": json_bytes(config)}
    before = source.config.get("max_position_embeddings")
    limit = source.tokenizer_config.get("model_max_length")
    if limit is not None and limit in (before, native_length) and limit != window:
        files[TOKENIZER_CONFIG] = _with_limit(source.read(TOKENIZER_CONFIG), window)
    return files


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """How ropext writes JSON files."""
    return (json.dumps(dict(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _with_limit(raw: bytes, window: int) -> bytes:
    """tokenizer_config.json with another model_max_length, every other byte kept."""
    changed, count = re.subn(rb'("model_max_length"\s*:\s*)[0-9.eE+]+', rb"\g<1>%d" % window, raw)
    if count != 1:
        raise RopextError(f"model_max_length must stand once in {TOKENIZER_CONFIG}: found it {count} times")
    return changed


def write_patched(
    source: Checkpoint, out: Path, files: Mapping[str, bytes], *, weights: Weights = "clone", overwrite: bool = False
) -> None:
    """Write `out`: every file of the source, those in `files` with their new bytes.

    Raises RopextError where that fails, and leaves nothing.
    """
    check_destination(out, source.path, overwrite=overwrite)
    names = [path.relative_to(source.path).as_posix() for path in sorted(_regular_files(source.path))]
    kept = [name for name in names if name not in files and name != RECORD]
    if weights != "link":
        _check_room(out.parent, sum((source.path / name).stat().st_size for name in kept))
    with staged(out, overwrite=overwrite) as folder:
        for name in kept:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            linked = weights == "link" and name in source.weight_files
            _take(source.path / name, folder / name, "link" if linked else "copy" if weights == "copy" else "clone")
        for name in sorted(files, key=lambda name: name == "config.json"):  # a config last: it makes a checkpoint
            write_file(folder / name, files[name])


@contextlib.contextmanager
def staged(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden sibling of `out` to fill; renamed to `out` at the end, removed where the work fails."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = out.parent / f".{out.name}.ropext-{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise RopextError(f"the output must be writable: {out.parent} is not ({error.strerror})") from error
    try:
        yield folder
        _flush(folder)
        _put(folder, out, overwrite)
    except OSError as error:
        raise RopextError(f"writing {out} failed, nothing is left of it: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put(folder: Path, out: Path, overwrite: bool) -> None:
    """Rename `folder` to `out`; an older output goes away only when the new one is in its place."""
    if not overwrite or not out.exists():
        folder.rename(out)
        return
    aside = folder.with_name(folder.name + "-old")
    out.rename(aside)
    try:
        folder.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside)


def _regular_files(folder: Path) -> Iterator[Path]:
    """Files below a checkpoint directory, links followed, hidden folders (.git, .cache) left out."""
    for path in folder.iterdir():
        if path.is_dir():
            if not path.name.startswith("."):
                yield from _regular_files(path)
        elif path.is_file():
            yield path


def _take(source: Path, target: Path, how: Weights) -> None:
    """Bring one file over: its content, whatever links led to it."""
    source = source.resolve()
    if how == "link":
        try:
            target.hardlink_to(source)
        except OSError as error:
            raise UsageError(
                f"--weights link needs source and output on one file system: {error.strerror}. Use --weights copy"
            ) from error
    elif how == "copy" or not _clone(source, target):
        shutil.copyfile(source, target)


def _clone(source: Path, target: Path) -> bool:
    """Share the blocks of a file, where system and file system can."""
    try:
        import fcntl

        with source.open("rb") as read, target.open("wb") as write:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
    except (ImportError, OSError):
        return False
    return True


def _check_room(folder: Path, needed: int) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RopextError(
            f"the disk must hold the output: it takes {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free. "
            "Use --weights link, or another --out"
        )


def _flush(folder: Path) -> None:
    """Have the directory entries on disk before the rename makes them the result."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
