"""One Accelerate loop over growing lengths: each stage takes the model as it is and leaves one tuned at its length.

One AdamW and one rate curve run through all stages: started afresh at each stage, they cost 3 to 4% of perplexity in a
pilot. What the next step depends on is the model, the optimizer, the global random states and the step's number, so a
run that goes on from a saved state gives, on a CPU, the very bits of a run that was never stopped.

Shapes: B sequences per optimizer step, T tokens in one. Rates are per optimizer step, times in seconds, sizes in bytes.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.errors import Refused, RopextError
from ropext.lengths import format_length
from ropext.loss import check_head, mean_loss
from ropext.memory import activation_bytes, available_bytes, checkpointing_pays, training_bytes
from ropext.pack import Windows, check_supply
from ropext.process import (
    first_interrupt,
    forget_peak,
    one_process,
    peak_memory,
    quiet,
    refuse_many_processes,
)
from ropext.schedule import Stage, rate_at
from ropext.state import lock, read_manifest, saved_states, write_state

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from rich.progress import Progress

BETAS = (0.9, 0.95)  # with no weight decay, as in PI (arXiv:2306.15595, section 3.1)
CLIP_NORM = 1.0
LINE_EVERY = 60.0  # seconds, where stderr is a file
STATE_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a run is, beside its stages and windows, and how it is watched."""

    peak_rate: float
    seed: int
    source: str  # identity of the checkpoint that training starts from: a hash
    save_every: float = 600.0  # seconds between saved states
    progress: bool = True  # a bar on stderr


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What one stage did; its fields are the keys of `finetune --json`."""

    length: int
    factor: float
    steps: int
    tokens: int
    loss_first: float  # nats per token in its first optimizer step
    loss_last: float  # and in its last
    seconds: float  # in training steps, over all processes that took part
    peak_memory_bytes: int  # on a GPU this stage's peak; else the most the process ever held, earlier stages included


@dataclass(kw_only=True, slots=True)
class Place:
    """How far a run has come: kept in the manifest of each saved state."""

    stage: int = 0  # number of the stage in hand, from 0
    step: int = 0  # optimizer steps done in it
    loss_first: float = math.nan
    loss_last: float = math.nan
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    results: list[StageResult] = field(default_factory=list)  # of the stages before it


def tune(
    model: Any,
    windows: Sequence[Windows],
    stages: Sequence[Stage],
    settings: Settings,
    *,
    run_folder: Path,
    enter_stage: Callable[[Any, Stage], None],
    leave_stage: Callable[[Any, Stage, Sequence[StageResult]], object],
    say: Callable[[str], None],
    resume: bool = False,
) -> tuple[StageResult, ...]:
    """Train the float32 `model` in place, stage by stage, and return what each stage did.

    `enter_stage` sets the rotary tables of a stage; it is called once more where a run resumes inside that stage.
    `leave_stage` gets the results so far and writes the stage's checkpoint; after a kill it may be called again for a
    stage whose checkpoint is already there, with the same weights. `run_folder` takes the saved states and the
    TensorBoard logs.

    Raises Refused before the first step for too little text, an unfinished run in the folder without `resume`, or a
    resumed run whose settings differ; RopextError where a loss stops being finite or memory runs out;
    KeyboardInterrupt after Ctrl-C, with the state saved.
    """
    refuse_many_processes()
    check_head(model)
    check_supply(windows, stages)
    run_folder.mkdir(parents=True, exist_ok=True)
    with lock(run_folder), first_interrupt() as interrupted:
        run = _Run(model, windows, stages, settings, run_folder, say, interrupted)
        try:
            run.start(resume)
            while run.place.stage < len(stages):
                run.train_stage(enter_stage, leave_stage)
        finally:
            run.close()
    return tuple(run.place.results)


class _Run:
    """The moving parts of one call of `tune`."""

    def __init__(
        self,
        model: Any,
        windows: Sequence[Windows],
        stages: Sequence[Stage],
        settings: Settings,
        run_folder: Path,
        say: Callable[[str], None],
        interrupted: threading.Event,
    ) -> None:
        self.windows, self.stages, self.settings, self.folder = windows, stages, settings, run_folder
        self.say, self.interrupted, self.place = say, interrupted, Place()
        self.saved_at = self.shown_at = time.monotonic()
        self.identity = fingerprint(windows, stages, settings)
        self.total_steps = sum(stage.steps for stage in stages)
        self.was_training = bool(model.training)
        self.accelerator, self.model, self.optimizer = _prepare(model, settings, run_folder)
        self.bar = _progress(settings.progress, sum(stage.tokens for stage in stages))

    @property
    def stage(self) -> Stage:
        return self.stages[self.place.stage]

    @property
    def global_step(self) -> int:
        """Optimizer steps done in all stages."""
        return sum(stage.steps for stage in self.stages[: self.place.stage]) + self.place.step

    def start(self, resume: bool) -> None:
        """Take up the newest whole state, if there is one to take up, and open the logs."""
        states = saved_states(self.folder)
        if states and not resume:
            raise Refused(
                f"a run starts in a folder without saved states: found {states[0]}; continue that run with --resume, "
                "or start in another folder with --out"
            )
        if states:
            self._take_up(states)
        elif resume:
            self.say(f"no saved state in {self.folder}: starting from the beginning")
        self.model.train()
        self.bar.start()
        # Steps that a killed run logged after its last state are taken again, and shown once.
        purge = {"tensorboard": {"purge_step": self.global_step + 1}}
        self.accelerator.init_trackers("finetune", init_kwargs=purge)

    def _take_up(self, states: Sequence[Path]) -> None:
        for state in states:
            manifest = read_manifest(state)
            if manifest is None:
                self.say(f"{state} is damaged: falling back to the state before it")
                continue
            _check_same(manifest["settings"], self.identity)
            self.accelerator.load_state(str(state))
            results = [StageResult(**result) for result in manifest["place"].pop("results")]
            self.place = Place(**manifest["place"], results=results)
            self.say(f"resumed from {state}: {self.global_step} of {self.total_steps} steps were done")
            return
        raise RopextError(f"--resume needs one whole saved state: found {len(states)} damaged in {self.folder}")

    def _tokens_done(self) -> int:
        earlier = sum(stage.tokens for stage in self.stages[: self.place.stage])
        return earlier + self.place.step * self.stage.batch * self.stage.length

    def train_stage(
        self,
        enter_stage: Callable[[Any, Stage], None],
        leave_stage: Callable[[Any, Stage, Sequence[StageResult]], object],
    ) -> None:
        """The rest of the stage in hand; then the run stands at the start of the next."""
        stage, place = self.stage, self.place
        enter_stage(self.model, stage)
        forget_peak(self.accelerator.device)
        self._choose_checkpointing()
        if place.step < stage.steps:
            while place.step < stage.steps:
                self._step()
                self._save_if_due()
            self.save()
        result = StageResult(
            length=stage.length,
            factor=stage.factor,
            steps=stage.steps,
            tokens=stage.tokens,
            loss_first=place.loss_first,
            loss_last=place.loss_last,
            seconds=place.seconds,
            peak_memory_bytes=place.peak_memory_bytes,
        )
        results = [*place.results, result]
        leave_stage(self.model, stage, results)
        self.place = Place(stage=place.stage + 1, results=results)
        if self.interrupted.is_set():
            raise KeyboardInterrupt

    def _choose_checkpointing(self) -> None:
        """Gradient checkpointing for the stage in hand, only where its activations would not fit comfortably."""
        stage = self.stage
        activations = activation_bytes(self.model.config, min(stage.batch, self._rows_at_once()) * stage.length)
        pays = checkpointing_pays(
            activations=activations,
            training=0 if self.optimizer.state else training_bytes(self.model.num_parameters()),
            available=available_bytes(self.accelerator.device),
        )
        on = pays and bool(self.model.supports_gradient_checkpointing)
        _switch_checkpointing(self.model, on)
        windows = self.windows[self.place.stage]
        self.say(
            f"stage {self.place.stage + 1} of {len(self.stages)}: {format_length(stage.length)} tokens, factor "
            f"{stage.factor:g}, {stage.steps} steps of {stage.batch} sequences, positions up to "
            f"{windows.largest_position}, {windows.share_long_enough:.0%} of the documents long enough"
            + (", gradient checkpointing" if on else "")
        )

    def _rows_at_once(self) -> int:
        """Sequences in one forward pass: no more tokens than the longest stage must hold anyway."""
        return max(1, max(stage.length for stage in self.stages) // self.stage.length)

    def _step(self) -> None:
        """One optimizer step: rate, gradients of the batch, clip, update, log."""
        place, stage, started = self.place, self.stage, time.perf_counter()
        rate = rate_at(self.global_step, self.total_steps, self.settings.peak_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self._memory_named():
            loss = self._backward()
            norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._stopped(f"the loss is {loss}, the gradient norm {norm}", "lower --learning-rate")
            self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        place.step += 1
        place.loss_first, place.loss_last = (loss if place.step == 1 else place.loss_first), loss
        place.seconds += seconds
        place.peak_memory_bytes = max(place.peak_memory_bytes, peak_memory(self.accelerator.device))
        tokens = stage.batch * stage.length
        figures = {"loss": loss, "learning_rate": rate, "gradient_norm": norm, "tokens_per_second": tokens / seconds}
        self.accelerator.log(figures, step=self.global_step)
        self._show(f"loss {loss:.4f}, {tokens / seconds:,.0f} tokens/s")

    def _show(self, figures: str) -> None:
        """The bar moved on; a line now and then where a bar cannot be drawn."""
        name = f"stage {self.place.stage + 1}/{len(self.stages)} ({format_length(self.stage.length)})"
        self.bar.update(self.bar.task_ids[0], completed=self._tokens_done(), description=name, figures=figures)
        due = time.monotonic() - self.shown_at >= LINE_EVERY
        if due and self.settings.progress and not self.bar.console.is_terminal:
            self.shown_at = time.monotonic()
            self.say(f"{name}: step {self.place.step} of {self.stage.steps}, {figures}")

    def _backward(self) -> float:
        """Gradients of the batch's mean loss, a few sequences at a time; returns that loss.

        All windows of a stage score equally many tokens, so the mean of their means is the mean.
        """
        import torch

        stage, place = self.stage, self.place
        windows = self.windows[place.stage]
        rows = windows.batch(seed=self.settings.seed, stage=place.stage, step=place.step, size=stage.batch)
        total = 0.0
        for ids in torch.from_numpy(rows).split(self._rows_at_once()):
            loss = mean_loss(self.model, ids.to(self.accelerator.device)) * (len(ids) / len(rows))
            self.accelerator.backward(loss)
            total += float(loss.detach())
        return total

    @contextmanager
    def _memory_named(self) -> Iterator[None]:
        """An error for want of memory, of GPU or CPU, names the stage and what to lower."""
        import torch

        try:
            yield
        except (MemoryError, RuntimeError) as error:
            out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
            if not out_of_memory:
                raise
            raise self._stopped("memory ran out", "lower the longest length of --schedule") from error

    def _stopped(self, why: str, remedy: str) -> RopextError:
        place, kept = self.place, saved_states(self.folder)
        return RopextError(
            f"training stopped in stage {place.stage + 1} ({format_length(self.stage.length)}) after step {place.step} "
            f"of {self.stage.steps}: {why}; {remedy}. "
            + (f"The last saved state is {kept[0]}" if kept else "No state had been saved")
        )

    def _save_if_due(self) -> None:
        """Save after an interrupt, or every so often; at a step's end, where a state is whole."""
        if self.interrupted.is_set():
            self.save()
            raise KeyboardInterrupt
        if time.monotonic() - self.saved_at >= self.settings.save_every and self.place.step < self.stage.steps:
            self.save()

    def save(self) -> None:
        """One more state on disk, whole or not at all."""
        from safetensors import SafetensorError

        about = {"place": asdict(self.place), "settings": self.identity}
        try:
            with quiet("accelerate.utils.other"):  # it warns of tied embeddings, which load_state ties again
                write_state(self.folder, self.global_step, lambda new: self.accelerator.save_state(str(new)), about)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk thus
            raise self._stopped(f"the state could not be saved ({error})", "check that the disk has room") from error
        self.saved_at = time.monotonic()

    def close(self) -> None:
        """Logs and bar finished, the model's modes as they were."""
        self.bar.stop()
        self.accelerator.end_training()
        _switch_checkpointing(self.model, False)
        self.model.train(self.was_training)


