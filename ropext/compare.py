"""Several models scored on the same text, side by side: checkpoints, or patches of one made in memory.

Lengths in tokens.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.cut import EVERYTHING, Cut, Limits, Windows, cut_windows, slide_windows
from ropext.entrant import Entrant
from ropext.errors import RopextError, UsageError
from ropext.figures import Measurement, ModelScores, Paired, Protocol, TaskScore
from ropext.kept import Shelf, weights_identity
from ropext.load import check_arithmetic, default_device, load_model, load_tokenizer, set_rotary, stock_config
from ropext.measure import Measured, measure
from ropext.process import Team
from ropext.retrieval import check_tasks, effective_lengths, no_task_score, run_tasks
from ropext.score import has_changing_table
from ropext.summary import paired
from ropext.texts import Document, built_in, read_documents
from ropext.version import __version__

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # label, rows done, rows in all

KEPT_FORMAT = 1  # of the kept scores; another number makes them anew
THRESHOLD = 0.85  # of an effective length; RULER asks for Llama-2-7B at 4k, 85.6% (arXiv:2404.06654)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """What is asked beside the perplexity."""

    names: tuple[str, ...] = ()
    samples: int = 50  # examples of a task at each length
    seed: int = 0
    threshold: float = THRESHOLD  # score that an effective length asks for
    include_path: Path | None = None  # folder of lm-eval tasks of the user's

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"--samples is at least 1: found {self.samples}")
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"--threshold is a score from 0 to 1: found {self.threshold}")

    def run(
        self,
        name: str,
        model: PreTrainedModel,
        path: Path,
        lengths: Sequence[int],
        batch_size: int,
        team: Team,
        told: Callable[[int, int], None] | None,
    ) -> tuple[TaskScore, ...]:
        """The scores of one of them on the model of a checkpoint."""
        return run_tasks(
            model,
            load_tokenizer(path),
            [name],
            lengths=lengths,
            samples=self.samples,
            seed=self.seed,
            include_path=self.include_path,
            batch_size=batch_size,
            team=team,
            progress=told,
        )

    def protocol(self) -> dict[str, object]:
        """How they were made; empty without any."""
        return {"samples": self.samples, "seed": self.seed, "threshold": self.threshold} if self.names else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What every model is scored on, and how."""

    lengths: tuple[int, ...]
    data: str | None  # file, folder or hub data set; None for the built-in corpus
    text_field: str = "text"
    stride: int | None = None  # tokens; None for consecutive windows
    window: int | None = None  # tokens of a window; None for the longest asked length that some document reaches
    last_tokens: int | None = None  # of each window, scored under each context length; None for not at all
    limits: Limits = EVERYTHING
    batch_size: int = 1
    device: str | None = None
    dtype: str = "float32"
    tasks: Tasks = field(default_factory=Tasks)
    kept_in: Path  # folder of the kept scores
    rescore: bool = False  # whatever is kept

    def __post_init__(self) -> None:
        if self.stride is not None and (self.window is not None or self.last_tokens is not None):
            raise UsageError(
                "--window and --last-tokens belong to whole windows: leave them out, or leave out --stride"
            )
        if self.window is not None and self.window < max(self.lengths, default=0):
            raise UsageError(
                f"--window holds the longest of --lengths, {max(self.lengths)} tokens: found {self.window}"
            )
        if self.last_tokens is not None and not 1 <= self.last_tokens < max(self.lengths, default=0):
            raise UsageError(
                f"--last-tokens lies between 1 and the longest length less 1: found {self.last_tokens}, lengths "
                f"{list(self.lengths)}"
            )
        if self.batch_size < 1:
            raise UsageError(f"--batch-size is at least 1: found {self.batch_size}")

    @property
    def data_name(self) -> str:
        """The text, in words."""
        return self.data or f"the built-in corpus, held-out split (Python {platform.python_version()})"

    def documents(self) -> Iterator[Document]:
        """The text."""
        return built_in("held-out") if self.data is None else read_documents(self.data, self.text_field)

    def run(
        self, entrants: Sequence[Entrant], *, team: Team, say: Say, progress: Progress | None = None
    ) -> Measurement:
        """Score each entrant, and compare each with the first; models with the same tokenizer share their windows."""
        device = team.device or self.device or default_device()
        check_arithmetic(device, self.dtype)
        if self.tasks.names:
            check_tasks(self.tasks.names, self.tasks.include_path)
        models = _Models(dtype=self.dtype, device=device)
        cuts: dict[bytes, Cut] = {}
        found: list[tuple[Cut, ModelScores, Measured]] = []
        for entrant in entrants:
            key = _tokenizer_identity(entrant.checkpoint.path)
            if key not in cuts:
                cuts[key] = self._cut(entrant.checkpoint.path)
            found.append((cuts[key], *self._score(entrant, cuts[key], models, team, say, progress)))
        cut = found[0][0]
        return Measurement(
            models=tuple(scores for _, scores, _ in found),
            comparisons=tuple(self._pairs(found)),
            protocol=Protocol(
                definition="truncated" if self.stride is None else "sliding",
                stride=self.stride,
                window=cut.length if isinstance(cut, Windows) else None,
                bos=cut.bos,
                data=self.data_name,
                data_hash=cut.data_hash,
                dtype=self.dtype,
                device=models.kind,
                versions=_versions(),
                tasks=self.tasks.protocol(),
            ),
        )

    def _cut(self, path: Path) -> Cut:
        tokenizer = load_tokenizer(path)
        if self.stride is not None:
            return slide_windows(tokenizer, self.documents(), self.lengths, self.stride, self.limits)
        lengths = self.lengths if self.window is None else (self.window,)
        return cut_windows(tokenizer, self.documents(), lengths, self.limits)

    def _score(
        self, entrant: Entrant, cut: Cut, models: _Models, team: Team, say: Say, progress: Progress | None
    ) -> tuple[ModelScores, Measured]:
        """Every figure of one entrant."""
        path, label = entrant.checkpoint.path, entrant.label
        config = stock_config(entrant.config)
        static = not has_changing_table(config)
        notes = list(self._notes(entrant, cut, config, static))
        for severity, note in notes:
            say(f"{severity:9} {entrant.label}: {note}")
        weights = weights_identity(entrant.checkpoint, self.kept_in)
        measured = measure(
            lambda: models.of(entrant),
            cut,
            self.lengths,
            static=static,
            last_tokens=self.last_tokens,
            batch_size=self.batch_size,
            shelf=self._shelf(weights, entrant, cut, models.kind),
            rescore=self.rescore,
            team=team,
            told=None if progress is None else lambda done, total: progress(label, done, total),
        )
        tasks: list[TaskScore] = []
        for name in self.tasks.names:
            told = None if progress is None else partial(progress, f"{label} {name}")
            try:
                tasks += self.tasks.run(name, models.of(entrant), path, self.lengths, self.batch_size, team, told)
            except UsageError:
                raise
            except RopextError as error:  # the other figures stay
                tasks.append(no_task_score(name))
                notes.append(("warn", f"the task {name} failed: {error}"))
                say(f"warn      {label}: the task {name} failed: {error}")
        scores = ModelScores(
            model=str(path),
            label=entrant.label,
            window=entrant.window,
            native_length=entrant.native_length,
            weights_sha256=weights,
            rope=entrant.rope,
            notes=tuple(note if severity == "note" else f"{severity}: {note}" for severity, note in notes),
            results=measured.results,
            by_position=measured.by_position,
            by_context=measured.by_context,
            tasks=tuple(tasks),
            effective_lengths=effective_lengths(tasks, self.tasks.threshold),
            passes=measured.passes,
        )
        return scores, measured

    def _shelf(self, weights: str, entrant: Entrant, cut: Cut, device: str) -> Shelf:
        """By all that the losses depend on."""
        config = json.dumps(entrant.config, sort_keys=True).encode()
        identity = {
            "format": KEPT_FORMAT,
            "weights": weights,
            "config": hashlib.sha256(config).hexdigest(),
            "tokens": cut.tokens_hash,
            "dtype": self.dtype,
            "device": device,
            "versions": _versions(),
        }
        return Shelf.of(self.kept_in, identity)

    def _pairs(self, found: Sequence[tuple[Cut, ModelScores, Measured]]) -> Iterator[Paired]:
        """Each model but the first, at each length that both were measured at."""
        cut, first, reference = found[0]
        for other_cut, scores, measured in found[1:]:
            for length in self.lengths:
                if length in measured.totals and length in reference.totals:
                    pair = paired(
                        length,
                        (scores.label, measured.totals[length]),
                        (first.label, reference.totals[length]),
                        same_tokens=other_cut is cut,
                    )
                    if pair is not None:
                        yield pair

    def _notes(self, entrant: Entrant, cut: Cut, config: PretrainedConfig, static: bool) -> Iterator[tuple[str, str]]:
        """What a reader of the figures should know, each with its severity."""
        for finding in entrant.findings:
            yield finding.severity, f"{finding.message}. {finding.fix} [{finding.code}]"
        measured = [length for length in self.lengths if length <= cut.longest]
        if measured and max(measured) > entrant.window:
            yield "note", f"{max(measured)} tokens are beyond its window of {entrant.window}"
        if not static and self.stride is None and measured:
            cost = sum(measured) / max(measured)
            yield "note", f"its rotary table changes with the length, so {cost:.2f} times one pass"
        if lists := longrope_lists(config, measured):
            yield "note", f"longrope takes {lists}"
        if seen := entrant.trained_on.intersection(cut.documents):
            yield "warn", f"was trained on {len(seen)} of the {len(cut.documents)} documents scored"


