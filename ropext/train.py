"""One Accelerate loop over growing lengths: each stage takes the model as it is and leaves one tuned at its length.

One AdamW and one rate curve run through all stages: started afresh at each stage, they cost 3 to 4% of perplexity in a
pilot. What the next step depends on is the model, the optimizer, the global random states and the step's number, so a
run that goes on from a saved state gives, on a CPU, the very bits of a run that was never stopped.

Shapes: B sequences per optimizer step, T tokens in one. Rates are per optimizer step, times in seconds, sizes in bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ropext.adapter import trained_parameters
from ropext.errors import GateNotMet, Refused, RopextError
from ropext.feed import Feed
from ropext.held_out import HeldOut
from ropext.lengths import format_length
from ropext.loss import check_head
from ropext.memory import activation_bytes, available_bytes, checkpointing_pays, training_bytes
from ropext.pack import check_supply
from ropext.prepare import check_feeds, prepare, progress_bar, share, switch_checkpointing, wait_for_log_order
from ropext.process import ALONE, Interrupt, Team, first_interrupt, forget_peak, out_of_memory, peak_memory, quiet
from ropext.schedule import Stage, rate_at
from ropext.state import NEW, lock, name_state, new_state, read_manifest, saved_states
from ropext.training import Check, Place, Settings, StageResult, check_same, fingerprint, gate_missed
from ropext.watch import Watch

CLIP_NORM = 1.0
LINE_EVERY = 60.0  # seconds, where stderr is a file
GATE_PATIENCE = 3  # times the planned steps of a stage


def tune(
    model: Any,
    feeds: Sequence[Feed],
    stages: Sequence[Stage],
    settings: Settings,
    *,
    run_folder: Path,
    enter_stage: Callable[[Any, Stage], None],
    leave_stage: Callable[[Any, Stage, Sequence[StageResult]], object],
    say: Callable[[str], None],
    held_out: HeldOut | None = None,
    source_losses: Mapping[int, float] | None = None,
    resume: bool = False,
    team: Team = ALONE,
) -> tuple[StageResult, ...]:
    """Train the float32 `model` in place, stage by stage, and return what each stage did.

    `held_out` is scored before and after each stage; with a gate, its losses decide when a stage may end, short ones
    beside `source_losses`, those of the checkpoint before its extension. The processes of a `team` share each step's
    batch, and all call the two functions; the first one alone writes here.

    `enter_stage` sets the rotary tables of a stage; it is called once more where a run resumes inside that stage.
    `leave_stage` gets the results so far and writes the stage's checkpoint; after a kill it may be called again for a
    stage whose checkpoint is already there, with the same weights. `run_folder` takes the saved states and the
    TensorBoard logs.

    Raises Refused before the first step for too little text, an unfinished run in the folder without `resume`, or a
    resumed run whose settings differ; RopextError where a loss stops being finite or memory runs out;
    KeyboardInterrupt after Ctrl-C, or SystemExit after SIGTERM, with the state saved.
    """
    check_head(model)
    check_feeds(model, feeds)
    check_supply(feeds, stages)
    run_folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if team.rank == 0:
            stack.enter_context(lock(run_folder))
        interrupt = stack.enter_context(first_interrupt())
        run = _Run(model, feeds, stages, settings, run_folder, say, interrupt, team, held_out, source_losses or {})
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
        feeds: Sequence[Feed],
        stages: Sequence[Stage],
        settings: Settings,
        run_folder: Path,
        say: Callable[[str], None],
        interrupt: Interrupt,
        team: Team,
        held_out: HeldOut | None,
        source_losses: Mapping[int, float],
    ) -> None:
        self.feeds, self.stages, self.settings, self.folder = feeds, stages, settings, run_folder
        self.say, self.interrupt, self.team, self.place = say, interrupt, team, Place()
        self.held_out, self.source_losses, self.watch = held_out, source_losses, Watch(model)
        self.saved_at = self.shown_at = time.monotonic()
        self.identity = fingerprint(feeds, stages, settings)
        self.total_steps = sum(stage.steps for stage in stages)
        self.was_training = bool(model.training)
        self.accelerator, self.loss, self.optimizer = prepare(model, settings, run_folder, team)
        self.model = self.accelerator.unwrap_model(self.loss).model
        self.bar = progress_bar(settings.progress and team.rank == 0, sum(stage.tokens for stage in stages))

    @property
    def stage(self) -> Stage:
        return self.stages[self.place.stage]

    @property
    def global_step(self) -> int:
        """Optimizer steps done in all stages."""
        return sum(result.steps for result in self.place.results) + self.place.step

    @property
    def rate(self) -> float:
        """Of the next step; a step beyond the planned ones, which a gate asked for, has that of the last of them."""
        stage = self.stage
        peak = stage.peak_rate or self.settings.peak_rate
        step = min(self.place.step, stage.steps - 1)
        if self.settings.fresh:
            return rate_at(step, stage.steps, peak)
        return rate_at(sum(one.steps for one in self.stages[: self.place.stage]) + step, self.total_steps, peak)

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
        wait_for_log_order(self.folder / "logs")
        # Steps that a killed run logged after its last state are taken again, and shown once.
        purge = {"tensorboard": {"purge_step": self.global_step + 1}}
        self.accelerator.init_trackers("finetune", init_kwargs=purge if self.settings.tracker == "tensorboard" else {})

    def _take_up(self, states: Sequence[Path]) -> None:
        for state in states:
            manifest = read_manifest(state)
            if manifest is None:
                self.say(f"{state} is damaged: falling back to the state before it")
                continue
            check_same(manifest["settings"], self.identity)
            self.accelerator.load_state(str(state))
            place = manifest["place"]
            results = [StageResult(**result) for result in place.pop("results")]
            self.place = Place(**place | {"checks": [Check(**check) for check in place["checks"]]}, results=results)
            self.say(f"resumed from {state}: {self.global_step} of {self.total_steps} steps were done")
            return
        raise RopextError(f"--resume needs one whole saved state: found {len(states)} damaged in {self.folder}")

    def _tokens_done(self) -> int:
        earlier = sum(stage.tokens for stage in self.stages[: self.place.stage])
        return earlier + self.place.step * self.stage.batch * self.stage.row

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
        if not place.step:
            if self.settings.fresh:
                self.optimizer.state.clear()
            place.before = self._losses_at_the_start()
        if not self._finished():
            while not self._finished():
                self._step()
                self._save_if_due()
            self.save()
        result = StageResult(
            length=stage.length,
            factor=stage.factor,
            steps=place.step,
            tokens=place.step * stage.batch * stage.row,
            loss_first=place.loss_first,
            loss_last=place.loss_last,
            held_out_before=place.before,
            held_out_after=place.checks[-1].losses if place.checks else self._held_out_losses(),
            seconds=place.seconds,
            peak_memory_bytes=place.peak_memory_bytes,
        )
        results = [*place.results, result]
        leave_stage(self.model, stage, results)
        self.place = Place(stage=place.stage + 1, results=results)
        if self._interrupted():
            self.interrupt.stop()

    def _losses_at_the_start(self) -> Mapping[str, float]:
        """What the stage before found at its end, unless the rotary tables are others now."""
        last = self.place.results[-1] if self.place.results else None
        return last.held_out_after if last and last.factor == self.stage.factor else self._held_out_losses()

    def _held_out_losses(self) -> dict[str, float]:
        """Of the model as it is, by length; empty without held-out text."""
        if self.held_out is None:
            return {}
        found = self.held_out.score(self.loss, self.model, self.team)
        figures = {f"held_out/{length}": loss for length, loss in found.by_length.items()}
        figures |= {f"held_out_position/{place}": loss for place, loss in found.by_position.items()}
        self.accelerator.log(figures, step=self.global_step)
        return {str(length): loss for length, loss in found.by_length.items()}

    def _finished(self) -> bool:
        """Whether the stage may end: its steps are done and, with a gate, held-out losses are as they should be.

        Raises GateNotMet where so many more steps than planned did not bring that about.
        """
        stage, place, gate = self.stage, self.place, self.settings.gate
        if gate is None:
            return place.step >= stage.steps
        looked = place.checks[-1].step if place.checks else 0
        if place.step > looked and (stage.steps - place.step) % max(1, stage.steps // 2) == 0:
            looked = place.step
            place.checks.append(Check(step=looked, losses=self._held_out_losses()))
        if place.step < stage.steps or looked < place.step:
            return False
        missed = gate_missed(place.checks, stage.length, self.source_losses, gate)
        if missed and place.step >= GATE_PATIENCE * stage.steps:
            self.save()
            raise GateNotMet(
                f"the {format_length(stage.length)} stage may end when its gate is met, and after {place.step} steps "
                f"{missed}; the state is saved. Lower --learning-rate, give more --tokens-per-stage or better text"
            )
        if missed:
            self.say(
                f"gate      after {place.step} steps {missed}: {place.step // stage.steps} times the planned steps"
            )
        return not missed

    def _interrupted(self) -> bool:
        """Whether some process was asked to stop: then all do, at the same step."""
        signals = [number for number in self.team.gather(self.interrupt.signal) if number is not None]
        if signals:
            self.interrupt.signal = signals[0]
        return bool(signals)

    def _choose_checkpointing(self) -> None:
        """Gradient checkpointing for the stage in hand, only where its activations would not fit comfortably."""
        stage = self.stage
        own = -(-stage.batch // self.team.size)
        activations = activation_bytes(self.model.config, min(own, self._rows_at_once()) * stage.row)
        pays = checkpointing_pays(
            activations=activations,
            training=0 if self.optimizer.state else training_bytes(trained_parameters(self.model)),
            available=min(available_bytes(self.accelerator.device), self.settings.memory or sys.maxsize),
        )
        on = pays and bool(self.model.supports_gradient_checkpointing)
        switch_checkpointing(self.model, on)
        feed = self.feeds[self.place.stage]
        self.say(
            f"stage {self.place.stage + 1} of {len(self.stages)}: {format_length(stage.length)} tokens, factor "
            f"{stage.factor:g}, {stage.steps} steps of {stage.batch} rows, positions up to {feed.largest_position}, "
            f"{feed.share_long_enough:.0%} of the documents long enough" + (", gradient checkpointing" if on else "")
        )
        self.say(f"          {feed.described()}")
        if feed.largest_distance < stage.length - 1:
            self.say(
                f"warn      no token of this stage sees back farther than {feed.largest_distance + 1} tokens: text of "
                f"{stage.length} tokens is what teaches that distance"
            )

    def _rows_at_once(self) -> int:
        """Sequences in one forward pass: no more tokens than the longest stage must hold anyway."""
        return max(1, max(stage.row for stage in self.stages) // self.stage.row)

    def _step(self) -> None:
        """One optimizer step: rate, gradients of the batch, clip, update, log."""
        place, stage, started = self.place, self.stage, time.perf_counter()
        rate = self.rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self._memory_named():
            with self.watch.looking():
                loss = self._backward()
            layers = self.watch.figures()
            norm = float(self.accelerator.clip_grad_norm_(self.loss.parameters(), CLIP_NORM))
            if problem := self.watch.broken(layers, loss, norm):
                raise self._stopped(problem, "lower --learning-rate")
            self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        place.step += 1
        place.loss_first, place.loss_last = (loss if place.step == 1 else place.loss_first), loss
        place.seconds += seconds
        place.peak_memory_bytes = max(place.peak_memory_bytes, peak_memory(self.accelerator.device))
        tokens = stage.batch * stage.row
        figures = {"loss": loss, "learning_rate": rate, "gradient_norm": norm, "tokens_per_second": tokens / seconds}
        self.accelerator.log(figures | layers, step=self.global_step)
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

        Each process takes its rows; sums of losses are divided by the number of tokens that all score together, so
        how rows are split changes nothing.
        """
        import torch

        stage, place, team = self.stage, self.place, self.team
        feed = self.feeds[place.stage]
        batch = feed.batch(seed=self.settings.seed, stage=place.stage, step=place.step, size=stage.batch)
        parts = list(share(batch, team).split(self._rows_at_once()))
        device, total = self.accelerator.device, 0.0
        for number, part in enumerate(parts):
            ids, labels = (torch.from_numpy(array).to(device) for array in (part.ids, part.labels))
            last = number == len(parts) - 1  # gradients are exchanged once a step
            with nullcontext() if last else self.accelerator.no_sync(self.loss):
                loss = self.loss(ids, labels, **part.arguments(device))
                self.accelerator.backward(loss * (team.size / batch.scored))  # DDP takes the mean over processes
            total += float(loss.detach())
        return sum(team.gather(total)) / batch.scored

    @contextmanager
    def _memory_named(self) -> Iterator[None]:
        """An error for want of memory, of GPU or CPU, names the stage and what to lower."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
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
        if self._interrupted():
            self.save()
            self.interrupt.stop()
        due = time.monotonic() - self.saved_at >= self.settings.save_every
        if self.team.first(due) and self.place.step < self.stage.steps:
            self.save()

    def save(self) -> None:
        """One more state on disk, whole or not at all."""
        from safetensors import SafetensorError

        about = {"place": asdict(self.place), "settings": self.identity}
        first = self.team.rank == 0
        try:
            if first:
                new_state(self.folder)
            self.team.gather(None)
            with quiet("accelerate.utils.other"):  # it warns of tied embeddings, which load_state ties again
                self.accelerator.save_state(str(self.folder / NEW))
            self.team.gather(None)  # every process has written its part
            if first:
                name_state(self.folder, self.global_step, about, self.settings.keep)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk thus
            raise self._stopped(f"the state could not be saved ({error})", "check that the disk has room") from error
        self.team.gather(None)
        self.saved_at = time.monotonic()

    def close(self) -> None:
        """Logs and bar finished, the model's modes as they were."""
        self.bar.stop()
        self.accelerator.end_training()
        switch_checkpointing(self.model, False)
        self.model.train(self.was_training)
