"""The training loop against a plain one, and stopped runs against undisturbed ones, bit for bit.

Everything runs on a llama of two layers with dropout, so that random state counts, through a stage of 32 tokens and
one of 64. The rotary table changes with the stage.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ropext import loss, memory, train
from ropext.errors import Refused, RopextError
from ropext.load import load_model
from ropext.pack import Corpus
from ropext.schedule import Wish, plan_stages, rate_at
from ropext.state import saved_states
from ropext.training import Settings
from tests.tiny import make_checkpoint

PEAK = 1e-3
STEPS = 4  # in each of two stages
SETTINGS = Settings(peak_rate=PEAK, seed=3, source="tiny", save_every=0.0, progress=False)


def schedule(lengths=(32, 64), batch_tokens=None):
    wishes = [Wish(length=length, steps=STEPS, batch_tokens=batch_tokens) for length in lengths]
    return plan_stages(wishes, native_length=32, window=64, progressive=True)


def text(seed=0):
    """Documents of random tokens; the same for the same seed."""
    tokens = np.random.default_rng(seed).integers(3, 320, 1500).astype(np.int32)
    return Corpus(tokens=tokens, ends=np.array([700, 1500]), bos=0)


@dataclass
class Run:
    """One run of `tune` in a folder, and what it called back."""

    checkpoint: Path
    folder: Path
    stages: tuple = field(default_factory=schedule)
    settings: Settings = SETTINGS
    corpus: Corpus = field(default_factory=text)
    entered: list = field(default_factory=list)
    left: list = field(default_factory=list)
    said: list = field(default_factory=list)

    def __post_init__(self):
        self.model = load_model(self.checkpoint)
        self.table = self.model.model.rotary_emb.inv_freq.clone()

    def enter(self, model, stage):
        model.model.rotary_emb.inv_freq = self.table / stage.factor
        self.entered.append(stage.length)

    def tune(self, resume=False):
        windows = [self.corpus.windows(stage.length) for stage in self.stages]
        return train.tune(
            self.model,
            windows,
            self.stages,
            self.settings,
            run_folder=self.folder,
            enter_stage=self.enter,
            leave_stage=lambda model, stage, result: self.left.append(stage.length),
            say=self.said.append,
            resume=resume,
        )

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def logged(self, tag="loss"):
        """What TensorBoard shows under a tag, by optimizer step (from 1)."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.folder / "logs" / "finetune"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(folder, attention_dropout=0.1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def undisturbed(checkpoint, tmp_path_factory):
    run = Run(checkpoint, tmp_path_factory.mktemp("undisturbed"))
    run.results = run.tune()
    return run


def stop_at(monkeypatch, call, action):
    """Do `action` in the forward pass of this call of the loss (from 1)."""
    calls, summed_loss = [], loss.summed_loss

    def stopping(*arguments, **more):
        calls.append(1)
        if len(calls) == call:
            action()
        return summed_loss(*arguments, **more)

    monkeypatch.setattr(loss, "summed_loss", stopping)


def fail():
    raise OSError("stopped by the test")


def same_bits(run, undisturbed):
    """Losses and weights equal, none repeated in the logs."""
    assert run.logged() == undisturbed.logged()
    expected = undisturbed.weights()
    return all(torch.equal(tensor, expected[name]) for name, tensor in run.weights().items())


def checkpoints_gradients(model):
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def without_cost(results):
    return [replace(result, seconds=0.0, peak_memory_bytes=0) for result in results]


