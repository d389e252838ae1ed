"""Several models scored on the same text, side by side.

Lengths in tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.checkpoint import Checkpoint, open_checkpoint
from ropext.cut import Cut, cut_windows, slide_windows
from ropext.facts import read_facts
from ropext.load import default_device, load_model, load_tokenizer
from ropext.provenance import lineage
from ropext.safety import Finding, judge_scored
from ropext.score import ModelScores, Protocol, has_changing_table, score
from ropext.texts import Document, built_in, read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """One model to score."""

    path: Path
    label: str
    window: int
    native_length: int
    trained_on: frozenset[str]  # sha256 of documents
    findings: tuple[Finding, ...]  # what the rules say of it

    @classmethod
    def of(cls, path: Path, label: str) -> Entrant:
        """Read from the checkpoint at `path`. Raises Refused where it has no rotary embedding or is damaged."""
        checkpoint = open_checkpoint(path)
        facts = read_facts(checkpoint)
        verdict = judge_scored(checkpoint, facts)
        verdict.require()
        documents = (checkpoint.record or {}).get("training", {}).get("documents", [])
        return cls(
            path=path,
            label=label,
            window=facts.window,
            native_length=facts.native_length,
            trained_on=frozenset(documents),
            findings=verdict.findings,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What every model is scored on, and how."""

    lengths: tuple[int, ...]
    data: str | None  # file or folder; None for the built-in corpus
    text_field: str
    stride: int | None  # tokens; None for consecutive windows
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
        cuts: dict[bytes, Cut] = {}
        scores = []
        for entrant in entrants:
            key = _tokenizer_identity(entrant.path)
            if key not in cuts:
                cuts[key] = self._cut(entrant.path)
            cut = cuts[key]
            model = load_model(entrant.path, dtype=self.dtype, device=self.device or default_device())
            for note in self._notes(entrant, cut, model):
                say(note)
            told = None if progress is None else _named(progress, entrant.label)
            results, by_position = score(model, cut, self.lengths, batch_size=self.batch_size, progress=told)
            scores.append(
                ModelScores(model=str(entrant.path), label=entrant.label, results=results, by_position=by_position)
            )
        protocol = Protocol(
            definition="truncated" if self.stride is None else "sliding",
            stride=self.stride,
            bos=cut.bos,
            data=self.data_name,
            data_hash=cut.data_hash,
            dtype=self.dtype,
        )
        return tuple(scores), protocol

    def _cut(self, path: Path) -> Cut:
        tokenizer = load_tokenizer(path)
        if self.stride is None:
            return cut_windows(tokenizer, self.documents(), self.lengths, self.limit)
        return slide_windows(tokenizer, self.documents(), self.lengths, self.stride, self.limit)

    def _notes(self, entrant: Entrant, cut: Cut, model: PreTrainedModel) -> Iterator[str]:
        """What a reader of the figures should know beforehand."""
        for finding in entrant.findings:
            yield f"{finding.severity:9} {entrant.label}: {finding.message}. {finding.fix} [{finding.code}]"
        measured = [length for length in self.lengths if length <= cut.longest]
        if measured and max(measured) > entrant.window:
            yield f"note      {entrant.label}: {max(measured)} tokens are beyond its window of {entrant.window}"
        if has_changing_table(model) and self.stride is None and measured:
            cost = sum(measured) / max(measured)
            yield f"note      {entrant.label}: its rotary table changes with the length, so {cost:.2f} times one pass"
        if lists := longrope_lists(model, measured):
            yield f"note      {entrant.label}: longrope takes {lists}"
        seen = entrant.trained_on.intersection(cut.documents)
        if seen:
            yield f"note      {entrant.label} was trained on {len(seen)} of the {len(cut.documents)} documents scored"


def longrope_lists(model: PreTrainedModel, lengths: Sequence[int]) -> str:
    """Which of its two lists a longrope model takes at each length, in words; empty for any other model.

    The long one from one token beyond the original length on, as transformers chooses (longrope_frequency_update).
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return ""
    original = rope["original_max_position_embeddings"]
    return ", ".join(f"the {'long' if length > original else 'short'} list at {length}" for length in sorted(lengths))


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


def _tokenizer_identity(path: Path) -> bytes:
    """Bytes that decide how text becomes tokens; the length limit of tokenizer_config.json does not."""
    file = path / "tokenizer.json"
    return file.read_bytes() if file.exists() else str(path.resolve()).encode()
