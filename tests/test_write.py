"""A written checkpoint is whole or absent, holds its source byte for byte, and never touches it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

import ropext
from ropext import write
from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused, RopextError, UsageError
from ropext.write import check_destination, json_bytes
from tests.bare import ABSENT, bare_checkpoint, snapshot


def patch(source, out, **options):
    defaults = {"method": "ntk", "factor": 4.0, "out": out, "verify": False}
    return ropext.patch(str(source), **(defaults | options))


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Waiting for the disk is most of the time of these tests, and none of what they show."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def source(tmp_path):
    return bare_checkpoint(tmp_path / "m", shards=2, metadata={"format": "pt", "extra": "x"})


@pytest.mark.parametrize("weights", ["clone", "copy", "link"])
def test_every_file_but_the_changed_ones_is_byte_identical_and_the_source_untouched(tmp_path, source, weights):
    extra = {
        "chat_template.jinja": "{{ 'ä' }}",
        "generation_config.json": '{"do_sample":false}',
        "modeling_x.py": "1/0",
    }
    for name, text in extra.items():
        (source / name).write_text(text, encoding="utf-8")
    (source / "sub").mkdir()
    (source / "sub" / "vocab.txt").write_text("a\n")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("ref")
    before = snapshot(source)
    patch(source, tmp_path / "p", weights=weights)
    assert snapshot(source) == before
    after = snapshot(tmp_path / "p")
    assert set(after) == set(before) - {".git/HEAD"} | {"ropext.json"}
    assert {name for name in before if after.get(name) not in (before[name], None)} == {
        "config.json",
        "tokenizer_config.json",
    }
    assert json.loads((tmp_path / "p" / "config.json").read_text())["max_position_embeddings"] == 1024


def test_linked_weights_share_their_inode_and_small_files_do_not(tmp_path, source):
    patch(source, tmp_path / "p", weights="link")
    for path in source.iterdir():
        assert path.samefile(tmp_path / "p" / path.name) == (path.suffix == ".safetensors")


def test_only_the_limit_changes_in_the_tokenizers_file(tmp_path):
    source = bare_checkpoint(tmp_path / "m")
    raw = b'{ "name":"na\xc3\xafve \\u6f22",\r\n\t"model_max_length" :256,  "sizes": {"model_max_length": 99} }'
    (source / "tokenizer_config.json").write_bytes(raw)
    patch(source, tmp_path / "p")
    assert (tmp_path / "p" / "tokenizer_config.json").read_bytes() == raw.replace(b":256", b":1024")


@pytest.mark.parametrize(
    "text", ['"inner": {"model_max_length": 256}, "model_max_length": 256', '"model_max_length": 2.56e2']
)
def test_the_limit_is_found_wherever_and_however_it_is_written(tmp_path, text):
    source = bare_checkpoint(tmp_path / "m")
    (source / "tokenizer_config.json").write_text(f"{{{text}}}")
    patch(source, tmp_path / "p")
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (source, tmp_path / "p"))
    assert after == before | {"model_max_length": 1024}


@pytest.mark.parametrize("limit", [int(1e30), 1e30, ABSENT, None, 512, 100_000])
def test_a_limit_that_is_not_the_old_window_is_left_alone(tmp_path, limit):
    source = bare_checkpoint(tmp_path / "m", limit=limit)
    patch(source, tmp_path / "p")
    assert (tmp_path / "p" / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()


def test_a_limit_that_is_the_stated_native_length_is_raised(tmp_path):
    source = bare_checkpoint(tmp_path / "m", max_position_embeddings=320, limit=256)
    patch(source, tmp_path / "p", native_length=256)
    assert open_checkpoint(tmp_path / "p").tokenizer_config["model_max_length"] == 1024


def test_a_checkpoint_without_a_tokenizer_gets_none(tmp_path, source):
    (source / "tokenizer_config.json").unlink()
    patch(source, tmp_path / "p")
    assert not (tmp_path / "p" / "tokenizer_config.json").exists()


def test_a_config_keeps_values_that_json_has_no_plain_form_for(tmp_path):
    source = bare_checkpoint(tmp_path / "m", limits=[0.0, float("inf")])
    raw = (source / "config.json").read_text().replace('"limits"', '"lone": "\\ud800", "limits"')
    (source / "config.json").write_text(raw)
    patch(source, tmp_path / "p")
    written = json.loads((tmp_path / "p" / "config.json").read_bytes())
    assert written["lone"] == "\ud800" and written["limits"] == [0.0, float("inf")]
    assert json_bytes({"a": "漢"}) == '{\n  "a": "漢"\n}\n'.encode()


@pytest.mark.parametrize("name", ["with space", "naïve-漢字", "-dash", "a%b{c}"])
def test_any_path_will_do(tmp_path, name):
    source = bare_checkpoint(tmp_path / name / "m")
    result = patch(source, tmp_path / name / "out p")
    assert open_checkpoint(Path(result.out)).record["source"]["model"] == str(source)


def test_a_source_of_links_into_a_cache_gives_real_files_and_leaves_the_cache_alone(tmp_path):
    cache = bare_checkpoint(tmp_path / "blobs")
    links = tmp_path / "snapshots" / "abc"
    links.mkdir(parents=True)
    for file in cache.iterdir():
        file.chmod(0o444)
        (links / file.name).symlink_to(os.path.relpath(file, links))
    before = snapshot(cache)
    for weights in ("clone", "link"):
        patch(links, tmp_path / weights, weights=weights)
        assert not any(path.is_symlink() for path in (tmp_path / weights).iterdir())
        open_checkpoint(tmp_path / weights)
    assert snapshot(cache) == before


def test_a_read_only_source_is_patched_as_it_stands(tmp_path, source):
    for path in [*source.iterdir(), source]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        patch(source, tmp_path / "p")
        (tmp_path / "p" / "config.json").write_text("{}")  # the copy is the user's own
    finally:
        source.chmod(0o755)


def test_an_existing_output_is_refused_and_only_ropexts_own_is_replaced(tmp_path, source):
    out = tmp_path / "p"
    out.mkdir()
    for overwrite, reason in ((False, "not overwritten unasked"), (True, "only what ropext wrote")):
        with pytest.raises(Refused, match=reason):
            patch(source, out, overwrite=overwrite)
    assert not list(out.iterdir())
    out.rmdir()
    patch(source, out)
    (out / "model-00009-of-00009.safetensors").write_bytes(b"an older shard")
    with pytest.raises(Refused, match="not overwritten unasked"):
        patch(source, out, factor=8.0)
    patch(source, out, factor=8.0, overwrite=True)
    assert open_checkpoint(out).config["max_position_embeddings"] == 2048
    assert not (out / "model-00009-of-00009.safetensors").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_file_or_a_link_in_the_place_of_the_output_is_never_replaced(tmp_path, source, kind):
    patch(source, tmp_path / "older")
    out = tmp_path / "p"
    out.write_text("x") if kind == "file" else out.symlink_to({"link": "older", "dangling": "nowhere"}[kind])
    for overwrite in (False, True):
        with pytest.raises(Refused, match="overwritten"):
            patch(source, out, overwrite=overwrite)
    assert out.is_symlink() or out.read_text() == "x"


@pytest.mark.parametrize("where", [".", "sub", "sub/deep", "..", "../m"])
def test_an_output_inside_or_around_its_source_is_refused(tmp_path, source, where):
    before = snapshot(source)
    with pytest.raises(Refused, match="nothing is changed in place"):
        patch(source, source / where, overwrite=True)
    with pytest.raises(Refused, match="nothing is changed in place"):
        check_destination(source / where, source)
    assert snapshot(source) == before


def test_an_output_reached_through_a_link_to_the_source_is_refused(tmp_path, source):
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(Refused, match="nothing is changed in place"):
        patch(source, tmp_path / "link" / "p")


@pytest.mark.parametrize("name", ["x" * 300, "loop/p", "m/config.json/p", "file/p"])
def test_an_output_that_cannot_be_made_is_an_error_without_a_traceback(tmp_path, source, name):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(RopextError):
        patch(source, tmp_path / name)


def test_a_folder_that_leads_back_into_itself_is_refused(tmp_path, source):
    (source / "again").symlink_to(".")
    with pytest.raises(Refused, match="never holds itself"):
        patch(source, tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("broken", ["_copy", "fsync", "rename"])
def test_a_write_that_fails_leaves_nothing_at_all(tmp_path, source, monkeypatch, broken):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ropext.write._clone", lambda *_: False)
    where = {"_copy": write, "fsync": os, "rename": Path}[broken]
    before = snapshot(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(where, broken, full)
        with pytest.raises(RopextError, match="failed, nothing is left of it: No space left on device") as failure:
            patch(source, tmp_path / "new" / "p")
    assert failure.value.exit_code == 1
    assert snapshot(tmp_path) == before and not list((tmp_path / "new").iterdir())


def test_a_failed_overwrite_keeps_the_older_output(tmp_path, source, monkeypatch):
    patch(source, tmp_path / "p")
    before, rename = snapshot(tmp_path), Path.rename

    def fail_into_place(self, target):
        if Path(target).name == "p" and not self.name.endswith("-old"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_into_place)
    with pytest.raises(RopextError, match="Input/output error"):
        patch(source, tmp_path / "p", factor=8.0, overwrite=True)
    assert snapshot(tmp_path) == before


def test_too_little_room_is_said_before_anything_is_copied(tmp_path, source, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(RopextError, match="the disk must hold the output"):
        patch(source, tmp_path / "new" / "p")
    assert not list((tmp_path / "new").iterdir())


def test_shared_blocks_need_no_room(tmp_path, source, monkeypatch):
    """A stand-in for a file system that can share blocks: the one below the tests may not."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    monkeypatch.setattr("ropext.write._clone", lambda origin, target: bool(shutil.copyfile(origin, target)))
    patch(source, tmp_path / "p")
    with pytest.raises(RopextError, match="the disk must hold the output"):
        patch(source, tmp_path / "q", weights="copy")
    assert open_checkpoint(tmp_path / "p") and not (tmp_path / "q").exists()


def test_links_need_room_for_the_small_files_alone(tmp_path, source, monkeypatch):
    (source / "pytorch_model.bin").write_bytes(bytes(100_000))
    small = sum(path.stat().st_size for path in source.iterdir() if path.suffix == ".json")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(small, 0, small))
    patch(source, tmp_path / "p", weights="link")
    assert (tmp_path / "p" / "pytorch_model.bin").samefile(source / "pytorch_model.bin")


def test_a_file_of_several_blocks_is_copied_whole(tmp_path, source, monkeypatch):
    monkeypatch.setattr("ropext.write._BLOCK", 7)
    (source / "large").write_bytes(bytes(range(256)) * 3)
    patch(source, tmp_path / "p", weights="copy")
    assert snapshot(tmp_path / "p")["large"] == snapshot(source)["large"]


def test_links_across_file_systems_are_refused_with_the_other_way(tmp_path, source, monkeypatch):
    def across(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(Path, "hardlink_to", across)
    with pytest.raises(UsageError, match="one file system.*--weights copy"):
        patch(source, tmp_path / "p", weights="link")
    assert not [path for path in tmp_path.iterdir() if path != source]
