"""Several models scored on the same text, side by side.

Lengths in tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropext.checkpoint import Checkpoint, open_checkpoint
from ropext.facts import read_facts
from ropext.load import default_device, load_model, load_tokenizer
from ropext.provenance import lineage
from ropext.score import ModelScores, Protocol, Windows, cut_windows, score
from ropext.texts import Document, built_in, read_documents

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """One model to score."""

    path: Path
    label: str
    window: int
    native_length: int
    trained_on: frozenset[str]  # sha256 of documents

    @classmethod
    def of(cls, path: Path, label: str) -> Entrant:
        """Read from the checkpoint at `path`. Raises Refused where it has no rotary embedding or is damaged."""
        checkpoint = open_checkpoint(path)
        facts = read_facts(checkpoint)
        documents = (checkpoint.record or {}).get("training", {}).get("documents", [])
        return cls(
            path=path,
            label=label,
            window=facts.window,
            native_length=facts.native_length,
            trained_on=frozenset(documents),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What every model is scored on, and how."""

    lengths: tuple[int, ...]
    data: str | None  # file or folder; None for the built-in corpus
    text_field: str
    limit: int | None  # documents
    batch_size: int
    device: str | None
    dtype: str

    @property
    def data_name(self) -> str:
        """The text, in words."""
        return self.data or f"the built-in corpus, held-out split (Python {platform.python_version()})"

    def documents(self) -> Iterator[Document]:
        """The text."""
        return built_in("held-out") if self.data is None else read_documents(self.data, self.text_field)

    def run(
        self, entrants: Sequence[Entrant], *, say: Say, progress: Callable[[str, int, int], None] | None
    ) -> tuple[tuple[ModelScores, ...], Protocol]:
        """Score each entrant; models with the same tokenizer share their windows.

        `progress` is told the label, the windows done and the windows in all.
        """
        cuts: dict[bytes, Windows] = {}
        scores = []
        for entrant in entrants:
            key = _tokenizer_identity(entrant.path)
            if key not in cuts:
                cuts[key] = cut_windows(load_tokenizer(entrant.path), self.documents(), self.lengths, self.limit)
            windows = cuts[key]
            for note in _notes(entrant, windows):
                say(note)
            model = load_model(entrant.path, dtype=self.dtype, device=self.device or default_device())
            told = None if progress is None else _named(progress, entrant.label)
            results, by_position = score(model, windows, self.lengths, batch_size=self.batch_size, progress=told)
            scores.append(
                ModelScores(model=str(entrant.path), label=entrant.label, results=results, by_position=by_position)
            )
        protocol = Protocol(
            definition="truncated",
            stride=None,
            bos=windows.bos,
            data=self.data_name,
            data_hash=windows.data_hash,
            dtype=self.dtype,
        )
        return tuple(scores), protocol


def lineage_of(checkpoint: Checkpoint, built_in_path: Path) -> list[Entrant]:
    """A checkpoint and what it came from, in the order source, patched, tuned; a label stands once."""
    steps = lineage(checkpoint, built_in_path)
    labels = [label for label, _ in steps]
    return [
        Entrant.of(path, label if labels.count(label) == 1 else f"{label} {number}")
        for number, (label, path) in enumerate(steps)
    ]


def _named(progress: Callable[[str, int, int], None], label: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(label, done, total)


def _notes(entrant: Entrant, windows: Windows) -> Iterator[str]:
    """What a reader of the figures should know beforehand."""
    if windows.length > entrant.window:
        yield f"note      {entrant.label}: {windows.length} tokens are beyond its window of {entrant.window}"
    seen = entrant.trained_on.intersection(windows.documents)
    if seen:
        yield f"note      {entrant.label} was trained on {len(seen)} of the {len(windows.documents)} documents scored"


def _tokenizer_identity(path: Path) -> bytes:
    """Bytes that decide how text becomes tokens; the length limit of tokenizer_config.json does not."""
    file = path / "tokenizer.json"
    return file.read_bytes() if file.exists() else str(path.resolve()).encode()
