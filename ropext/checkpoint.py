"""A checkpoint directory as it lies on disk: config, small files, and what the safetensors headers say.

Loads no weights and imports no torch. Sizes are in bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext.errors import Refused, RopextError, UsageError, first_line, short

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
RECORD = "ropext.json"
SCHEMA = 1  # of ropext.json
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DEEPEST = 300  # levels of JSON; transformers walks a config recursively, and runs into Python's limit below 900
_HEADER_LIMIT = 100_000_000  # bytes; the safetensors format's own limit


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """One tensor as its file's header describes it."""

    dtype: str  # safetensors name: F32, BF16, F16, ...
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """One safetensors file: enough to notice that it is another one."""

    size: int  # bytes
    header_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A directory that holds a config and safetensors weights, with nothing pointing outside it."""

    path: Path
    config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]  # empty where there is no such file
    record: Mapping[str, Any] | None  # ropext.json, where ropext wrote the checkpoint
    tensors: Mapping[str, TensorHeader]
    weight_files: Mapping[str, WeightFile]

    def read(self, name: str) -> bytes:
        """The bytes of one file of the directory."""
        return (self.path / name).read_bytes()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the directory `path`. Raises UsageError where there is none, Refused where it cannot be trusted."""
    require_directory(path)
    try:
        return _open(path)
    except OSError as error:
        raise unreadable(path, error) from error


def require_directory(path: Path) -> None:
    """Raises UsageError where there is no directory."""
    if not os.path.isdir(path):  # unlike Path.is_dir, False for a name that the system does not accept
        raise UsageError(f"a MODEL is a checkpoint directory, or a hub id such as org/name: {str(path)!r} is neither")


def unreadable(path: Path, error: OSError) -> RopextError:
    """What to raise where the system lets nobody read a checkpoint."""
    return RopextError(f"a checkpoint must be readable: {path} is not ({error.strerror or error})")


