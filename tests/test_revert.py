"""`ropext revert` gives back every file of the source byte for byte, or refuses and writes nothing."""

from __future__ import annotations

import json

import pytest

import ropext
from ropext.errors import Refused, UsageError
from tests.bare import bare_checkpoint, edit_json, snapshot, write_json


@pytest.fixture
def source(tmp_path):
    folder = bare_checkpoint(tmp_path / "m ü", shards=2, note="naïve 漢字", my_key=1, rope_scaling={})
    raw = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(raw.replace(b"\n", b"\r\n").replace(b": 256", b":  256"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "extra").mkdir()
    (folder / "extra" / "notes.txt").write_bytes(b"\x00\xff")
    return folder


@pytest.fixture
def patched(source, tmp_path):
    ropext.patch(str(source), method="yarn", factor=4.0, out=tmp_path / "p", verify=False)
    return tmp_path / "p"


def refused(folder, out, match):
    before = snapshot(folder)
    with pytest.raises(Refused, match=match):
        ropext.revert(str(folder), out=out)
    assert snapshot(folder) == before and not (out.exists() and out.name == "r")


def test_the_result_is_the_source_byte_for_byte(source, patched, tmp_path):
    assert snapshot(patched).keys() - snapshot(source).keys() == {"ropext.json"}
    result = ropext.revert(str(patched), out=tmp_path / "r")
    assert snapshot(tmp_path / "r") == snapshot(source)
    assert set(result.files) == {"config.json", "tokenizer_config.json"}


def test_what_was_edited_after_the_patch_is_reverted_to_the_recorded_bytes_too(source, patched, tmp_path):
    edit_json(patched / "tokenizer_config.json", model_max_length=9)
    (patched / "config.json").write_text("{")
    ropext.revert(str(patched), out=tmp_path / "r")
    assert snapshot(tmp_path / "r") == snapshot(source)


def test_a_file_added_after_the_patch_stays(source, patched, tmp_path):
    (patched / "mine.txt").write_text("mine")
    ropext.revert(str(patched), out=tmp_path / "r")
    assert snapshot(tmp_path / "r").keys() - snapshot(source).keys() == {"mine.txt"}


def test_a_reverted_checkpoint_can_be_patched_again(patched, tmp_path):
    ropext.revert(str(patched), out=tmp_path / "r")
    ropext.patch(str(tmp_path / "r"), method="yarn", factor=4.0, out=tmp_path / "again", verify=False)
    assert (tmp_path / "again" / "config.json").read_bytes() == (patched / "config.json").read_bytes()


def test_a_checkpoint_that_ropext_did_not_write_is_refused(source, tmp_path):
    refused(source, tmp_path / "r", r"only what ropext patched .* has no ropext\.json")


def test_a_tuned_checkpoint_is_refused_with_the_one_to_take_instead(source, patched, tmp_path):
    edit_json(patched / "ropext.json", kind="finetune")
    refused(patched, tmp_path / "r", r"changed the weights: .* tuned from .*m ü")


def test_weights_that_are_not_those_that_were_patched_are_refused(patched, tmp_path):
    bare_checkpoint(tmp_path / "other", shards=2, metadata={"format": "pt", "other": "x"})
    for shard in (tmp_path / "other").glob("*.safetensors"):
        (patched / shard.name).write_bytes(shard.read_bytes())
    refused(patched, tmp_path / "r", "needs the weights that were patched")


def test_an_existing_output_is_refused_and_stays(patched, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("kept")
    refused(patched, tmp_path / "there", "existing output")
    assert (tmp_path / "there" / "file").read_text() == "kept"
    refused(patched, patched, "never lies in its source")


@pytest.mark.parametrize(
    "originals",
    [None, {}, {"config.json": 3}, {"config.json": "{}"}, {"../config.json": "{}"}, {"tokenizer_config.json": "{}"}],
)
def test_originals_that_are_not_what_was_recorded_are_refused(patched, tmp_path, originals):
    record = json.loads((patched / "ropext.json").read_text())
    kept = record["original_files"] if originals and "../config.json" in originals else {}
    write_json(patched / "ropext.json", record | {"original_files": originals and kept | originals})
    refused(patched, tmp_path / "r", "original files")
    assert not (tmp_path / "config.json").exists()


def test_a_failed_revert_leaves_nothing(patched, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ropext.write._bring", full)
    before = snapshot(tmp_path)
    with pytest.raises(ropext.errors.RopextError, match="No space left"):
        ropext.revert(str(patched), out=tmp_path / "r")
    assert snapshot(tmp_path) == before


def test_a_directory_that_is_not_there_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError):
        ropext.revert(str(tmp_path / "absent"), out=tmp_path / "r")
