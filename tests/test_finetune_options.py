"""What the options of finetune make of a run: other rows, other parameters, other ends of a stage, and ways to stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ropext import api, held_out
from ropext.errors import GateNotMet, Refused, UsageError
from ropext.load import load_model, load_tokenizer
from ropext.results import FinetuneResult
from tests.tiny import make_checkpoint

WORDS = " ".join(f"{word} {number}" for number, word in enumerate(["alpha", "beta", "gamma"] * 900))  # 26k bytes


@pytest.fixture(autouse=True)
def workspace_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("long.txt").write_text(WORDS)
    Path("short.jsonl").write_text(
        "".join(json.dumps({"text": f"a short text, number {n}"}) + "\n" for n in range(400))
    )


def patched(method: str = "linear", **source) -> str:
    make_checkpoint(Path("source"), **source)
    api.patch("source", method=method, factor=4.0, out=Path("patched"))
    return "patched"


def tune(model: str = "patched", **options) -> FinetuneResult:
    defaults = {"schedule": (256, 1024), "data": "long.txt", "steps_per_stage": 2, "learning_rate": 1e-3}
    return api.finetune(
        model, **defaults | {"out": Path("tuned"), "progress": False, "say": lambda line: None} | options
    )


def curves(run: str = "tuned.run") -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run}/logs/finetune")
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# Held-out text


def test_what_each_stage_gained_and_cost_is_in_the_result_the_record_and_the_logs():
    patched()
    result = tune()
    first, second = result.stages
    assert set(first.held_out_before) == set(second.held_out_after) == {"256", "1024"}
    assert second.held_out_before == first.held_out_after != first.held_out_before
    recorded = json.loads(Path("tuned/ropext.json").read_text())["training"]["stages"]
    assert recorded[1]["held_out_after"] == second.held_out_after
    logged = curves()
    assert logged["held_out/1024"][-1][1] == pytest.approx(second.held_out_after["1024"])
    blocks = {"0_to_256": 256, "256_to_512": 256, "512_to_1023": 511}
    places = sum(logged[f"held_out_position/{name}"][-1][1] * size for name, size in blocks.items()) / 1023
    assert places == pytest.approx(second.held_out_after["1024"], rel=1e-6)


def test_held_out_losses_are_those_of_a_plain_loop_over_text_that_is_not_trained_on():
    patched()
    seen: list[str] = []
    result = tune(schedule=(256,), say=seen.append)
    tokens = load_tokenizer("patched")(WORDS, add_special_tokens=False, verbose=False)["input_ids"]
    window = torch.tensor([[0, *tokens[-1023:]]])  # 5% of the text holds one window of 1024
    assert 4 * 255 < len(tokens) // 20 < 2 * 1023
    window = torch.tensor([[0, *tokens[-255:]]])
    model = load_model("tuned")
    with torch.no_grad():
        expected = model(window, labels=window).loss.item()
    assert result.stages[0].held_out_after["256"] == pytest.approx(expected, rel=1e-5)
    assert any(f"{(len(tokens) - 255) // 255} windows of 256 tokens" in line for line in seen)


def test_other_text_can_be_held_out_and_a_text_too_small_holds_nothing_out():
    patched()
    Path("other.txt").write_text("quite another text " * 200)
    held = tune(held_out="other.txt").stages[-1].held_out_after
    assert set(held) == {"256", "1024"}
    said: list[str] = []
    Path("little.txt").write_text(WORDS[:3000])
    tune(data="little.txt", schedule=(256,), steps_per_stage=1, out=Path("t2"), say=said.append)
    assert any("nothing is held out" in line for line in said)


# Gates


def test_a_gate_that_is_met_changes_no_step(monkeypatch):
    patched()
    monkeypatch.setattr("ropext.training.STILL_FALLING", 1.0)
    assert [stage.steps for stage in tune(gate=10.0).stages] == [2, 2]


def test_a_stage_goes_on_while_the_loss_at_its_length_still_falls_and_the_rate_stays(monkeypatch):
    patched()
    monkeypatch.setattr("ropext.training.STILL_FALLING", 1e-4)
    said: list[str] = []
    with pytest.raises(GateNotMet, match=r"256 stage may end when .* still falls, by .*; the state is saved"):
        tune(gate=10.0, steps_per_stage=4, say=said.append)
    assert any("still falls" in line for line in said)
    rates = [value for _, value in curves()["learning_rate"]]
    assert len(rates) == 12 and rates[3:] == [rates[3]] * 9
    monkeypatch.setattr("ropext.training.STILL_FALLING", 1.0)
    assert tune(gate=10.0, steps_per_stage=4, resume=True).stages[0].steps == 12


def test_a_gate_compares_with_the_source_before_its_extension(monkeypatch):
    patched("linear", initializer_range=0.2)
    monkeypatch.setattr("ropext.training.STILL_FALLING", 1.0)
    seen = {}
    score = held_out.HeldOut.score

    def spy(self, loss, model, team):
        found = score(self, loss, model, team)
        seen.setdefault("first", (found, dict(model.config.rope_parameters)))
        return found

    monkeypatch.setattr(held_out.HeldOut, "score", spy)
    with pytest.raises(GateNotMet, match="held-out perplexity at 256 is .* against the source's, above -100.0%"):
        tune(gate=-1.0)
    losses, rope = seen["first"]
    assert set(losses.by_length) == {256} and rope["rope_type"] == "default"


def test_a_gate_without_held_out_text_is_refused():
    patched()
    Path("little.txt").write_text(WORDS[:3000])
    with pytest.raises(Refused, match="a gate needs held-out text of the native length, 256 tokens"):
        tune(data="little.txt", schedule=(256,), steps_per_stage=1, gate=0.03)


# Other rows


def test_short_documents_share_rows_and_are_a_share_of_a_mixture():
    patched()
    said: list[str] = []
    tune(short_data="short.jsonl", short_share=0.4, batch_tokens=5120, say=said.append)
    assert any("60.0%" in line and "40.0%" in line and "packed from 400 of 400 documents" in line for line in said)
    assert len(json.loads(Path("tuned/ropext.json").read_text())["training"]["documents"]) == 401
    said.clear()
    tune(data="short.jsonl", pack=True, schedule=(256,), out=Path("t2"), held_out="long.txt", say=said.append)
    assert any("no token of this stage sees back farther than" in line for line in said)


def test_only_the_answers_of_conversations_are_learnt():
    make_checkpoint(Path("source"))
    config = json.loads(Path("source/tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    Path("source/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    api.patch("source", method="linear", factor=4.0, out=Path("patched"))
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"it is {n}"}]}
        for n in range(300)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    tune(data="chat.jsonl", chat=True, schedule=(256,), say=said.append)
    answers = sum(len(f"it is {n}\n") for n in range(300))
    assert any(f"{answers} tokens with loss" in line for line in said)
    assert Path("tuned/config.json").exists()


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "llama3", "ntk-by-parts", "progressive"])
def test_positions_are_skipped_to_a_long_target_in_rows_of_the_native_length(method, monkeypatch):
    from ropext import loss

    seen = set()
    once = loss.summed_loss

    def spy(model, ids, labels, **more):
        seen.add((ids.shape[1], "attention_mask" in more))
        return once(model, ids, labels, **more)

    monkeypatch.setattr(loss, "summed_loss", spy)
    patched(method)
    said: list[str] = []
    result = tune(schedule=(512, 1024), pose=True, say=said.append)
    assert seen == {(256, True)}
    assert [stage.tokens for stage in result.stages] == [512, 512]
    assert any("positions up to 1023" in line for line in said)
    assert json.loads(Path("tuned/config.json").read_text())["max_position_embeddings"] == 1024


def test_positions_are_not_skipped_under_a_table_that_changes_with_them():
    patched("dynamic")
    with pytest.raises(Refused, match="static rotary table"):
        tune(pose=True)


# LoRA


def test_lora_leaves_an_adapter_and_a_merged_checkpoint_that_agree():
    from peft import PeftModel

    patched("yarn", tie_word_embeddings=True)
    result = tune(lora=4, learning_rate=1e-2)
    assert result.adapter and Path(result.adapter).name == "tuned.adapter"
    ids = torch.arange(3, 203)[None]
    merged, base = load_model("tuned"), load_model("patched")
    with torch.no_grad():
        plain, expected = base(ids).logits, merged(ids).logits
        adapted = PeftModel.from_pretrained(base, result.adapter).eval()(ids).logits
    assert torch.allclose(adapted, expected, atol=1e-4) and not torch.allclose(plain, expected, atol=1e-2)
    with pytest.raises(Refused, match="is an adapter. Name the merged checkpoint"):
        api.evaluate([result.adapter], lengths=(64,), data="long.txt")
    assert json.loads(Path("tuned/ropext.json").read_text())["training"]["lora"] == "rank 4 with norms and embeddings"
    config = json.loads(Path("tuned/config.json").read_text())
    assert config["rope_scaling"] == json.loads(Path("patched/config.json").read_text())["rope_scaling"]


# Stopping


STOPPED = """
import os, sys, time
sys.path.insert(0, {root!r})
from ropext import api, loss, training
training.STILL_FALLING = 1.0
once, calls = loss.summed_loss, []
def stopping(*arguments, **more):
    calls.append(1)
    if len(calls) == {call}:
        os.kill(os.getpid(), {number})
    return once(*arguments, **more)
