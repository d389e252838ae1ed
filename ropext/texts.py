"""Documents: where the text to train on and to measure with comes from.

A document is one text that belongs together; nothing here joins or cuts documents. Rows and long texts are read when
they are asked for, so a source may be larger than the memory. Sizes are in characters, those of files in bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.errors import RopextError, UsageError, first_line, short

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

TEXT_SUFFIXES = (".txt", ".md", ".py")  # a file is one document
ROW_SUFFIXES = (".jsonl", ".parquet")  # a row is one document
LARGE_FILE = 8 * 2**20  # bytes or characters: a text above this comes in pieces; a tokenizer takes 200 bytes for each
PIECE = 2**20  # characters of such a file that are held at a time, at most
ROWS_AT_ONCE = 16  # of a Parquet file: documents may be long
DEFAULT_SPLITS = ("test", "validation")  # of a hub data set that has several
LEFT_OUT = frozenset({"test", "tests", "idlelib", "tkinter", "lib2to3", "pydoc_data"})
HELD_OUT_SHARE = 5  # one module in five

_DATA_SET = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[^:/\s]+)(:(?P<split>[\w.-]+))?)?", re.ASCII)
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text and the name it is reported under."""

    name: str
    text: str

    def pieces(self) -> Iterator[str]:
        """The text in order: one piece, or several of at most `PIECE` characters where it is too long to hold."""
        if len(self.text) <= LARGE_FILE:
            yield self.text
            return
        lines = StringIO(self.text, newline="")
        while piece := lines.read(PIECE // 2):
            yield piece if piece.endswith("\n") else piece + lines.readline(PIECE // 2)

    @property
    def sha256(self) -> str:
        """Identity of the text, whatever it is called and however it is cut: hex digest of its UTF-8 bytes."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


class LargeText(Document):
    """A text file that is read anew, a piece at a time, whenever its text is asked for; `text` would hold it whole."""

    __slots__ = ("path",)
    path: Path

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "name", str(path))
        object.__setattr__(self, "path", path)

    @property
    def text(self) -> str:
        """The whole text, however large."""
        return "".join(self.pieces())

    def pieces(self) -> Iterator[str]:
        """Pieces that end where a line ends, unless a line is longer than half of `PIECE`."""
        try:
            with self.path.open(encoding="utf-8") as file:
                while piece := file.read(PIECE // 2):
                    yield piece if piece.endswith("\n") else piece + file.readline(PIECE // 2)
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(self.path, error) from None


def read_documents(source: str, text_field: str = "text") -> Iterator[Document]:
    """Documents of a text file (one), a JSONL or Parquet file (one a row), a folder, or a split of a hub data set.

    A folder is all its files of these kinds, by path, whatever their mixture. What exists here is never looked for on
    the hub. Checks `source` at once, reads while iterated. Raises UsageError where there is nothing of these kinds,
    RopextError where a file is not what its name says, or the hub cannot be reached.
    """
    path = Path(source)
    if os.path.isdir(source):
        suffixes = TEXT_SUFFIXES + ROW_SUFFIXES
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
        if not files:
            raise UsageError(f"a folder of --data needs {', '.join(suffixes)} files: {source} has none")
        return (document for file in files for document in _read_file(file, text_field))
    if os.path.isfile(source):
        return _read_file(path, text_field)
    found = _DATA_SET.fullmatch(source)
    if found is None or path.suffix.lower() in TEXT_SUFFIXES + ROW_SUFFIXES or os.path.lexists(found["id"]):
        raise UsageError(
            "--data is a file, a folder or a hub data set (org/name, org/name:config or org/name:config:split): "
            f"{short(source)} is no file or folder here, and no name of a data set"
        )
    return _read_data_set(source, found["id"], found["config"], found["split"], text_field)


def _read_file(path: Path, text_field: str) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path, text_field)
    if suffix == ".jsonl":
        return _read_jsonl(path, text_field)
    if suffix in TEXT_SUFFIXES:
        return map(_read_text, [path])
    raise UsageError(f"--data takes {', '.join(TEXT_SUFFIXES + ROW_SUFFIXES)} files: found {path.name}")


def _read_text(path: Path) -> Document:
    try:
        if path.stat().st_size > LARGE_FILE:
            return LargeText(path)
        return Document(name=str(path), text=path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> RopextError:
    return RopextError(f"a text must be readable UTF-8: {path} is not ({error})")


def _read_jsonl(path: Path, text_field: str) -> Iterator[Document]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                yield Document(name=f"{path}:{number}", text=_text(row, f"{path} line {number}", text_field))
    except OSError as error:
        raise RopextError(f"--data must be readable: {path} is not ({error})") from None


def _text(row: object, place: str, text_field: str) -> str:
    """The text of a row. Raises RopextError that names the row and what it holds instead."""
    if not isinstance(row, dict):
        found = "no JSON object"
    elif text_field not in row:
        found = f"its fields are {_names(row)}"
    elif not isinstance(text := row[text_field], str):
        found = f"found {short(text)}"
    elif _HALF_PAIR.search(text):
        found = "found half a surrogate pair, which no tokenizer takes"
    else:
        return text
    raise RopextError(
        f"each row is an object with its text in {text_field!r}: {place} is not ({found}). "
        "Name the field with --text-field"
    )


def _names(names: Iterable[object]) -> str:
    """Names for a message of one line, however many there are."""
    first, *more = [short(name) for name in names] or ["none"]
    return ", ".join([first, *more[:9]]) + (", ..." if len(more) > 9 else "")


def _read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        # By default all that was read stays in memory (pre_buffer), or a row group is read whole (buffer_size).
        file = ParquetFile(path, pre_buffer=False, buffer_size=2**20)
        columns = file.schema_arrow.names
    except (ArrowException, OSError) as error:
        raise _damaged(path, 0, error) from None
    _check_columns(columns, text_field, str(path))
    return _parquet_rows(file, path, text_field)


def _parquet_rows(file: ParquetFile, path: Path, text_field: str) -> Iterator[Document]:
    from pyarrow import ArrowException

    number = 0
    try:
        with file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[text_field], use_threads=False):
                for value in batch.column(text_field):
                    row = {text_field: value.as_py()}
                    number += 1
                    yield Document(name=f"{path}:{number}", text=_text(row, f"{path} row {number}", text_field))
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, number, error) from None


def _damaged(path: Path, rows: int, error: Exception) -> RopextError:
    return RopextError(f"a .parquet file must be whole: {path} fails after {rows} rows ({first_line(error)})")


def _check_columns(columns: Sequence[str], text_field: str, place: str) -> None:
    if columns.count(text_field) > 1:
        raise UsageError(f"one column holds the text: {place} has {columns.count(text_field)} named {text_field!r}")
    if text_field not in columns:
        raise UsageError(
            f"the text is in the column {text_field!r}: {place} has {_names(columns)}. "
            "Name one of them with --text-field"
        )


def _read_data_set(
    source: str, name: str, config: str | None, split: str | None, text_field: str
) -> Iterator[Document]:
    splits = _splits(source, name, config)
    if split is None:
        usual = [known for known in DEFAULT_SPLITS if known in splits]
        split = next(iter(splits)) if len(splits) == 1 else next(iter(usual), None)
    if split not in splits:
        asked = "has no test or validation split" if split is None else f"has no split {split!r}"
        raise UsageError(f"a data set is read a split at a time: {source} {asked}. Its splits: {_names(splits)}")
    rows = splits[split]
    if rows.column_names is not None:  # they are not known of every format before a row is read
        _check_columns(rows.column_names, text_field, source)
        rows = rows.select_columns([text_field])
    return _data_set_rows(rows, f"{name}:{config or 'default'}:{split}", text_field)


def _splits(source: str, name: str, config: str | None) -> Any:
    """The splits of a hub data set, by name, none of them read yet. `datasets` runs no code of a data set."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import HfApi, errors
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        if not HF_HUB_OFFLINE:  # load_dataset tries for half a minute before it says that there is no network
            HfApi().dataset_info(name, timeout=10)
        return load_dataset(name, config, streaming=True)
    except errors.GatedRepoError as error:
        raise RopextError(
            f"a gated data set needs its owners' consent: {name} is one. Ask for access at "
            f"https://huggingface.co/datasets/{name}, then `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, DatasetNotFoundError, errors.HFValidationError) as error:
        raise UsageError(
            f"--data is a file, a folder or a hub data set: {source!r} is no file or folder here, and the hub knows no "
            "such data set (a private one needs `hf auth login`)"
        ) from error
    except ValueError as error:  # no such configuration, or several and none named: the second line may list them
        reason = " ".join(str(error).splitlines()[:2])
        raise UsageError(
            f"a hub data set is org/name, org/name:config or org/name:config:split: {source!r} cannot be opened "
            f"({reason})"
        ) from error
    except Exception as error:  # the HTTP clients below datasets have errors of their own, which change
        if HF_HUB_OFFLINE:
            raise UsageError(
                f"--data is a file, a folder or a hub data set: {source!r} is no file or folder here and not in the "
                "cache, and HF_HUB_OFFLINE is set. Name a file, or unset it"
            ) from error
        raise RopextError(
            f"--data {source!r} is no file or folder here, and could not be had from the hub: {first_line(error)}. "
            "Name a file, or try again"
        ) from error


def _data_set_rows(rows: Iterable[object], name: str, text_field: str) -> Iterator[Document]:
    number = 0
    try:
        for row in rows:
            number += 1
            yield Document(name=f"{name}:{number}", text=_text(row, f"{name} row {number}", text_field))
    except RopextError:
        raise
    except Exception as error:  # those HTTP clients again
        raise RopextError(f"{name} could not be read after {number} rows: {first_line(error)}. Try again") from error


def is_held_out(module: str) -> bool:
    """Whether the built-in corpus keeps this dotted module name away from training."""
    return hashlib.sha256(module.encode()).digest()[0] % HELD_OUT_SHARE == 0


def standard_library() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of each module that the built-in corpus takes from the running Python, by name.

    A folder that no import statement can name (site-packages, config-3.11-...) holds no module of it.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if all(part.isidentifier() for part in parts) and not LEFT_OUT.intersection(parts):
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return iter(sorted(found))


def built_in(split: str) -> Iterator[Document]:
    """The built-in corpus, ordered by module name: `split` is "training" or "held-out"."""
    for module, path in standard_library():
        if is_held_out(module) == (split == "held-out"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield Document(name=module, text=text)


def without_copies(documents: Iterable[Document], of: Sequence[Document]) -> Iterator[Document]:
    """The documents that do not share most of their lines with one of `of` (vendored copies, backports)."""
    owners: dict[str, set[int]] = {}
    for number, held in enumerate(of):
        for line in _telling_lines(held.text):
            owners.setdefault(line, set()).add(number)
    for document in documents:
        lines = _telling_lines(document.text)
        shared = [0] * len(of)
        for line in lines:
            for number in owners.get(line, ()):
                shared[number] += 1
        if not lines or max(shared, default=0) * 2 <= len(lines):
            yield document


def _telling_lines(text: str) -> set[str]:
    """Lines long enough that two files do not share them by chance."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) > 20}
