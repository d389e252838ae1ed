"""One run of fine-tuning: text and stages in, a checkpoint a stage out, and the last of them at the destination.

Beside the destination OUT stands OUT.run: logs (TensorBoard), stages (the checkpoints before the last), and while it
is unfinished the saved states that --resume goes on from.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext.adapter import add_lora, merged_state, save_adapter
from ropext.checkpoint import RECORD, Checkpoint
from ropext.errors import Refused
from ropext.extension import Extension, StageRope
from ropext.held_out import HeldOut
from ropext.lengths import format_length
from ropext.load import default_device, load_model, load_tokenizer, set_rotary, stock_config
from ropext.loss import as_loss
from ropext.material import Material
from ropext.memory import available_bytes, disk_bytes, parameters, predict
from ropext.process import Team
from ropext.provenance import finetune_record
from ropext.schedule import Stage
from ropext.state import saved_states
from ropext.train import tune
from ropext.training import Settings, StageResult
from ropext.write import check_weights_fit, json_bytes, patched_files, trained_weights, write_tuned

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run is made of."""

    source: Checkpoint
    model: str  # how the source is named in ropext.json
    extension: Extension
    material: Material
    stages: tuple[Stage, ...]
    settings: Settings
    out: Path
    team: Team
    lora: int | None = None  # rank; None trains every parameter
    lora_only: bool = False  # without norms and embeddings

    @property
    def folder(self) -> Path:
        """Where states, logs and earlier stages lie."""
        return self.out.with_name(self.out.name + ".run")

    @property
    def adapter(self) -> Path:
        """Where LoRA leaves its adapter beside the merged checkpoint."""
        return self.out.with_name(self.out.name + ".adapter")

    def train(self, *, device: str | None, resume: bool, say: Say) -> tuple[StageResult, ...]:
        """Run every stage; returns what each did. Leaves `out` whole, or resumable states in `folder`."""
        self._check_room(device, say)
        native = self.extension.native_length
        lengths = sorted({native, *(stage.length for stage in self.stages)})
        prepared = self.material.read(load_tokenizer(self.source.path), lengths)
        model: Any = load_model(self.source.path, device=self.team.device or device or default_device())
        check_weights_fit(self.source, model)
        before = self._losses_before(model, prepared.held_out)
        if not prepared.held_out.lengths:
            say("note      nothing is held out, the text is too short for that: --held-out names some")
        if self.lora is not None:
            whole = not self.lora_only
            add_lora(model, self.lora, train_norms_and_embeddings=whole, seed=self.settings.seed)
        results = tune(
            model,
            [prepared.feed(stage) for stage in self.stages],
            self.stages,
            self.settings,
            run_folder=self.folder,
            enter_stage=lambda model, stage: set_rotary(model, self._rope(stage).config),
            leave_stage=partial(self._leave, prepared.documents),
            say=say,
            held_out=prepared.held_out,
            source_losses=before,
            resume=resume,
            team=self.team,
        )
        if self.team.rank == 0:
            for state in saved_states(self.folder):
                shutil.rmtree(state)
        return results

    def _rope(self, stage: Stage) -> StageRope:
        """A progressive patch has as much factor as the stage says, at least what its length needs."""
        return self.extension.at(max(stage.length, round(stage.factor * self.extension.native_length)))

    def _check_room(self, device: str | None, say: Say) -> None:
        """Says what each stage needs at its peak, and refuses what memory or disk cannot hold.

        Where activations are computed twice; of full training, since what LoRA needs is not predicted.
        """
        import torch

        config: Any = stock_config(self.source.config)
        place = torch.device(self.team.device or device or default_device())
        free = min(available_bytes(place), self.settings.memory or sys.maxsize)
        longest = max(stage.row for stage in self.stages)
        for stage in self.stages if self.lora is None and self.team.size == 1 else ():
            rows = min(stage.batch, longest // stage.row)
            passes = -(-stage.batch // rows)
            needed = predict(config, tokens=rows * stage.row, checkpointing=True, passes=passes)
            say(f"memory    {format_length(stage.length)} stage: at least {needed}")
            if needed.peak > free:
                raise Refused(
                    f"a stage must fit in memory: {format_length(stage.length)} needs {needed.peak / 1e9:.1f} GB, "
                    f"{free / 1e9:.1f} GB are free; lower the longest length of --schedule, use --pose or --lora, or "
                    "share the model between GPUs (recipes/accelerate/fsdp2.yaml)"
                )
        size = sum(file.size for file in self.source.weight_files.values())
        disk = disk_bytes(parameters(config), checkpoint=size, stages=len(self.stages), states=self.settings.keep)
        folder = next(folder for folder in self.out.absolute().parents if folder.is_dir())
        if disk > (left := shutil.disk_usage(folder).free):
            raise Refused(
                f"a run needs {disk / 1e9:.1f} GB of disk, for saved states and a checkpoint a stage: found "
                f"{left / 1e9:.1f} GB free for {self.out}; lower --keep, or choose another --out"
            )

    def _losses_before(self, model: Any, held_out: HeldOut) -> Mapping[int, float]:
        """Of the checkpoint before its extension, within its native length: what a gate compares with."""
        if self.settings.gate is None:
            return {}
        native = self.extension.native_length
        short = replace(held_out, lengths=tuple(length for length in held_out.lengths if length <= native))
        if not short.lengths:
            raise Refused(
                f"a gate needs held-out text of the native length, {native} tokens: found none that long. Add "
                "--held-out with such text"
            )
        set_rotary(model, self.extension.config_before)
        losses = short.score(as_loss(model), model, self.team)
        set_rotary(model, self.source.config)
        return losses.by_length

    def _leave(self, documents: Sequence[str], model: Any, stage: Stage, results: Sequence[StageResult]) -> None:
        """Write the checkpoint of a finished stage; one that a killed run already left is written again."""
        rope = self._rope(stage)
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
                "data": self.material.name,
                "lora": self.settings.adapter,
                "documents": list(documents),
            },
        )
        last = stage is self.stages[-1]
        out = self.out if last else self.folder / "stages" / format_length(stage.length)
        weights = trained_weights(model) if self.lora is None else merged_state(model)
        if self.team.rank == 0:
            if last and self.lora is not None:
                save_adapter(model, self.adapter, base=self.source, rope_config=rope.config, overwrite=True)
            contents = {**files, RECORD: json_bytes(record)}
            write_tuned(self.source, weights, out, contents, overwrite=None if last else True)
        self.team.gather(None)
