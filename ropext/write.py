"""An allowed plan -> a new directory: whole or absent, weights byte for byte as they were.

Sizes are in bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ropext.checkpoint import CONFIG, PICKLES, RECORD, TOKENIZER_CONFIG, Checkpoint
from ropext.errors import Refused, RopextError, UsageError
from ropext.facts import positions_of
from ropext.hub import is_in_hub_cache
from ropext.staging import staged

if TYPE_CHECKING:
    from torch import Tensor

Weights = Literal["clone", "link", "copy"]
WEIGHTS: tuple[Weights, ...] = ("clone", "link", "copy")
_BLOCK = 1 << 22  # bytes copied at a time
_FICLONE = 0x40049409  # ioctl of Linux that shares the blocks of a file (linux/fs.h)


def check_destination(out: Path, source: Path, *, overwrite: bool | None = None) -> None:
    """Refuse a destination that holds something, unless it is ropext's own and may be overwritten.

    `overwrite` is None for a command that has no such option.
    """
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
        choice = "Choose --out" if overwrite is None else "Choose --out, or add --overwrite"
        raise Refused(f"an existing output is not overwritten unasked: {out} is there. {choice}")
    if not (out / RECORD).is_file() or out.is_symlink():
        raise Refused(f"only what ropext wrote is overwritten: {out} has no {RECORD}. Choose --out")


def patched_files(source: Checkpoint, config: Mapping[str, Any], native_length: int, window: int) -> dict[str, bytes]:
    """New bytes of the files that a patch changes: the config, and the tokenizer's limit where it held the old one."""
    files = {CONFIG: json_bytes(config)}
    before = positions_of(source.config).get("max_position_embeddings")
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
    source: Checkpoint,
    out: Path,
    files: Mapping[str, bytes],
    *,
    weights: Weights = "clone",
    overwrite: bool | None = None,
) -> None:
    """Write `out`: the source with its weights byte for byte, and `files` with their new bytes.

    Raises RopextError where that fails, and leaves nothing.
    """
    if weights == "link":
        _refuse_links_into_a_cache(source)
    kept = [name for name in _file_names(source.path) if name not in files and name != RECORD]
    with _directory(source, out, files, overwrite) as folder:
        _bring(source.path, kept, folder, weights)


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
    source: Checkpoint,
    weights: Mapping[str, Tensor],
    out: Path,
    files: Mapping[str, bytes],
    *,
    overwrite: bool | None = None,
) -> None:
    """Write `out`: the source with these trained weights, in the source's shards, names, dtypes and tying.

    Raises RopextError where that fails, and leaves nothing.
    """
    kept = [name for name in _file_names(source.path) if name not in {*files, *source.weight_files, RECORD}]
    with _directory(source, out, files, overwrite) as folder:
        _bring(source.path, kept, folder, "clone", besides=sum(file.size for file in source.weight_files.values()))
        for name in source.weight_files:
            _save_weights(source, name, weights, folder / name)


@contextlib.contextmanager
def _directory(source: Checkpoint, out: Path, files: Mapping[str, bytes], overwrite: bool | None) -> Iterator[Path]:
    """A staged directory to bring files into; `files` are added at the end, the config last of all."""
    check_destination(out, source.path, overwrite=overwrite)
    with staged(out, overwrite=bool(overwrite)) as folder:
        yield folder
        for name in sorted(files, key=lambda name: name == CONFIG):
            (folder / name).write_bytes(files[name])


def _all_names(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters(remove_duplicate=False)


def trained_weights(model: Any) -> dict[str, Tensor]:
    """The parameters of a model by every name that they have, whole: those that several processes share in parts are
    gathered on the CPU, so all processes call this."""
    whole: dict[int, Tensor] = {}
    for parameter in model.parameters():
        gather = getattr(parameter, "full_tensor", None)  # a DTensor of FSDP2
        whole[id(parameter)] = parameter.detach() if gather is None else gather().detach().cpu()
    return {name: whole[id(parameter)] for name, parameter in _all_names(model)}


def _save_weights(source: Checkpoint, name: str, trained: Mapping[str, Tensor], target: Path) -> None:
    """One safetensors file: trained tensors in their stored dtype; what the model does not hold, as it was."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {}
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


def _file_names(folder: Path) -> list[str]:
    """Files below a checkpoint directory, links followed, hidden folders (.git, .cache) left out."""
    return [path.relative_to(folder).as_posix() for path in sorted(_regular_files(folder))]


def _regular_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if path.name.startswith("."):
                continue
            if path.resolve() in (folder.resolve(), *folder.resolve().parents):
                raise Refused(f"a checkpoint never holds itself: {path} leads to {path.resolve()}. Remove the link")
            yield from _regular_files(path)
        elif path.is_file():
            yield path


def _bring(source: Path, names: Iterable[str], folder: Path, weights: Weights, *, besides: int = 0) -> None:
    """Bring files over, whatever links lead to their content: shared where that was asked and can be, else copied.

    Copying begins when the disk is known to hold the copies and `besides` more bytes: what is shared takes no room.
    """
    copies = []
    for name in names:
        origin, target = (source / name).resolve(), folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if weights == "link" and _is_large(name):
            _link(origin, target)
        elif weights == "copy" or not _clone(origin, target):
            copies.append((origin, target))
    _check_room(folder, besides + sum(origin.stat().st_size for origin, _ in copies))
    for origin, target in copies:
        _copy(origin, target)


def _is_large(name: str) -> bool:
    """Whether a file holds weights, be they the model's or lie beside them in another format."""
    return name.endswith((".safetensors", *(pattern.removeprefix("*") for pattern in PICKLES)))


def _link(origin: Path, target: Path) -> None:
    try:
        target.hardlink_to(origin)
    except OSError as error:
        raise UsageError(
            f"--weights link needs source and output on one file system: {error.strerror}. Use --weights copy"
        ) from error


def _refuse_links_into_a_cache(source: Checkpoint) -> None:
    """Refuse hard links to the blobs of a hub cache, which every program of this machine reads and none checks again.

    A file that shares its content with the output is changed with it by whoever writes there in place: a mere
    save_pretrained into the output would make the cached model another one, under the old name, without a word.
    """
    for name in source.weight_files:
        blob = (source.path / name).resolve()
        if is_in_hub_cache(blob):
            raise Refused(
                f"a hub cache is never shared with an output, which may be written to: {name} lies in {blob.parent}. "
                "Use --weights clone, or link from a copy of your own (hf download ID --local-dir DIR)"
            )


def _clone(source: Path, target: Path) -> bool:
    """Share the blocks of a file, where system and file system can."""
    try:
        import fcntl

        with source.open("rb") as read, target.open("wb") as write:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
    except (ImportError, OSError):
        return False
    return True


def _copy(origin: Path, target: Path) -> None:
    """Copy the content of a file, and have the disk begin with each block at once: it has to hold all in the end."""
    if sys.platform != "linux":
        shutil.copyfile(origin, target)
        return
    with origin.open("rb") as read, target.open("wb") as write:
        done = 0
        while sent := os.sendfile(write.fileno(), read.fileno(), done, _BLOCK):
            os.posix_fadvise(write.fileno(), done, sent, os.POSIX_FADV_DONTNEED)  # starts the writing of dirty pages
            done += sent


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RopextError(
            f"the disk must hold the output: it takes {needed / 1e9:.1f} GB, {folder.parent} has {free / 1e9:.1f} GB "
            "free. Use --weights link, or another --out"
        )
