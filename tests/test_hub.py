"""Hub ids: resolved by the real huggingface_hub from a cache, or downloaded by a stand-in; the cache never changes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import ropext
from ropext import hub, workspace
from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused, RopextError, UsageError
from ropext.provenance import lineage
from tests.bare import bare_checkpoint, edit_json, snapshot

COMMIT, OLDER = "a" * 40, "b" * 40
ID = "org/My.model-1"


def cached(cache: Path, model: Path, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Puts a checkpoint into a hub cache as huggingface_hub lays it out: blobs, and a snapshot of links to them."""
    repository = cache / "models--org--My.model-1"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for file in model.iterdir():
        blob = repository / "blobs" / f"{commit[:4]}-{file.name}"
        shutil.copy(file, blob)
        blob.chmod(0o444)
        (folder / file.name).symlink_to(os.path.relpath(blob, folder))
    if ref:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and an empty folder to work in."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


@pytest.fixture
def model(tmp_path):
    return bare_checkpoint(tmp_path / "remote", shards=2)


def patch(source, **options):
    return ropext.patch(source, **({"method": "ntk", "factor": 4.0, "verify": False} | options))


def test_an_id_in_the_cache_is_patched_offline_and_its_commit_recorded(cache, model):
    cached(cache, model)
    before = snapshot(cache)
    result = patch(ID)
    assert result.source == f"{ID}@{COMMIT}"
    assert Path(result.out) == Path("ropext-runs/My.model-1-ntk-1k")
    out = open_checkpoint(Path(result.out))
    assert out.record["source"]["model"] == f"{ID}@{COMMIT}"
    assert out.config["max_position_embeddings"] == 1024
    assert not any(path.is_symlink() for path in out.path.rglob("*"))
    assert snapshot(cache) == before


def test_no_file_of_an_output_shares_its_inode_with_the_cache(cache, model):
    folder = cached(cache, model)
    out = Path(patch(ID).out)
    for path in folder.iterdir():
        assert path.stat().st_nlink == 1 and not path.samefile(out / path.name)
    for path in out.iterdir():
        path.write_text("somebody writes here")  # the blobs are read-only, the output is not
    assert open_checkpoint(folder).config["max_position_embeddings"] == 256


def test_hard_links_into_the_cache_are_refused_by_id_and_by_directory(cache, model):
    folder = cached(cache, model)
    for named in (ID, str(folder)):
        with pytest.raises(Refused, match=r"hub cache is never shared .*--weights clone"):
            patch(named, weights="link")
    assert not list(Path().glob("ropext-runs/*")) and all(path.stat().st_nlink == 1 for path in folder.iterdir())


def test_a_revision_picks_its_own_commit(cache, model):
    cached(cache, model)
    edit_json(model / "config.json", rope_theta=20000.0)
    cached(cache, model, OLDER, "v1.0")
    assert hub.fetch(f"{ID}@v1.0").commit == OLDER and hub.fetch(f"{ID}@{OLDER}").commit == OLDER
    assert hub.fetch(ID).commit == hub.fetch(f"{ID}@main").commit == COMMIT
    assert patch(f"{ID}@v1.0").theta_before == 20000.0


def test_a_directory_of_that_name_comes_before_the_hub(cache, model):
    cached(cache, model)
    own = bare_checkpoint(Path(ID))
    assert workspace.named(ID).path == Path(ID)
    assert patch(ID).source == str(own.absolute())


@pytest.mark.parametrize("name", ["ropext-runs/none", "/org/model", "./org/model", "a/b/c", "org/", "org", "-o/m", ""])
def test_what_is_no_hub_id_stays_a_directory_that_is_not_there(cache, name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UsageError, match="checkpoint directory"):
        open_checkpoint(workspace.named(name or "nowhere").path)


def test_the_lineage_of_an_output_leads_back_into_the_cache_while_it_is_there(cache, model):
    folder = cached(cache, model)
    out = open_checkpoint(Path(patch(ID).out))
    labels = lineage(out, Path("none"))
    assert [label for label, _ in labels] == ["source", "patched"] and labels[0][1].samefile(folder)
    again = patch(None, method="linear")
    assert again.source == f"{ID}@{COMMIT}" and again.why == "the source of the newest lineage"
    assert Path(again.out).name == "My.model-1-linear-1k"
    shutil.rmtree(cache)
    assert [label for label, _ in lineage(out, Path("none"))] == ["patched"]