def test_the_loop_is_a_plain_adamw_loop_over_the_same_windows(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    run = Run(checkpoint, tmp_path / "run", stages=schedule(batch_tokens=192))  # 6 x 32 in threes, 3 x 64 one by one
    run.tune()
    model = load_model(checkpoint).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for number, stage in enumerate(run.stages):
        model.model.rotary_emb.inv_freq = run.table / stage.factor
        windows = run.corpus.windows(stage.length)
        for step in range(stage.steps):
            ids = torch.from_numpy(windows.batch(seed=3, stage=number, step=step, size=stage.batch).ids)
            logits = model(input_ids=ids).logits[:, :-1]
            mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            mean.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.param_groups[0]["lr"] = rate_at(len(losses), 2 * STEPS, PEAK)
            optimizer.step()
            losses.append(mean.item())
    steps = list(range(1, 2 * STEPS + 1))
    assert [step for step, _ in run.logged()] == steps
    assert [value for _, value in run.logged()] == pytest.approx(losses, rel=2e-6)
    assert [norm for _, norm in run.logged("gradient_norm")] == pytest.approx(norms, rel=1e-5)
    rates = [rate_at(step, 2 * STEPS, PEAK) for step in range(2 * STEPS)]
    assert [rate for _, rate in run.logged("learning_rate")] == pytest.approx(rates)
    assert all(speed > 0 for _, speed in run.logged("tokens_per_second"))
    expected = model.state_dict()
    assert all(torch.allclose(tensor, expected[name], atol=2e-5) for name, tensor in run.weights().items())


def test_each_stage_is_entered_trained_left_and_reported(undisturbed):
    assert undisturbed.entered == undisturbed.left == [32, 64]
    losses = [value for _, value in undisturbed.logged()]
    for number, (stage, result) in enumerate(zip(undisturbed.stages, undisturbed.results, strict=True)):
        first = number * STEPS
        told = (result.length, result.factor, result.steps, result.tokens)
        assert told == (stage.length, stage.factor, STEPS, 64 * STEPS)
        assert [result.loss_first, result.loss_last] == pytest.approx([losses[first], losses[first + STEPS - 1]])
        assert result.seconds > 0 and result.peak_memory_bytes > 2**26
    assert "positions up to 63, 100% of the documents long enough" in undisturbed.said[2]


def test_the_model_keeps_its_modes_and_its_config(undisturbed):
    assert not undisturbed.model.training and undisturbed.model.config.use_cache is True
    assert not checkpoints_gradients(undisturbed.model)


@pytest.mark.parametrize("call", [1, 3, 5, 9], ids=["step 1", "mid stage 1", "a stage's end", "mid stage 2"])
@pytest.mark.parametrize("save_every", [0.0, 600.0], ids=["saved each step", "saved at stage ends"])
def test_a_stopped_run_goes_on_to_the_same_bits(checkpoint, undisturbed, tmp_path, monkeypatch, call, save_every):
    settings = replace(SETTINGS, save_every=save_every)
    with monkeypatch.context() as patched:
        # Stage 1 takes one forward pass of two sequences a step, stage 2 one of one.
        stop_at(patched, min(call, 2 * STEPS), fail)
        with pytest.raises(OSError, match="stopped by the test"):
            Run(checkpoint, tmp_path, settings=settings).tune()
    resumed = Run(checkpoint, tmp_path, settings=settings)
    results = resumed.tune(resume=True)
    assert same_bits(resumed, undisturbed)
    assert without_cost(results) == without_cost(undisturbed.results)


def test_a_finished_stage_is_not_trained_again(checkpoint, undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_at(patched, STEPS + 2, fail)
        with pytest.raises(OSError):
            Run(checkpoint, tmp_path).tune()
    resumed = Run(checkpoint, tmp_path)
    resumed.tune(resume=True)
    assert (resumed.entered, resumed.left) == ([64], [64])
    again = Run(checkpoint, tmp_path)
    monkeypatch.setattr(loss, "summed_loss", lambda *arguments, **more: fail())
    assert without_cost(again.tune(resume=True)) == without_cost(undisturbed.results)
    assert same_bits(again, undisturbed)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import pytest
from tests.test_train import Run, stop_at, STEPS
stop_at(pytest.MonkeyPatch(), STEPS + 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
Run(Path({checkpoint!r}), Path({folder!r})).tune()
"""


def test_a_run_killed_in_the_middle_of_stage_2_goes_on_to_the_same_bits(checkpoint, undisturbed, tmp_path):
    root = str(Path(__file__).parents[1])
    program = KILLED.format(root=root, checkpoint=str(checkpoint), folder=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = Run(checkpoint, tmp_path)
    results = resumed.tune(resume=True)
    assert f"{STEPS + 2} of {2 * STEPS} steps were done" in resumed.said[0]
    assert same_bits(resumed, undisturbed)
    assert without_cost(results) == without_cost(undisturbed.results)


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_saves_the_state_at_the_step_and_a_second_one_stops_at_once(
    checkpoint, undisturbed, tmp_path, monkeypatch, signals
):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    settings = replace(SETTINGS, save_every=600.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            stop_at(patched, 3, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(signals)])
            with pytest.raises(KeyboardInterrupt):
                Run(checkpoint, tmp_path, settings=settings).tune()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [state.name for state in saved_states(tmp_path)] == (["state-3"] if signals == 1 else [])
    resumed = Run(checkpoint, tmp_path, settings=settings)
    resumed.tune(resume=True)
    assert same_bits(resumed, undisturbed)


@pytest.mark.parametrize("damage", ["a flipped byte", "a missing file", "a cut manifest"])
def test_a_damaged_state_is_passed_over_for_the_one_before(checkpoint, undisturbed, tmp_path, monkeypatch, damage):
    with monkeypatch.context() as patched:
        stop_at(patched, STEPS + 3, fail)
        with pytest.raises(OSError):
            Run(checkpoint, tmp_path).tune()
    newest, older = saved_states(tmp_path)
    victim = newest / {"a missing file": "random_states_0.pkl", "a cut manifest": "manifest.json"}.get(
        damage, "optimizer.bin"
    )
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.unlink() if damage == "a missing file" else victim.write_bytes(
        content if damage == "a flipped byte" else content[:100]
    )
    resumed = Run(checkpoint, tmp_path)
    resumed.tune(resume=True)
    assert f"{newest} is damaged" in resumed.said[0] and f"resumed from {older}" in resumed.said[1]
    assert same_bits(resumed, undisturbed)
    assert [state.name for state in saved_states(tmp_path)] == ["state-8", "state-7"]
    for state in saved_states(tmp_path):
        (state / "model.safetensors").unlink()
    with pytest.raises(RopextError, match="found 2 damaged"):
        Run(checkpoint, tmp_path).tune(resume=True)


def test_what_a_kill_left_half_written_is_never_taken_for_a_state(checkpoint, undisturbed, tmp_path):
    shutil.copytree(saved_states(undisturbed.folder)[0], tmp_path / "state.new")
    run = Run(checkpoint, tmp_path)
    run.tune(resume=True)
    assert "no saved state" in run.said[0] and same_bits(run, undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "logs", "state-7", "state-8"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": replace(SETTINGS, peak_rate=2e-3)}, "learning rate was 0.001, now 0.002"),
        ({"settings": replace(SETTINGS, seed=4)}, "seed was 3, now 4"),
        ({"settings": replace(SETTINGS, source="other")}, "source checkpoint was tiny, now other"),
        ({"stages": schedule((64,))}, "schedule was 32 at factor 1.0: 4 steps of 2, 64 at"),
        ({"corpus": text(1)}, "training text was"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_is_not_resumed_with_other_settings(checkpoint, undisturbed, tmp_path, change, named):
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    with pytest.raises(Refused, match=named):
        Run(checkpoint, tmp_path / "run", **change).tune(resume=True)


def test_a_run_is_not_started_over_the_states_of_another(checkpoint, undisturbed):
    with pytest.raises(Refused, match="continue that run with --resume"):
        Run(checkpoint, undisturbed.folder).tune()


def test_two_processes_do_not_train_in_one_folder(checkpoint, tmp_path):
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="found another at work"):
            Run(checkpoint, tmp_path).tune()


def test_too_little_text_is_refused_before_anything_is_written(checkpoint, tmp_path):
    corpus = Corpus(tokens=np.arange(3, 130, dtype=np.int32), ends=np.array([60, 127]), bos=0)
    with pytest.raises(Refused, match="the 64 stage needs 1 distinct windows.*found 0|found 1"):
        Run(checkpoint, tmp_path / "run", corpus=corpus, stages=schedule((64,), batch_tokens=256)).tune()
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_state(checkpoint, tmp_path):
    run = Run(checkpoint, tmp_path)
    enter = run.enter

    def poisoned(model, stage):
        enter(model, stage)
        if stage.length == 64:
            model.model.norm.weight.data[0] = math.nan

    run.enter = poisoned
    with pytest.raises(RopextError, match=r"stage 2 \(64\) after step 0 of 4: the loss is nan.* state is .*-4$"):
        run.tune()
    assert [state.name for state in saved_states(tmp_path)] == ["state-4", "state-3"]
    manifest = json.loads((tmp_path / "state-4" / "manifest.json").read_text())
    assert manifest["about"]["place"]["step"] == STEPS


def test_an_error_for_want_of_memory_names_the_stage(checkpoint, tmp_path, monkeypatch):
    def exhausted():
        torch.empty(2**60)

    stop_at(monkeypatch, STEPS + 1, exhausted)
    with pytest.raises(RopextError, match=r"stage 2 \(64\).*memory ran out; lower the longest length"):
        Run(checkpoint, tmp_path).tune()


def test_gradient_checkpointing_changes_no_bit_and_warns_of_nothing(
    checkpoint, undisturbed, tmp_path, monkeypatch, capfd, recwarn, caplog
):
    monkeypatch.setattr(train, "available_bytes", lambda device: 0)
    on = []
    stop_at(monkeypatch, STEPS, lambda: on.append(checkpoints_gradients(run.model)))
    run = Run(checkpoint, tmp_path)
    capfd.readouterr()
    run.tune()
    assert on == [True] and run.said[0].endswith("gradient checkpointing")
    assert same_bits(run, undisturbed)
    assert run.model.config.use_cache is True and not checkpoints_gradients(run.model)
    assert capfd.readouterr() == ("", "")
    assert [*recwarn] == caplog.records == []


def test_checkpointing_follows_the_memory_that_is_free(checkpoint, tmp_path, monkeypatch):
    run = Run(checkpoint, tmp_path, stages=schedule((64,)))
    needed = 2 * memory.activation_bytes(run.model.config, 64) + memory.training_bytes(run.model.num_parameters())
    for free, expected in ((needed, False), (needed - 2, True)):
        monkeypatch.setattr(train, "available_bytes", lambda device, free=free: free)
        run = Run(checkpoint, tmp_path / str(free), stages=schedule((64,)))
        run.tune()
        assert run.said[0].endswith("gradient checkpointing") == expected


def test_the_bar_shows_speed_and_loss_on_stderr_and_stdout_stays_empty(checkpoint, tmp_path, capfd):
    run = Run(checkpoint, tmp_path, stages=schedule((64,)), settings=replace(SETTINGS, progress=True))
    capfd.readouterr()
    run.tune()
    out, err = capfd.readouterr()
    assert out == "" and "stage 1/1 (64)" in err and "tokens/s" in err and "left" in err
