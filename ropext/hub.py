"""Hub ids: `org/name` or `org/name@revision` -> a snapshot in the hub cache, downloaded where it is not there yet.

The cache belongs to every program of this machine: it is read, and only huggingface_hub writes to it.
"""

from __future__ import annotations

import glob
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ropext.errors import Refused, RopextError, UsageError

_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)
# What a checkpoint is besides its weights. Pickles and other frameworks' weights are never asked for.
_SMALL = ("*.json", "*.jinja", "*.py", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")
_NOT_OURS = ("*/*", "*.bin.index.json")  # folders hold other formats and training states, the index names pickles
_TEMPLATES = "additional_chat_templates/*.jinja"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One commit of a hub model as it lies in the cache."""

    path: Path
    id: str  # org/name
    commit: str

    @property
    def model(self) -> str:
        """The name that means this commit for good."""
        return f"{self.id}@{self.commit}"


def is_hub_id(model: str) -> bool:
    """Whether a text has the form of a hub id."""
    return _ID.fullmatch(model) is not None


def fetch(model: str) -> Snapshot:
    """The snapshot that a hub id means now, with its weights and small files; without a network, the cached one.

    Raises UsageError where the hub knows no such model, RopextError where it cannot be had.
    """
    found = _ID.fullmatch(model)
    assert found is not None, model
    name = found["id"]
    path = _download(name, found["revision"], _SMALL)
    commit = path.name
    weights = [glob.escape(file) for file in _weight_files(path)]
    path = _download(name, commit, (*weights, _TEMPLATES), ignore=())
    if not (path / _SINGLE).exists() and not (path / _INDEX).exists():
        raise Refused(
            f"only safetensors weights are read: {name}@{commit} has none in the cache or on the hub. Ask its owners "
            "for them, or convert it with model.save_pretrained(DIR) and name DIR"
        )
    return Snapshot(path=path, id=name, commit=commit)


def cached(model: str) -> Path | None:
    """Where the snapshot of `org/name@commit` lies in the cache; None where it does not. Asks no network."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = _ID.fullmatch(model)
    if found is None or found["revision"] is None:
        return None
    path = Path(HF_HUB_CACHE, "models--" + found["id"].replace("/", "--"), "snapshots", found["revision"])
    return path if path.is_dir() else None


def model_of(path: Path) -> str | None:
    """`org/name@commit` of a snapshot's directory in a hub cache; None for any other directory."""
    repository, kind, commit = ("", "", "", *path.absolute().parts)[-3:]
    model = f"{repository.removeprefix('models--').replace('--', '/', 1)}@{commit}"
    in_cache = repository.startswith("models--") and kind == "snapshots"
    return model if in_cache and is_hub_id(model) else None


def is_in_hub_cache(path: Path) -> bool:
    """Whether a path, its links resolved, lies among the files of a model in a hub cache."""
    return any(
        folder.name in ("blobs", "snapshots") and folder.parent.name.startswith("models--") for folder in path.parents
    )


def _weight_files(path: Path) -> list[str]:
    """The weight files that a snapshot needs: the shards that its index names, else the single file."""
    try:
        names = json.loads((path / _INDEX).read_bytes())["weight_map"].values()
        return sorted({name for name in names if isinstance(name, str)})
    except FileNotFoundError:
        return [_SINGLE]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return []  # damaged: opening the checkpoint says how


def _download(name: str, revision: str | None, files: tuple[str, ...], ignore: tuple[str, ...] = _NOT_OURS) -> Path:
    from huggingface_hub import errors, snapshot_download

    asked = f"{name}@{revision}" if revision else name
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(files), ignore_patterns=list(ignore))
        )
    except errors.GatedRepoError as error:
        raise RopextError(
            f"a gated model needs its owners' consent: {name} is one. Ask for access at https://huggingface.co/{name}, "
            "then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"a MODEL is a directory or a hub id: {name!r} is no directory here, and the hub knows no such model "
            "(a private one needs `hf auth login`)"
        ) from error
    except (errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise UsageError(f"a hub id is org/name or org/name@revision: the hub knows no {asked!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise _missing(asked, error) from error
    except Exception as error:  # the HTTP clients below huggingface_hub have errors of their own, which change
        raise RopextError(f"{asked} could not be downloaded: {_reason(error)}. Try again") from error


def _missing(asked: str, error: Exception) -> RopextError:
    """What is wrong with an id that the cache does not hold while the hub cannot be asked."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return UsageError(
            f"a MODEL is a checkpoint directory, or a hub id: {asked!r} is no directory here and not whole in the "
            "cache, and HF_HUB_OFFLINE is set. Name a directory, or unset it"
        )
    return RopextError(
        f"a hub id needs a network or the cache: {asked!r} is not whole in the cache, and the hub cannot be reached "
        f"({_reason(error)}). Name a directory, or try again"
    )


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
