"""Which checkpoint a command means when none is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ropext
from ropext import workspace
from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused
from tests.bare import bare_checkpoint, edit_json


@pytest.fixture
def built_in(tmp_path, monkeypatch):
    """An empty workspace, with a small checkpoint in the place of the built-in one."""
    folder = bare_checkpoint(tmp_path / "package" / "checkpoint")
    monkeypatch.setattr("ropext.workspace.CHECKPOINT", folder)
    monkeypatch.setattr("os.fsync", lambda _: None)  # waiting for the disk shows nothing here
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def patch(model=None, **options):
    return ropext.patch(model, **({"method": "ntk", "factor": 4.0, "verify": False} | options))


def tuned_from(folder: Path, created: str) -> Path:
    """The same checkpoint as finetune would record it."""
    out = folder.with_name(folder.name + "-tuned")
    shutil.copytree(folder, out)
    source = json.loads((out / "ropext.json").read_text())["source"]
    changes = {"kind": "finetune", "created": created, "native_length": 1024}
    edit_json(out / "ropext.json", source=source | {"model": str(folder.absolute())}, **changes)
    return out


def test_an_empty_workspace_means_the_built_in_checkpoint(built_in):
    for choose in (workspace.for_patch, workspace.for_finetune, workspace.for_eval):
        choice = choose()
        assert (choice.path, choice.model, choice.name) == (built_in, "built-in", "demo")
        assert "workspace" in choice.why


def test_patch_without_a_model_takes_the_built_in_checkpoint_and_says_so(built_in):
    result = patch()
    assert (result.source, result.why) == ("built-in", "the workspace is empty")
    assert Path(result.out) == Path("ropext-runs/demo-ntk-1k") and open_checkpoint(Path(result.out))
    assert json.loads(Path(result.out, "ropext.json").read_text())["source"]["model"] == "built-in"


def test_patch_takes_the_source_of_the_newest_lineage(built_in, tmp_path):
    model = bare_checkpoint(tmp_path / "mine")
    patch()
    patch(str(model))
    tuned_from(Path("ropext-runs/mine-ntk-1k"), created="2999")
    result = patch(method="linear")
    assert (result.source, result.why) == (str(model), "the source of the newest lineage")
    assert Path(result.out).name == "mine-linear-1k"


def test_finetune_takes_the_newest_patched_checkpoint_and_eval_the_newest_output(built_in, tmp_path):
    patch()
    newest = patch(str(bare_checkpoint(tmp_path / "mine"))).out
    tuned = tuned_from(Path("ropext-runs/demo-ntk-1k"), created="2999")
    assert workspace.for_finetune().path == Path(newest)
    assert workspace.for_eval().path == tuned
    assert "newest" in workspace.for_eval().why


def test_what_is_hidden_or_damaged_is_never_chosen(built_in):
    kept = Path(patch().out)
    for name in (".demo.ropext-123", "damaged"):
        shutil.copytree(kept, kept.with_name(name))
        edit_json(kept.with_name(name) / "ropext.json", created="2999")
    (kept.with_name("damaged") / "model.safetensors").write_bytes(b"")
    kept.with_name("other").mkdir()
    assert workspace.for_eval().path == kept


def test_a_directory_is_named_by_its_path_and_the_built_in_one_by_its_name(built_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    choice = workspace.named("package/checkpoint")
    assert choice.model == str(tmp_path / "package" / "checkpoint") and choice.name == "checkpoint"
    assert workspace.named("built-in").path == built_in
    monkeypatch.chdir(built_in)
    assert workspace.named(".").name == "checkpoint"


def test_an_output_inside_the_source_is_refused_when_one_works_in_the_model_itself(built_in, monkeypatch):
    monkeypatch.chdir(built_in)
    with pytest.raises(Refused, match="never lies in its source"):
        patch(".")
    assert not (built_in / "ropext-runs").exists()


def test_the_lineage_of_the_built_in_checkpoint_is_recognised(built_in, tmp_path):
    demo = open_checkpoint(Path(patch().out))
    other = open_checkpoint(Path(patch(str(bare_checkpoint(tmp_path / "mine"))).out))
    assert workspace.is_built_in_lineage(demo) and workspace.is_built_in_lineage(open_checkpoint(built_in))
    assert not workspace.is_built_in_lineage(other)