def _prepare(model: Any, settings: Settings, run_folder: Path) -> tuple[Accelerator, Any, torch.optim.Optimizer]:
    """Accelerate's view of model and optimizer, in float32, logging to TensorBoard."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    assert all(p.dtype == torch.float32 for p in model.parameters()), "master weights are float32: load_model does that"
    folders = ProjectConfiguration(project_dir=str(run_folder), logging_dir=str(run_folder / "logs"))
    accelerator = Accelerator(
        cpu=model.device.type == "cpu", mixed_precision="no", log_with="tensorboard", project_config=folders
    )
    if accelerator.num_processes > 1:
        raise one_process(accelerator.num_processes)
    set_seed(settings.seed)  # for dropout, where a model has it
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.peak_rate, betas=BETAS, weight_decay=0.0, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def _progress(shown: bool, tokens: int) -> Progress:
    """A bar on stderr over the tokens of all stages; lines that others print meanwhile go above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    bar = Progress(
        *columns,
        console=Console(stderr=True),
        disable=not shown,
        refresh_per_second=2,
        speed_estimate_period=600.0,  # seconds; one step of a large model can take longer than the default of 30
        redirect_stdout=sys.stdout.isatty(),  # a redirected stdout holds what was asked for, not the bar's lines
    )
    bar.add_task("", total=tokens, figures="")
    return bar


def _switch_checkpointing(model: Any, on: bool) -> None:
    # transformers renamed both within its version 5; the older names now warn.
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{word}_checkpointing_disable")()


def fingerprint(windows: Sequence[Windows], stages: Sequence[Stage], settings: Settings) -> dict[str, Any]:
    """What a resumed run must share with the run that was stopped, under the names that a person gives it."""
    text = hashlib.sha256("".join(window.sha256 for window in windows).encode())
    return {
        "state format": STATE_FORMAT,
        "source checkpoint": settings.source,
        "schedule": ", ".join(
            f"{format_length(s.length)} at factor {s.factor!r}: {s.steps} steps of {s.batch}" for s in stages
        ),
        "seed": settings.seed,
        "learning rate": settings.peak_rate,
        "training text": text.hexdigest(),
    }


def _check_same(then: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{name} was {then.get(name)}, now {value}" for name, value in now.items() if then.get(name) != value]
    if changed:
        raise Refused(
            f"--resume continues a run as it was started: {'; '.join(changed)}; give what was given then, or start "
            "anew with another --out"
        )
