"""Scores that are kept: the loss of every token of a model on a text, so that no model runs twice for the same figure.

One compressed file for each model, text and protocol: its name is a hash of all that the losses depend on. A file that
cannot be read counts as absent. Losses in nats, float64 `[S]`, in the order of a pass (ropext.cut).
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.checkpoint import Checkpoint
from ropext.cut import FIRST, Pass
from ropext.provenance import weights_sha256
from ropext.staging import whole_file
from ropext.summary import scored_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HASHES = "weights.json"  # in the folder of the scores: weight files by inode, size and time -> hash
ABOUT = "about"  # what a file of scores depends on, in it beside the losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelf:
    """Where the scores of one model on one text by one protocol are kept."""

    path: Path
    identity: str  # canonical JSON of all that the losses depend on

    @classmethod
    def of(cls, folder: Path, identity: Mapping[str, Any]) -> Shelf:
        """In `folder`; `identity` holds hashes, names and numbers."""
        text = json.dumps(identity, sort_keys=True, allow_nan=False)
        return cls(path=folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npz", identity=text)

    def read(self) -> dict[str, NDArray[np.float64]]:
        """The losses of each pass that is kept, by its name."""
        import numpy as np

        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as content:
                found = {name: content[name] for name in content.files}
        except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error):
            return {}
        return found if str(found.pop(ABOUT, "")) == self.identity else {}

    def write(self, losses: Mapping[str, NDArray[np.float64]]) -> None:
        """Keeps these and no others, whole or not at all. Raises OSError where that cannot be done."""
        import numpy as np

        everything: dict[str, Any] = {ABOUT: np.asarray(self.identity), **losses}

        def fill(part: Path) -> None:
            with part.open("wb") as file:  # savez would add .npz to a name
                np.savez_compressed(file, **everything)

        whole_file(self.path, fill)


def kept_losses(
    run: Pass, kept: Mapping[str, NDArray[np.float64]], *, longer_serves: bool
) -> NDArray[np.float64] | None:
    """The losses of a whole pass among the kept ones. Those of an interrupted one, which kept its first rows, are none.

    With `longer_serves` (a static rotary table) those of the beginnings of windows are taken from a pass over longer
    beginnings of the same windows too.
    """
    own = kept.get(run.name)
    if own is not None and len(own) == scored_of(run).sum():
        return own
    if longer_serves and run.name.startswith(FIRST):
        rows, wanted = len(run.rows), len(run.rows[0]) - 1
        for name, losses in kept.items():
            width = int(name.removeprefix(FIRST)) - 1 if name.startswith(FIRST) else 0
            if width >= wanted and len(losses) == rows * width:
                return losses.reshape(rows, width)[:, :wanted].reshape(-1)
    return None


def weights_identity(source: Checkpoint, folder: Path) -> str:
    """weights_sha256, made once for files that stay as they are: kept in `folder` by inode, size and time."""
    files = [(source.path / name).stat() for name in sorted(source.weight_files)]
    key = " ".join(f"{one.st_dev}:{one.st_ino}:{one.st_size}:{one.st_mtime_ns}" for one in files)
    known = _known_hashes(folder / HASHES)
    if key not in known:
        known[key] = weights_sha256(source)
        text = json.dumps(known, indent=2) + "\n"
        with suppress(OSError):  # then it is made anew the next time
            whole_file(folder / HASHES, lambda part: part.write_text(text, encoding="utf-8"))
    return known[key]


def _known_hashes(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}
