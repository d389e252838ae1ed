"""What each training stage makes of an extension, by every method, and what readers make of the trained result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ropext
from ropext.checkpoint import open_checkpoint
from ropext.extension import Extension
from ropext.facts import read_facts
from ropext.rope import frequencies_at, method_named
from tests.bare import bare_checkpoint
from tests.tiny import make_checkpoint

LISTS = {"short_factor": (1.0,) * 8, "long_factor": (1.0, 1.1, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)}
SETTINGS = {
    "linear": {},
    "ntk": {},
    "ntk-by-parts": {"beta_fast": 16.0},
    "yarn": {"beta_fast": 16.0, "attention_factor": 1.25},
    "llama3": {"high_freq_factor": 8.0},
}
TUNED = {**SETTINGS, "abf": {"theta": 5e5}, "dynamic": {}, "longrope": LISTS, "progressive": {"inner": "yarn"}}


def extension_of(folder):
    checkpoint = open_checkpoint(folder)
    return Extension.of(checkpoint, read_facts(checkpoint))


@pytest.mark.parametrize("inner", SETTINGS)
def test_a_progressive_stage_is_its_inner_method_at_the_stage_s_length(tmp_path, inner):
    source, settings = bare_checkpoint(tmp_path / "m"), SETTINGS[inner]
    options = {"out": tmp_path / "p", "verify": False, "factor": 4.0}
    ropext.patch(str(source), method="progressive", inner=inner, **options, **settings)
    extension = extension_of(tmp_path / "p")
    for length in (512, 1024):
        single = ropext.patch(
            str(source), method=inner, to=length, out=tmp_path / str(length), verify=False, **settings
        )
        stage = extension.at(length)
        assert stage.config == json.loads((tmp_path / str(length) / "config.json").read_text())
        assert (stage.window, stage.record["factor"], stage.record["method"]) == (length, single.factor, inner)
    plain = extension.at(256)
    assert plain.config["rope_scaling"] is None and plain.window == 256
    assert plain.config["rope_theta"] == 10000.0


@pytest.mark.parametrize("method", [name for name in TUNED if name != "progressive"])
def test_a_fixed_patch_is_the_same_at_every_stage(tmp_path, method):
    source = bare_checkpoint(tmp_path / "m")
    options = {"out": tmp_path / "p", "verify": False, "factor": 4.0}
    ropext.patch(str(source), method=method, **options, **TUNED[method])
    extension = extension_of(tmp_path / "p")
    assert extension.at(256) == extension.at(1024) and extension.at(512).config == extension.checkpoint.config
    assert extension.window == 1024


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Every method, patched and trained for one step at the target: method -> directory."""
    root = tmp_path_factory.mktemp("tuned")
    source = make_checkpoint(root / "m")
    (root / "text.txt").write_text("".join(f"line {number} of a text to learn\n" for number in range(400)))
    found = {}
    for method, settings in TUNED.items():
        ropext.patch(str(source), method=method, factor=4.0, out=root / method, **settings)
        found[method] = Path(
            ropext.finetune(
                str(root / method),
                schedule=(1024,),
                data=str(root / "text.txt"),
                steps_per_stage=1,
                out=root / f"{method}-tuned",
                say=lambda line: None,
                progress=False,
            ).out
        )
    return found


@pytest.mark.parametrize("reader", ["this_reader", "other_reader"])
def test_after_training_both_majors_compute_the_planned_tables(request, tuned, reader):
    readings = request.getfixturevalue(reader)([256, 1024], list(tuned.values()))
    for (method, settings), reading in zip(TUNED.items(), readings, strict=True):
        chosen = method_named(method, 4.0, 256, settings)
        for length in (256, 1024):
            planned = frequencies_at(chosen, length, 10000.0, 16)
            assert reading.table(length) == pytest.approx(planned, rel=5e-6), (method, length, reading.version)
            for scaling in reading.scaling[length].values():
                assert scaling == pytest.approx(chosen.attention_scaling), method
        assert not reading.log and not reading.warnings, method


def test_after_training_the_target_is_the_native_length(tuned):
    for method, folder in tuned.items():
        assert read_facts(open_checkpoint(folder)).native_length == 1024, method
