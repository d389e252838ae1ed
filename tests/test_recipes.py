"""Recipes: what a person writes is read or refused by its place; shipped ones are run, or read by who reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint

RECIPES = Path(__file__).parents[1] / "recipes"
CONFIGURATIONS = sorted((RECIPES / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: file.stem)
def test_accelerate_reads_the_configuration(file):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(file))  # refuses unknown keys
    assert found.num_processes == 8 and found.mixed_precision == "no"
    assert (found.fsdp_config.get("fsdp_version") == 2) == (file.stem == "fsdp2")


@pytest.mark.slow
def test_fsdp_that_accelerate_would_drop_on_a_cpu_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("source"))
    Path("text.txt").write_text("some words of a text " * 400)
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ropext", "finetune", "source"]
    options = ["--schedule", "256", "--data", "text.txt", "--steps-per-stage", "1", "--device", "cpu", "--out", "tuned"]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    done = subprocess.run([sys.executable, "-m", *command, *options], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("FSDP was asked for, and Accelerate would run") == 1
    assert not Path("tuned").exists()


RECIPE = """
stages:
  - {length: 256, steps: 2, factor: 2, learning_rate: 2.0e-3}
  - {length: 1k, tokens: 2k, batch_tokens: 1k}
"""


def test_a_recipe_says_of_each_stage_what_it_is(tmp_path, monkeypatch):
    import json

    from ropext import api

    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("source"))
    api.patch("source", method="progressive", factor=4.0, out=Path("patched"))
    Path("text.txt").write_text("some words of a text " * 1500)
    Path("recipe.yaml").write_text(RECIPE)
    options = {"data": "text.txt", "learning_rate": 1e-3, "progress": False, "say": lambda line: None}
    result = api.finetune("patched", recipe=Path("recipe.yaml"), out=Path("tuned"), **options)
    assert [(s.length, s.factor, s.steps, s.tokens) for s in result.stages] == [
        (256, 2.0, 2, 2048),
        (1024, 4.0, 2, 2048),
    ]
    first = json.loads(Path("tuned.run/stages/256/config.json").read_text())
    assert first["max_position_embeddings"] == 512 and first["rope_theta"] == pytest.approx(10000 * 2 ** (16 / 14))


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_recipe_gives_stages_for_the_patch_that_it_names(file):
    from ropext.recipe import read_recipe
    from ropext.schedule import Wish, plan_stages

    wishes = [Wish(length=stage.length, tokens=stage.tokens) for stage in read_recipe(file).stages]
    stages = plan_stages(wishes, native_length=2048, window=8192, progressive=True)
    assert [stage.factor for stage in stages] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: []", "stages of .* does not"),
        ("[", "a recipe is a YAML file"),
        ("- 1", "the whole of .* does not"),
        ("stages: [{length: 2k, lenght: 3}]", r"stages.0.lenght of .* does not \(Extra inputs"),
        ("stages: [{length: 2q}]", "stages.0.length of .* a length is a whole number of tokens"),
        ("stages: [{length: 2k, steps: 0}]", "stages.0.steps"),
        ("stages: [{length: 2k, steps: true}]", "stages.0.steps"),
        ("stages: [{length: 2k, learning_rate: .nan}]", "stages.0.learning_rate"),
        ("stages: [{length: 2k, factor: 0.5}]", "stages.0.factor"),
    ],
)
def test_whatever_is_no_recipe_is_refused_by_its_place(text, says, tmp_path):
    from ropext.errors import UsageError
    from ropext.recipe import read_recipe

    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        read_recipe(tmp_path / "recipe.yaml")
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="a recipe is a YAML file"):
        read_recipe(tmp_path / "nowhere.yaml")


def test_stages_come_from_a_schedule_or_from_a_recipe():
    from ropext import api
    from ropext.errors import UsageError

    for asked in ({}, {"schedule": (256,), "recipe": Path("recipe.yaml")}):
        with pytest.raises(UsageError, match="give one of them"):
            api.finetune("built-in", **asked, say=lambda line: None)
