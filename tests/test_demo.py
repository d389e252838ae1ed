"""The three commands as they stand, in an empty folder, on the built-in checkpoint, with fewer steps and documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ropext import cli
from ropext.checkpoint import open_checkpoint
from ropext.demo import CHECKPOINT
from ropext.facts import read_facts

MOST_BYTES = 6_000_000  # of the weights inside the package


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs one command in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(line):
        monkeypatch.setattr(sys, "argv", ["ropext", *line.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


def test_the_built_in_checkpoint_is_what_the_design_says():
    checkpoint = open_checkpoint(CHECKPOINT)
    facts = read_facts(checkpoint)
    assert (facts.model_type, facts.native_length, facts.theta, facts.rotary_dims) == ("llama", 2048, 10000.0, 64)
    assert facts.tokenizer_length == 2048
    assert sum(file.size for file in checkpoint.weight_files.values()) <= MOST_BYTES
    assert "lm_head.weight" not in checkpoint.tensors  # tied


def test_patch_finetune_and_eval_take_up_where_the_last_one_ended(run):
    code, out, _ = run("patch --method ntk --factor 4")
    assert code == 0 and "built-in (the workspace is empty)" in out
    code, out, err = run("finetune --schedule 2k,4k,8k --steps-per-stage 1 --json")
    tuned = json.loads(out)
    assert code == 0 and "demo-ntk-8k (the newest patched checkpoint)" in err
    assert [stage["length"] for stage in tuned["stages"]] == [2048, 4096, 8192]
    assert set(tuned["stages"][0]) == {
        *("length", "factor", "steps", "tokens", "loss_first", "loss_last", "seconds", "peak_memory_bytes"),
        *("held_out_before", "held_out_after"),
    }
    assert list(Path("ropext-runs/demo-ntk-8k-tuned.run/logs").rglob("events.out.tfevents.*"))
    code, out, err = run("eval --lengths 512,8192 --documents 2 --json")
    scores = json.loads(out)
    assert code == 0 and "demo-ntk-8k-tuned (the newest output)" in err
    source, patched, trained = scores["models"]
    assert [source["label"], patched["label"], trained["label"]] == ["source", "patched", "tuned"]
    assert all(figure["status"] == "ok" for model in scores["models"] for figure in model["results"])

    def beyond(model):  # mean loss past the native length, nats per token
        blocks = [block["nll"] for block in model["by_position"] if block["start"] >= 2048]
        return sum(blocks) / len(blocks)

    assert beyond(source) - beyond(patched) > 0.1  # ntk mends without training what the source breaks
    assert source["results"][0]["nll"] == pytest.approx(patched["results"][0]["nll"], abs=0.1)


def test_what_would_ruin_the_model_is_refused_with_the_safe_command(run):
    assert run("patch --method ntk --factor 4")[0] == 0
    code, _, err = run("finetune --schedule 2k,16k")
    assert code == 3 and "--factor 8" in err and err.count("\n") == 1
    code, _, err = run("patch --method ntk --factor 4")
    assert code == 3 and "existing output" in err and "--overwrite" in err
