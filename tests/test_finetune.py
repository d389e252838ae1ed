"""Fine-tuning as its user runs it: from a patched checkpoint on disk to a tuned one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ropext import api
from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused, UsageError
from ropext.extension import Extension
from ropext.facts import read_facts
from ropext.results import FinetuneResult
from ropext.rope import Ntk
from tests.tiny import make_checkpoint

TEXT = " ".join(f"{word} {number}" for number, word in enumerate(["alpha", "beta", "gamma"] * 400))  # 11k bytes


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("one.txt", "two.txt"):
        (folder / name).write_text(name + TEXT)
    return str(folder)


@pytest.fixture
def patched(tmp_path: Path):
    """Makes a patched tiny checkpoint: `patched("linear")`, window 256 -> 1024."""

    def make(method: str = "linear", **source) -> Path:
        make_checkpoint(tmp_path / "source", **source)
        api.patch(str(tmp_path / "source"), method=method, factor=4.0, out=tmp_path / "patched")
        return tmp_path / "patched"

    return make


def tune(model: Path, text: str, **options) -> FinetuneResult:
    defaults = {"schedule": (256, 512, 1024), "steps_per_stage": 2, "progress": False, "say": lambda line: None}
    return api.finetune(str(model), data=text, **(defaults | options))


def test_the_result_is_a_stock_checkpoint_that_both_readers_see_as_planned(patched, text, this_reader, other_reader):
    result = tune(patched("progressive"), text)
    stages = Path(result.out).with_name("patched-tuned.run") / "stages"
    folders = [stages / "256", stages / "512", Path(result.out)]
    planned = [Ntk(factor=f).frequencies(10000.0, 16) if f > 1 else None for f in (1, 2, 4)]
    for reader in (this_reader, other_reader):
        for reading, frequencies in zip(reader([64], folders), planned, strict=True):
            expected = frequencies or [10000.0 ** (-pair / 8) for pair in range(8)]
            assert reading.table(64) == pytest.approx(expected, rel=1e-6)
            assert not reading.log


@pytest.fixture(autouse=True)
def workspace_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_fixed_patch_keeps_its_factor_in_every_stage(patched, text):
    result = tune(patched("linear"), text)
    assert [stage.factor for stage in result.stages] == [4, 4, 4]
    for folder in (Path(result.out), Path(result.out + ".run") / "stages" / "256"):
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
        assert config["max_position_embeddings"] == 1024


def test_a_progressive_patch_raises_factor_and_window_with_the_stage(patched, text):
    result = tune(patched("progressive"), text)
    assert [stage.factor for stage in result.stages] == [1, 2, 4]
    config = json.loads((Path(result.out + ".run") / "stages" / "512" / "config.json").read_text())
    assert config["max_position_embeddings"] == 512
    tokenizer = json.loads((Path(result.out + ".run") / "stages" / "512" / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == 512


def test_the_native_length_of_the_result_is_what_it_was_trained_at(patched, text):
    result = tune(patched("ntk"), text, schedule=(256, 512))
    checkpoint = open_checkpoint(Path(result.out))
    assert read_facts(checkpoint).native_length == 512
    again = api.patch(result.out, method="ntk", factor=2.0, out=Path("again"), native_length=None)
    assert (again.native_length, again.target_length) == (512, 1024)


@pytest.mark.parametrize("tied", [True, False])
def test_dtype_and_tying_are_those_of_the_source_and_every_tensor_is_there(patched, text, tied):
    model = patched("linear", torch_dtype="bfloat16", tie_word_embeddings=tied)
    before, after = open_checkpoint(model), open_checkpoint(Path(tune(model, text).out))
    assert after.tensors == before.tensors
    assert {header.dtype for header in after.tensors.values()} == {"BF16"}
    assert ("lm_head.weight" in after.tensors) is not tied
    assert after.config == before.config


def test_the_weights_changed_and_load_without_a_missing_one(patched, text):
    from ropext.load import load_model

    model = patched("linear")
    before, after = load_model(model), load_model(tune(model, text).out)
    moved = [not a.equal(b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(moved)


def test_shards_keep_their_layout(patched, text):
    model = patched("linear", shards=2)
    before, after = open_checkpoint(model), open_checkpoint(Path(tune(model, text).out))
    assert after.tensors == before.tensors and len(after.weight_files) == 2


def test_a_generation_config_that_transformers_would_not_save_is_kept_as_it_is(patched, text):
    model = patched("linear")
    odd = b'{"do_sample": false, "temperature": 0.6}\n'
    (model / "generation_config.json").write_bytes(odd)
    result = tune(model, text)
    assert (Path(result.out) / "generation_config.json").read_bytes() == odd


KILLED = """
import os, signal, sys
from pathlib import Path
from ropext import api, train

step, left = train._Run._step, int(sys.argv[3])

def dying(self):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    step(self)

train._Run._step = dying
options = {"steps_per_stage": 4, "save_every": 0.0, "progress": False}
api.finetune(sys.argv[1], schedule=(256, 512, 1024), data=sys.argv[2], **options)
"""


def test_a_run_killed_in_the_middle_of_stage_2_resumes_to_the_same_losses_and_weights(patched, text, tmp_path):
    model = patched("progressive")
    undisturbed = tune(model, text, steps_per_stage=4, out=tmp_path / "undisturbed")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(model), text, "6"],
        env=os.environ | {"PYTHONPATH": str(Path(api.__file__).parents[1])},
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    out = Path("ropext-runs/patched-tuned")
    assert not out.exists()
    heard: list[str] = []
    resumed = tune(model, text, steps_per_stage=4, resume=True, say=heard.append)
    assert any("6 of 12 steps" in line for line in heard), heard
    losses = [(stage.loss_first, stage.loss_last) for stage in resumed.stages]
    assert losses == [(stage.loss_first, stage.loss_last) for stage in undisturbed.stages]
    weights = [folder / "model.safetensors" for folder in (out, Path(undisturbed.out))]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    record = json.loads((out / "ropext.json").read_text())
    assert [stage["length"] for stage in record["training"]["stages"]] == [256, 512, 1024]


def test_a_stage_beyond_the_window_is_refused_with_the_factor_that_it_would_need(patched, text):
    with pytest.raises(Refused, match="factor 8"):
        tune(patched("ntk"), text, schedule=(256, 2048))
    assert not Path("ropext-runs").exists()


def test_too_little_long_text_is_refused_before_the_first_stage(patched, tmp_path):
    (tmp_path / "short.txt").write_text(TEXT[:700])
    with pytest.raises(Refused, match="1k stage needs"):
        tune(patched("ntk"), str(tmp_path / "short.txt"))
    assert not Path("ropext-runs/patched-tuned").exists()


def test_text_must_be_named_for_any_model_but_the_built_in_one(patched):
    with pytest.raises(UsageError, match="--data"):
        api.finetune(str(patched("ntk")), schedule=(256,))


def test_a_raised_window_is_refused(patched, text):
    model = patched("ntk")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    with pytest.raises(Refused, match="RPX001"):
        tune(model, text)


def test_an_existing_output_is_refused(patched, text):
    model = patched("ntk")
    (Path("there")).mkdir()
    with pytest.raises(Refused, match="existing output"):
        tune(model, text, out=Path("there"))


def test_a_fixed_patch_has_the_same_rope_at_every_length(patched):
    checkpoint = open_checkpoint(patched("linear"))
    extension = Extension.of(checkpoint, read_facts(checkpoint))
    assert extension.at(256) == extension.at(1024)
    assert extension.at(256).config == checkpoint.config
