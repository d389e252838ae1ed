"""Documents: where the text to train on and to measure with comes from.

A document is one text that belongs together; nothing here joins or cuts documents. Sizes are in characters.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropext.errors import RopextError, UsageError

TEXT_SUFFIXES = (".txt", ".md", ".py")
LEFT_OUT = frozenset({"test", "tests", "idlelib", "tkinter", "lib2to3", "pydoc_data"})
HELD_OUT_SHARE = 5  # one module in five


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text and the name it is reported under."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Identity of the text, whatever it is called: hex digest of its UTF-8 bytes."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def read_documents(source: str, text_field: str = "text") -> Iterator[Document]:
    """Documents of a text file (one), a folder (its text files, by path), or a JSONL file (one a row).

    Checks `source` at once, reads while iterated. Raises UsageError where there is nothing of these kinds, RopextError
    where a file is not what its name says.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise UsageError(f"a folder of --data needs {', '.join(TEXT_SUFFIXES)} files: {source} has none")
        return (Document(name=str(file), text=_read_text(file)) for file in files)
    if not path.is_file():
        raise UsageError(f"--data is a file or folder: {source!r} is none. Hub data sets are not built yet")
    if path.suffix.lower() in TEXT_SUFFIXES:
        return (Document(name=str(file), text=_read_text(file)) for file in [path])
    if path.suffix.lower() == ".jsonl":
        return _read_rows(path, text_field)
    raise UsageError(f"--data takes {', '.join(TEXT_SUFFIXES)}, .jsonl or a folder: found {path.name}, not built yet")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RopextError(f"a text must be readable UTF-8: {path} is not ({error})") from None


def _read_rows(path: Path, text_field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_field]
                text.encode()  # half a surrogate pair is no text: no tokenizer takes it
            except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                text = None
            if not isinstance(text, str):
                raise RopextError(
                    f"each row is a JSON object with its text in {text_field!r}: {path} line {number} is not. "
                    "Name the field with --text-field"
                )
            yield Document(name=f"{path}:{number}", text=text)


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
