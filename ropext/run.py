"""One run of fine-tuning: text and stages in, a checkpoint a stage out, and the last of them at the destination.

Beside the destination OUT stands OUT.run: logs (TensorBoard), stages (the checkpoints before the last), and while it
is unfinished the saved states that --resume goes on from.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropext.checkpoint import RECORD, Checkpoint
from ropext.extension import Extension
from ropext.lengths import format_length
from ropext.load import default_device, load_model, load_tokenizer, set_rotary
from ropext.pack import tokenize
from ropext.provenance import finetune_record
from ropext.schedule import Stage
from ropext.state import saved_states
from ropext.texts import Document
from ropext.train import Settings, StageResult, tune
from ropext.write import check_weights_fit, json_bytes, patched_files, write_tuned

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run is made of."""

    source: Checkpoint
    model: str  # how the source is named in ropext.json
    extension: Extension
    documents: tuple[Document, ...]
    data: str  # what the documents are
    stages: tuple[Stage, ...]
    settings: Settings
    out: Path

    @property
    def folder(self) -> Path:
        """Where states, logs and earlier stages lie."""
        return self.out.with_name(self.out.name + ".run")

    def train(self, *, device: str | None, resume: bool, say: Say) -> tuple[StageResult, ...]:
        """Run every stage; returns what each did. Leaves `out` whole, or resumable states in `folder`."""
        corpus = tokenize(load_tokenizer(self.source.path), self.documents)
        model: Any = load_model(self.source.path, device=device or default_device())
        check_weights_fit(self.source, model)
        results = tune(
            model,
            [corpus.windows(stage.length) for stage in self.stages],
            self.stages,
            self.settings,
            run_folder=self.folder,
            enter_stage=lambda model, stage: set_rotary(model, self.extension.at(stage.length).config),
            leave_stage=self._leave,
            say=say,
            resume=resume,
        )
        for state in saved_states(self.folder):
            shutil.rmtree(state)
        return results

    def _leave(self, model: Any, stage: Stage, results: Sequence[StageResult]) -> None:
        """Write the checkpoint of a finished stage; one that a killed run already left is written again."""
        rope = self.extension.at(stage.length)
        files = patched_files(self.source, rope.config, self.source.config["max_position_embeddings"], rope.window)
        record = finetune_record(
            self.source,
            self.model,
            rope=rope.record,
            window=rope.window,
            native_length=max(stage.length, self.extension.native_length),
            training={
                "stages": [asdict(result) for result in results],
                "peak_rate": self.settings.peak_rate,
                "seed": self.settings.seed,
                "data": self.data,
                "documents": [document.sha256 for document in self.documents],
            },
        )
        last = stage is self.stages[-1]
        out = self.out if last else self.folder / "stages" / format_length(stage.length)
        write_tuned(self.source, model, out, {**files, RECORD: json_bytes(record)}, overwrite=None if last else True)