loss.summed_loss = stopping
api.finetune("patched", schedule=(256, 1024), data="long.txt", steps_per_stage=2, learning_rate=1e-3,
             out=__import__("pathlib").Path("tuned"), progress=False, lora={lora}, gate={gate})
"""


@pytest.mark.parametrize(("lora", "gate"), [(None, None), (4, None), (None, 10.0)])
def test_sigterm_saves_and_exits_and_the_run_goes_on_to_the_same_bits(lora, gate, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr("ropext.training.STILL_FALLING", 1.0)
    patched()
    root = str(Path(__file__).parents[1])
    program = STOPPED.format(root=root, call=3, number=int(signal.SIGTERM), lora=lora, gate=gate)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "stopping at the end of this step" in done.stderr
    assert not Path("tuned").exists() and list(Path("tuned.run").glob("state-*"))
    tune(resume=True, lora=lora, gate=gate)
    tune(out=Path("undisturbed"), lora=lora, gate=gate)
    mine, theirs = load_file("tuned/model.safetensors"), load_file("undisturbed/model.safetensors")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert curves()["loss"] == curves("undisturbed.run")["loss"]


def test_a_run_is_not_resumed_with_another_adapter():
    patched()
    root = str(Path(__file__).parents[1])
    program = STOPPED.format(root=root, call=3, number=int(signal.SIGTERM), lora=4, gate=None)
    subprocess.run([sys.executable, "-c", program], capture_output=True)
    with pytest.raises(Refused, match="LoRA was rank 4 with norms and embeddings, now rank 4"):
        tune(resume=True, lora=4, lora_only=True)


def test_as_many_states_are_kept_as_asked_for(monkeypatch):
    from ropext import run

    patched()
    left = []
    kept = run.saved_states
    monkeypatch.setattr(run, "saved_states", lambda folder: left.append([s.name for s in kept(folder)]) or kept(folder))
    tune(keep=3, save_every=1e-9, steps_per_stage=4)
    assert left[-1] == ["state-8", "state-7", "state-6"]


def test_a_fresh_optimizer_begins_its_rate_anew_with_each_stage():
    patched()
    tune(fresh_optimizer=True, steps_per_stage=3)
    rates = [value for _, value in curves()["learning_rate"]]
    assert rates[:3] == rates[3:]
    with pytest.raises(UsageError):
        tune(tokens_per_stage=1, steps_per_stage=1, out=Path("t2"))


# Norms


def test_norms_of_each_layer_are_logged_and_add_up():
    patched()
    tune()
    logged = curves()
    assert {"activation_rms/layer_00", "activation_rms/layer_01", "gradient_norm/layer_01"} <= set(logged)
    parts = [tag for tag in logged if tag.startswith("gradient_norm/")]
    for step, whole in enumerate(value for _, value in logged["gradient_norm"]):
        assert sum(logged[tag][step][1] ** 2 for tag in parts) ** 0.5 == pytest.approx(whole, rel=1e-4)


def test_a_layer_that_gives_nan_is_named(monkeypatch):
    from safetensors.torch import load_file, save_file

    patched()
    weights = load_file("patched/model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, "patched/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"the loss is nan.*first in layer 01 \(activation rms\)"):
        tune(held_out="long.txt")


def test_a_gradient_that_explodes_stops_the_stage_with_the_layer_named(monkeypatch):
    from ropext import loss

    patched()
    once, calls = loss.summed_loss, []

    def exploding(*arguments, **more):
        calls.append(1)
        return once(*arguments, **more) * (1e6 if len(calls) == 8 else 1)

    monkeypatch.setattr(loss, "summed_loss", exploding)
    with pytest.raises(Exception, match=r"times its median, most of it in .*\. The last saved state|No state"):
        tune(schedule=(1024,), steps_per_stage=10)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pose": True, "pack": True}, "--pose"),
        ({"chat": True, "data": "long.txt"}, "--chat reads conversations from a .jsonl file"),
        ({"short_data": "short.jsonl", "short_share": 1.0}, "between 0 and 1"),
        ({"keep": 0}, "--keep"),
        ({"tracker": "nothing"}, "--tracker is one of .*tensorboard.* here: found 'nothing'"),
        ({"tracker": "aim"}, "found 'aim', whose package is not installed"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(options, says):
    patched()
    with pytest.raises(UsageError, match=says):
        tune(**options)
    assert not Path("tuned.run").exists()


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_is_at_least_one(rank):
    patched()
    with pytest.raises((UsageError, Refused), match="rank"):
        tune(lora=rank)


# Memory and disk


def test_a_stage_that_cannot_fit_is_refused_before_the_model_is_loaded(monkeypatch):
    from ropext import run

    patched()
    monkeypatch.setattr(run, "load_model", lambda *arguments, **more: pytest.fail("loaded"))
    said: list[str] = []
    with pytest.raises(Refused, match=r"256 needs 0\.1 GB, 0\.0 GB are free; lower the longest length"):
        tune(memory=1_000_000, say=said.append)
    assert any(line.startswith("memory    256 stage: at least") for line in said)
    monkeypatch.setattr(run, "disk_bytes", lambda *arguments, **more: 10**18)
    with pytest.raises(Refused, match=r"a run needs 1000000000\.0 GB of disk"):
        tune()
    assert not Path("tuned.run").exists()


def test_a_tight_memory_has_activations_computed_twice_and_changes_no_bit(monkeypatch):
    from dataclasses import replace

    from safetensors.torch import load_file

    from ropext import run

    predict = run.predict  # without what any model needs, beside which this one is nothing
    monkeypatch.setattr(run, "predict", lambda *given, **more: replace(predict(*given, **more), libraries=0))
    patched()
    said: list[str] = []
    tune(memory=16_000_000, say=said.append)
    tune(out=Path("roomy"))
    assert sum("gradient checkpointing" in line for line in said) == 2
    mine, theirs = load_file("tuned/model.safetensors"), load_file("roomy/model.safetensors")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_how_a_batch_is_split_changes_its_gradients_by_rounding_only():
    """Rows with uneven numbers of labels, one with none: four at once, and one at a time (CASES.md, D9)."""
    from ropext.feed import UNSCORED, Batch
    from ropext.loss import as_loss

    make_checkpoint(Path("source"))
    ids = torch.arange(3, 3 + 4 * 60).reshape(4, 60).numpy()
    labels = ids.copy()
    labels[0, :40], labels[1, :] = UNSCORED, UNSCORED
    batch, found = Batch(ids=ids, labels=labels), []
    for rows in (4, 1):
        model = load_model("source")
        for part in batch.split(rows):
            loss = as_loss(model)(torch.from_numpy(part.ids), torch.from_numpy(part.labels), **part.arguments("cpu"))
            (loss / batch.scored).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.isfinite(gradient).all()
        assert torch.allclose(gradient, found[1][name], rtol=1e-5, atol=1e-7), name