@pytest.mark.parametrize("name", [ID, f"{ID}@v9", f"{ID}@{OLDER}"])
def test_an_id_that_the_cache_lacks_is_said_to_need_a_network(cache, model, name, monkeypatch):
    if name != ID:
        cached(cache, model)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set") as refusal:
        patch(name)
    assert name in str(refusal.value) and len(str(refusal.value).splitlines()) == 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing("LocalEntryNotFoundError", "no route to host"))
    with pytest.raises(RopextError, match=r"hub cannot be reached \(no route to host\)") as failure:
        patch(name)
    assert failure.value.exit_code == 1


def test_a_cached_model_without_safetensors_is_refused_with_the_way_to_convert_it(cache, model):
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    cached(cache, model)
    with pytest.raises(Refused, match=r"only safetensors weights are read.*save_pretrained"):
        patch(ID)


def failing(kind: str, message: str):
    def download(*_, **__):
        from huggingface_hub import errors

        known = getattr(errors, kind, OSError)
        error = known.__new__(known)  # what it is made from, an HTTP response, differs between releases
        error.args = (message,)
        raise error

    return download


@pytest.mark.parametrize(
    ("kind", "exit_code", "words"),
    [
        ("RepositoryNotFoundError", 2, "the hub knows no such model"),
        ("RevisionNotFoundError", 2, "the hub knows no 'org/My.model-1@v1'"),
        ("HFValidationError", 2, "a hub id is org/name or org/name@revision"),
        ("GatedRepoError", 1, "Ask for access at https://huggingface.co/org/My.model-1"),
        ("HfHubHTTPError", 1, "could not be downloaded: one line"),
        ("OSError", 1, "could not be downloaded: one line"),
    ],
)
def test_what_the_hub_answers_becomes_one_line_with_its_exit_code(cache, monkeypatch, kind, exit_code, words):
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing(kind, "one line\nand another"))
    with pytest.raises(RopextError, match=words) as failure:
        patch(f"{ID}@v1")
    assert failure.value.exit_code == exit_code and len(str(failure.value).splitlines()) == 1


@pytest.fixture
def downloads(cache, model, monkeypatch):
    """A stand-in for the hub that holds `model`: fills a snapshot by the patterns it is given, and lists the files."""
    from huggingface_hub.utils import filter_repo_objects

    folder, fetched = cache / "models--org--My.model-1" / "snapshots" / COMMIT, []

    def download(name, *, revision, allow_patterns, ignore_patterns):
        assert name == ID and revision in (None, COMMIT)
        names = [path.relative_to(model).as_posix() for path in sorted(model.rglob("*")) if path.is_file()]
        for file in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(model / file, folder / file)
            fetched.append(file)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return fetched


def test_only_what_a_checkpoint_needs_is_downloaded(model, downloads):
    wanted = ["tokenizer.json", "vocab.txt", "spiece.model", "chat_template.jinja", "modeling_x.py", "LICENSE"]
    wanted += ["generation_config.json", "additional_chat_templates/tools.jinja"]
    other = ["pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors", "original/consolidated.00.pth"]
    other += ["original/params.json", "onnx/model.onnx", "tf_model.h5", "pytorch_model.bin.index.json", "m.gguf"]
    other += ["model-00003-of-00003.safetensors", "checkpoint-10/model.safetensors", "training_args.bin", "x.pkl"]
    before = {path.name for path in model.iterdir()}
    for file in (*wanted, *other):
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_text("{}")
    patch(ID)
    assert sorted(downloads) == sorted({*before, *wanted})


def test_a_model_in_one_file_is_downloaded_as_one(tmp_path, model, downloads):
    shutil.rmtree(model)
    bare_checkpoint(model)
    patch(ID)
    assert set(downloads) == {"config.json", "tokenizer_config.json", "model.safetensors"}


@pytest.mark.parametrize("index", ["{", '{"weight_map": 1}', '{"weight_map": {"a": "../../x", "b": 3, "c": "*"}}'])
def test_a_damaged_or_hostile_index_downloads_nothing_more_and_is_refused(model, downloads, index):
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(Refused, match=r"model\.safetensors\.index\.json"):
        patch(ID)
    assert not [file for file in downloads if file.endswith(".safetensors")]


def test_the_directory_of_a_snapshot_is_known_by_its_form_alone():
    assert hub.model_of(Path(f"/c/models--org--name/snapshots/{COMMIT}")) == f"org/name@{COMMIT}"
    for other in ("/", "/c/models--org--name", f"/c/models--org--name/blobs/{COMMIT}", "/c/x/snapshots/y", "models--a"):
        assert hub.model_of(Path(other)) is None
    assert json.dumps(hub.Snapshot(path=Path("x"), id="o/n", commit="c").model) == '"o/n@c"'
