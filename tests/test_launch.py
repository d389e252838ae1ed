"""Evaluation and training in several processes: the figures of one, each window used once, one writer, one voice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ropext import api
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.slow
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 256}


def launched(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ropext` under torchrun on the CPU; what torchrun itself says is on stderr too."""
    command = ["torch.distributed.run", "--nproc_per_node", str(processes), "--standalone", "-m", "ropext"]
    return subprocess.run(
        [sys.executable, "-m", *command, *arguments, "--device", "cpu"], capture_output=True, text=True
    )


def test_three_processes_score_22_windows_once_and_give_the_figures_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number, windows in enumerate((9, 7, 6)):
        Path(f"texts/{number}.txt").write_text(
            "".join(chr(97 + (7 * i + number * i * i) % 26) for i in range(511 * windows))
        )
    make_checkpoint(Path("default"))
    make_checkpoint(Path("dynamic"), rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    make_checkpoint(Path("longrope"), max_position_embeddings=1024, rope_scaling=LONGROPE | ORIGINAL, **ORIGINAL)
    names = ["default", "dynamic", "longrope"]
    one = api.evaluate(names, lengths=(128, 512), data="texts", last_tokens=64, batch_size=4, say=lambda line: None)
    wanted = api.eval_document(one)
    done = launched(
        3,
        "eval",
        *names,
        *("--lengths", "512,128", "--data", "texts", "--last-tokens", "64", "--batch-size", "4"),
        *("--rescore", "--json", "--out", "report"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # one document: only the first process prints
    assert json.loads(Path("report/report.json").read_text()) == found
    for mine, theirs in zip(found["models"], wanted["models"], strict=True):
        assert theirs["results"][1]["windows"] == 22
        for figure, expected in zip(mine["results"][::-1], theirs["results"], strict=True):
            assert (figure["windows"], figure["tokens"]) == (expected["windows"], expected["tokens"])
            assert figure["nll"] == pytest.approx(expected["nll"], rel=1e-6)
        for figure, expected in zip(mine["by_context"][::-1], theirs["by_context"], strict=True):
            assert figure["nll"] == pytest.approx(expected["nll"], rel=1e-6)
    refused = launched(2, "eval", "default", "--lengths", "512", "--data", "texts", "--out", "report")
    assert refused.returncode != 0 and refused.stderr.count("an existing output is not overwritten") == 1


def curves(run: str) -> dict[str, list[float]]:
    """What TensorBoard shows of a run, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run}/logs/finetune")
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in ("loss", "learning_rate", "gradient_norm")}


def test_two_processes_train_as_one_does(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    words = " ".join(f"{word} {number}" for number, word in enumerate(["alpha", "beta", "gamma"] * 900))
    Path("text.txt").write_text(words)
    make_checkpoint(Path("source"), tie_word_embeddings=True)
    api.patch("source", method="linear", factor=4.0, out=Path("patched"))
    asked = {
        "schedule": (256, 1024),
        "data": "text.txt",
        "steps_per_stage": 3,
        "batch_tokens": 3072,
        "learning_rate": 1e-3,
    }
    one = api.finetune("patched", **asked, out=Path("one"), progress=False, say=lambda line: None)
    options = ("--schedule", "256,1k", "--data", "text.txt", "--steps-per-stage", "3", "--batch-tokens", "3072")
    done = launched(2, "finetune", "patched", *options, "--learning-rate", "1e-3", "--out", "two", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for mine, theirs in zip(found["stages"], one.stages, strict=True):
        assert [mine["loss_first"], mine["loss_last"]] == pytest.approx([theirs.loss_first, theirs.loss_last], rel=1e-5)
    mine, theirs = curves("two.run"), curves("one.run")
    assert mine["learning_rate"] == theirs["learning_rate"] and len(mine["loss"]) == 6
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)
    weights, expected = load_file("two/model.safetensors"), load_file("one/model.safetensors")
    assert set(weights) == set(expected)
    for name, tensor in weights.items():
        assert (tensor - expected[name]).abs().max() < 1e-5, name


SHARDED = """
import sys
from pathlib import Path
import numpy as np, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ropext.checkpoint import open_checkpoint
from ropext.cut import Windows
from ropext.held_out import HeldOut
from ropext.load import load_model
from ropext.loss import as_loss
from ropext.process import join_team
from ropext.watch import Watch
from ropext.write import trained_weights, write_tuned

team = join_team("cpu")
model = load_model("source")
loss, watch = as_loss(model), Watch(model)
if team.size > 1:
    mesh = init_device_mesh("cpu", (team.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(loss, mesh=mesh)
    watch = Watch(model)
ids = torch.arange(3, 3 + 2 * 64).reshape(2, 64)
held = HeldOut(
    windows=Windows(ids=ids.numpy().astype(np.int32), sizes=None, owners=np.zeros(2, np.int32), documents=("a",),
                    longest=64, bos=False), lengths=(16, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
own = ids[team.rank :: team.size]
with watch.looking():
    (loss(own, own) * team.size / (2 * 63)).backward()
norms = {tag: value for tag, value in watch.figures().items() if tag.startswith("gradient_norm")}
optimizer.step()
scores = held.score(loss, model, team)
weights = trained_weights(model)
if team.rank == 0:
    source = open_checkpoint(Path("source"))
    write_tuned(source, weights, Path(sys.argv[1]), {"config.json": source.read("config.json")})
    print(repr((dict(scores.by_length), norms)))
team.gather(None)
"""


def test_sharded_weights_are_trained_scored_gathered_and_saved_as_whole_ones(tmp_path, monkeypatch):
    from ast import literal_eval

    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("source"), tie_word_embeddings=True)
    Path("sharded.py").write_text(SHARDED)
    found = {}
    for processes, out in ((1, "whole"), (2, "sharded")):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
        done = subprocess.run([*command, "sharded.py", out], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found[out] = literal_eval(done.stdout.splitlines()[-1])
    for mine, theirs in zip(found["sharded"], found["whole"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    mine, theirs = load_file("sharded/model.safetensors"), load_file("whole/model.safetensors")
    before = load_file("source/model.safetensors")
    assert set(mine) == set(theirs) == set(before)
    for name, tensor in mine.items():
        assert (tensor - theirs[name]).abs().max() < 1e-4 and not tensor.equal(before[name]), name