def _open(path: Path) -> Checkpoint:
    if (path / "adapter_config.json").exists() and not (path / CONFIG).exists():
        raise Refused(f"a MODEL is a whole checkpoint: {path} is an adapter. Name the merged checkpoint beside it")
    config = read_json(path / CONFIG)
    tokenizer_config = read_tokenizer_config(path)
    record = read_record(path)
    tensors, weight_files = read_weights(path)
    return Checkpoint(
        path=path,
        config=config,
        tokenizer_config=tokenizer_config,
        record=record,
        tensors=tensors,
        weight_files=weight_files,
    )


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json of a directory, empty where there is none. Raises Refused where it cannot be read."""
    return read_json(path / TOKENIZER_CONFIG) if (path / TOKENIZER_CONFIG).exists() else {}


def read_weights(path: Path) -> tuple[dict[str, TensorHeader], dict[str, WeightFile]]:
    """Tensors by name and weight files by name. Raises Refused where index, shards and headers disagree."""
    tensors: dict[str, TensorHeader] = {}
    weight_files = {}
    for name in _weight_file_names(path):
        weight_files[name], found = _read_header(path / name)
        if repeated := tensors.keys() & found.keys():
            raise Refused(
                f"a tensor is stored once: {short(min(repeated))} is in {tensors[min(repeated)].file} and in {name}. "
                "Remove the file that does not belong to the model"
            )
        tensors |= found
    if (path / INDEX).exists():
        _check_index(path, tensors)
    return tensors, weight_files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises Refused where the file is missing, is not JSON or is no object."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        raise Refused(f"a checkpoint needs {path.name}: there is none in {path.parent}") from None
    except (ValueError, RecursionError, OSError) as error:  # ValueError: bad JSON, bad UTF-8, repeated keys
        raise Refused(f"{path.name} must be readable JSON: {path} is not ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise Refused(f"{path.name} must hold a JSON object: {path} holds a {type(value).__name__}")
    if _deeper_than(_DEEPEST, value):
        raise Refused(f"{path.name} nests values at most {_DEEPEST} deep, readers fail on more: {path} goes deeper")
    return value


def _deeper_than(levels: int, value: Any) -> bool:
    nodes = [value]
    for _ in range(levels):
        inner = [node.values() if isinstance(node, dict) else node for node in nodes if isinstance(node, (dict, list))]
        nodes = [child for children in inner for child in children]
    return any(isinstance(node, (dict, list)) for node in nodes)


def read_record(path: Path) -> dict[str, Any] | None:
    """ropext.json where there is one, with the parts that other rooms rely on. Raises Refused for anything else."""
    if not (path / RECORD).exists():
        return None
    record = read_json(path / RECORD)
    whole = (
        record.get("schema") == SCHEMA
        and record.get("kind") in ("patch", "finetune")
        and all(isinstance(record.get(key), int) for key in ("window", "native_length"))
        and isinstance(record.get("rope"), dict)
        and isinstance(record.get("source"), dict)
        and isinstance(record["source"].get("model"), str)
    )
    if not whole:
        raise Refused(
            f"{RECORD} must be what ropext of schema {SCHEMA} wrote: {path / RECORD} is not (schema "
            f"{short(record.get('schema'))}). Restore it, or use the version of ropext that wrote it"
        )
    return record


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {short(repeated)} stands twice in one object")
    return found


def _weight_file_names(path: Path) -> list[str]:
    """The safetensors files of the model: the shards of the index, or the single file."""
    has_index, has_single = (path / INDEX).exists(), (path / SINGLE).exists()
    if has_index and has_single:
        raise Refused(f"a model is one file or shards: {path} holds {SINGLE} and {INDEX}. Remove the one that is stale")
    if has_index:
        return _shards(path)
    if has_single:
        return [SINGLE]
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        raise Refused(
            f"only safetensors weights are read, a pickle can run code: found {pickles[0]}. Convert it with "
            "model.save_pretrained(DIR), transformers writes safetensors"
        )
    raise Refused(f"a checkpoint needs safetensors weights: there is neither {SINGLE} nor {INDEX} in {path}")


def _shards(path: Path) -> list[str]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise Refused(f"{INDEX} needs a weight_map from tensor to file name: {path / INDEX} has none")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name:
            raise Refused(
                f"a shard lies in the checkpoint's own directory: {INDEX} names {short(name)}. Do not use this file"
            )
        if not (path / name).is_file():
            raise Refused(f"every shard that {INDEX} names must be there: {short(name)} is missing in {path}")
    if not names:
        raise Refused(f"{INDEX} names no shard: {path / INDEX}")
    return names


def _check_index(path: Path, tensors: Mapping[str, TensorHeader]) -> None:
    for tensor, name in read_json(path / INDEX)["weight_map"].items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise Refused(
                f"index and shards must agree: {INDEX} of {path} has {short(tensor)} in {name}, the shard does not. "
                "Download both again"
            )


def _read_header(path: Path) -> tuple[WeightFile, dict[str, TensorHeader]]:
    """Header of one safetensors file: 8 bytes of length, then JSON (the format's own description)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise Refused(
                f"a safetensors file starts with its header: {path} does not, it is cut short or another kind"
            )
        raw = file.read(length)
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats)
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
        headers = {
            name: TensorHeader(dtype=str(entry["dtype"]), shape=tuple(map(int, entry["shape"])), file=path.name)
            for name, entry in tensors.items()
        }
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError):
        raise Refused(f"the safetensors header of {path} cannot be read: the file is damaged") from None
    if max(ends, default=0) + 8 + length != size:
        raise Refused(
            f"a safetensors file is as long as its header says: {path} has {size} bytes, not "
            f"{max(ends, default=0) + 8 + length}. Download it again"
        )
    return WeightFile(size=size, header_sha256=hashlib.sha256(prefix + raw).hexdigest()), headers