@dataclass(kw_only=True, slots=True)
class _Models:
    """The model in memory: one at a time, loaded when it is first needed, with the rope that each entrant wants."""

    dtype: str
    device: str
    path: Path | None = None
    config: Mapping[str, Any] | None = None
    model: PreTrainedModel | None = None

    @property
    def kind(self) -> str:
        """Of device: cpu, cuda ..."""
        return self.device.split(":")[0]

    def of(self, entrant: Entrant) -> PreTrainedModel:
        """The entrant's model. Raises RopextError where it cannot be loaded whole."""
        if self.model is None or self.path != entrant.checkpoint.path:
            self.model = None  # before the next one takes its memory
            self.path, self.config = entrant.checkpoint.path, entrant.checkpoint.config
            self.model = load_model(self.path, dtype=self.dtype, device=self.device)
        if self.config != entrant.config:
            set_rotary(self.model, entrant.config)
            self.config = entrant.config
        return self.model


def longrope_lists(config: PretrainedConfig, lengths: Sequence[int]) -> str:
    """Which of its two lists a longrope model takes at each length, in words; empty for any other model.

    The long one from one token beyond the original length on, as transformers chooses (longrope_frequency_update).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return ""
    original = rope["original_max_position_embeddings"]
    return ", ".join(f"the {'long' if length > original else 'short'} list at {length}" for length in sorted(lengths))


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"ropext": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _tokenizer_identity(path: Path) -> bytes:
    """Bytes that decide how text becomes tokens; the length limit of tokenizer_config.json does not."""
    file = path / "tokenizer.json"
    return file.read_bytes() if file.exists() else str(path.resolve()).encode()


def ranked(measurement: Measurement) -> Measurement:
    """The first model, then the others by their loss at the longest length that was measured, the best first; that one
    is judged."""
    first, *others = measurement.models

    def key(scores: ModelScores) -> tuple[int, float]:
        measured = [figure for figure in scores.results if figure.nll is not None]
        longest = max(measured, key=lambda figure: figure.length, default=None)
        return (0, 0.0) if longest is None or longest.nll is None else (-longest.length, longest.nll)

    others.sort(key=key)
    labels = [scores.label for scores in others]
    pairs = sorted(measurement.comparisons, key=lambda pair: labels.index(pair.label))
    return replace(measurement, models=(first, *others), comparisons=tuple(pairs), judged=labels[0])
