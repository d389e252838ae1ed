"""An allowed plan -> a new directory: whole or absent, weights byte for byte as they were.

Everything is made in a hidden sibling of the destination and renamed at the end. Sizes are in bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ropext.checkpoint import CONFIG, RECORD, TOKENIZER_CONFIG, Checkpoint
from ropext.errors import Refused, RopextError, UsageError

Weights = Literal["clone", "link", "copy"]
WEIGHTS: tuple[Weights, ...] = ("clone", "link", "copy")
_FICLONE = 0x40049409  # ioctl of Linux that shares the blocks of a file (linux/fs.h)


def check_destination(out: Path, source: Path, *, overwrite: bool = False) -> None:
    """Refuse a destination that holds something, unless it is ropext's own and may be overwritten."""
    try:
        real, origin = out.resolve(), source.resolve()
        there = out.exists() or out.is_symlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: Python below 3.13 says so of links in a circle
        raise UsageError(f"--out must name a directory that can be made: {str(out)!r} cannot ({error})") from None
    if real == origin or real in origin.parents or origin in real.parents:
        raise Refused(
            f"an output never lies in its source, nothing is changed in place: {out} and {source}. Choose --out"
        )
    if not there:
        return
    if not overwrite:
        raise Refused(
            f"an existing output is not overwritten unasked: {out} is there. Choose --out, or add --overwrite"
        )
    if not (out / RECORD).is_file() or out.is_symlink():
        raise Refused(f"only what ropext wrote is overwritten: {out} has no {RECORD}. Choose --out")


def patched_files(source: Checkpoint, config: Mapping[str, Any], native_length: int, window: int) -> dict[str, bytes]:
    """New bytes of the files that a patch changes: the config, and the tokenizer's limit where it held the old one."""
    files = {CONFIG: json_bytes(config)}
    before = source.config.get("max_position_embeddings")
    limit = source.tokenizer_config.get("model_max_length")
    if limit is not None and limit in (before, native_length) and limit != window:
        files[TOKENIZER_CONFIG] = _with_limit(source.read(TOKENIZER_CONFIG), window)
    return files


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """How ropext writes JSON files."""
    # Nothing of ropext's is NaN, but a config may hold one elsewhere, and it stays. A lone surrogate stays an escape.
    return (json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _with_limit(raw: bytes, window: int) -> bytes:
    """tokenizer_config.json with another model_max_length, every other byte kept."""
    wanted = {**json.loads(raw), "model_max_length": window}
    for match in re.finditer(rb'"model_max_length"\s*:\s*([0-9.eE+]+)', raw):
        changed = raw[: match.start(1)] + b"%d" % window + raw[match.end(1) :]
        if json.loads(changed) == wanted:  # the key may stand in a nested object too
            return changed
    raise RopextError(f"model_max_length must be a plain key of {TOKENIZER_CONFIG}: it is spelt otherwise there")


def write_patched(
    source: Checkpoint, out: Path, files: Mapping[str, bytes], *, weights: Weights = "clone", overwrite: bool = False
) -> None:
    """Write `out`: the source with its weights byte for byte, and `files` with their new bytes.

    Raises RopextError where that fails, and leaves nothing.
    """
    if weights != "link":
        _check_room(out.parent, sum(path.stat().st_size for path in _regular_files(source.path)))
    _write(source, out, files, lambda name, to: _take(source.path / name, to, weights), overwrite)


def check_weights_fit(source: Checkpoint, model: Any) -> None:
    """Refuse, before training, a model whose parameters are not tensors of the source under the same names.

    A tied parameter stands in the file once, under one of its names.
    """
    stored = {id(parameter) for name, parameter in _all_names(model) if name in source.tensors}
    lost = [name for name, parameter in model.named_parameters() if id(parameter) not in stored]
    if lost:
        raise Refused(
            f"trained weights are written under the names they came from: {lost[0]} is not in {source.path}. "
            "Load and save the checkpoint once with the installed transformers, then start from that"
        )


def write_tuned(
    source: Checkpoint, model: Any, out: Path, files: Mapping[str, bytes], *, overwrite: bool = False
) -> None:
    """Write `out`: the source with the weights of `model`, in the source's shards, names, dtypes and tying.

    Raises RopextError where that fails, and leaves nothing.
    """
    _write(source, out, files, lambda name, to: _save_weights(source, name, model, to), overwrite)


def _write(
    source: Checkpoint,
    out: Path,
    files: Mapping[str, bytes],
    put_weights: Callable[[str, Path], None],
    overwrite: bool,
) -> None:
    """Fill a staged directory: small files as they were or from `files`, weights by `put_weights`, the config last."""
    check_destination(out, source.path, overwrite=overwrite)
    with staged(out, overwrite=overwrite) as folder:
        for path in sorted(_regular_files(source.path)):
            name = path.relative_to(source.path).as_posix()
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name in source.weight_files:
                put_weights(name, folder / name)
            elif name not in files and name != RECORD:
                _take(path, folder / name, "clone")
        for name in sorted(files, key=lambda name: name == CONFIG):
            write_file(folder / name, files[name])


def _all_names(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters(remove_duplicate=False)


def _save_weights(source: Checkpoint, name: str, model: Any, target: Path) -> None:
    """One safetensors file: trained tensors in their stored dtype; what the model does not hold, as it was."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    trained, tensors = dict(_all_names(model)), {}
    with safe_open(source.path / name, framework="pt") as file:
        metadata = file.metadata() or {}
        for key in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
            stored = file.get_tensor(key)
            tensors[key] = trained[key].detach().to("cpu", stored.dtype).contiguous() if key in trained else stored
            if tensors[key].shape != stored.shape:
                raise RopextError(f"a tensor keeps its shape in training: {key} was {stored.shape}")
    save_file(tensors, target, metadata={**metadata, "format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    target.chmod(0o666 & ~umask)  # safetensors makes files that only their owner can read


@contextlib.contextmanager
def staged(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden sibling of `out` to fill; renamed to `out` at the end, removed where the work fails."""
    try:
        out = out.resolve()
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
            if path.name.startswith("."):
                continue
            if path.resolve() in (folder.resolve(), *folder.resolve().parents):
                raise Refused(f"a checkpoint never holds itself: {path} leads to {path.resolve()}. Remove the link")
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
