"""A directory that is there whole or not at all, whatever fails or dies, and what a dead process left is cleared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ropext
from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused, RopextError
from ropext.staging import staged
from tests.bare import bare_checkpoint, snapshot
from tests.killed import content

ROOT = Path(__file__).parents[1]
DEAD = 2**22 + 1  # above the largest process number of Linux


@pytest.mark.parametrize("options", ["clone", "link", "copy --overwrite"])
def test_a_patch_killed_at_any_step_leaves_nothing_that_passes_for_a_checkpoint(tmp_path, options):
    source = bare_checkpoint(tmp_path / "m", shards=2)
    (source / "sub").mkdir()
    (source / "sub" / "vocab.txt").write_text("a")
    before = snapshot(source)
    command = [sys.executable, str(ROOT / "tests" / "killed.py"), str(source), str(tmp_path / "out"), *options.split()]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    deaths = json.loads(done.stdout)
    steps = [name for name, *_ in deaths]
    assert len(steps) > 40 and {"mkdir", "open", "write", "rename", "get_blocking"} <= set(steps), steps
    assert ("link" in steps) == (options == "link") and ("sendfile" in steps or options == "link")
    assert snapshot(source) == before
    whole = [content(made(source, tmp_path / f"whole{factor:g}", factor)) for factor in (2.0, 4.0)]
    for step, (name, after, next_write) in enumerate(deaths):
        left = {folder: found for folder, found in after.items() if found is not None}
        assert left in ({}, {"p": whole[0]}, {"p": whole[1]}), f"killed at step {step}, before {name}"
        hidden = [folder for folder, found in next_write.items() if found is None]
        assert not hidden, f"killed at step {step}, before {name}"
        if "--overwrite" in options:
            assert next_write["p"] in whole, f"the older output is lost after step {step}, before {name}"


def made(source, out, factor):
    ropext.patch(str(source), method="ntk", factor=factor, out=out, verify=False)
    return out


def leftover(parent, name, content="x"):
    folder = parent / name
    folder.mkdir()
    (folder / "file").write_text(content)
    return folder


def write(out, **options):
    with staged(out, **options) as folder:
        (folder / "file").write_text("new")


def test_what_dead_processes_left_is_cleared_at_the_next_write_beside_it(tmp_path):
    for name in (f".p.ropext-{DEAD}", f".other.ropext-{DEAD}", f".naïve x.ropext-{DEAD}", f".p.ropext-{os.getpid()}"):
        leftover(tmp_path, name)
    write(tmp_path / "p")
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize(
    "name",
    [
        f"p.ropext-{DEAD}",
        f".ropext-{DEAD}",
        ".p.ropext-",
        ".p.ropext-0",
        ".p.ropext-1x",
        f".p.ropext-{DEAD}-new",
        f".p.ropext-{DEAD}0000",
        ".git",
        f".p.ropext-{os.getppid()}",
    ],
)
def test_what_is_not_ours_or_still_in_use_is_never_cleared(tmp_path, name):
    leftover(tmp_path, name)
    write(tmp_path / "q")
    assert (tmp_path / name / "file").read_text() == "x"


def test_a_file_or_a_link_with_such_a_name_is_never_cleared(tmp_path):
    (tmp_path / f".a.ropext-{DEAD}").write_text("x")
    (tmp_path / f".b.ropext-{DEAD}").symlink_to(leftover(tmp_path, "kept"))
    write(tmp_path / "q")
    assert (tmp_path / f".a.ropext-{DEAD}").exists() and (tmp_path / f".b.ropext-{DEAD}" / "file").exists()


def test_an_output_that_was_only_put_aside_comes_back(tmp_path):
    leftover(tmp_path, f".p.ropext-{DEAD}-old", "older")
    leftover(tmp_path, f".p.ropext-{DEAD}")
    write(tmp_path / "q")
    assert (tmp_path / "p" / "file").read_text() == "older"
    leftover(tmp_path, f".p.ropext-{DEAD}-old", "oldest")
    write(tmp_path / "r")
    assert (tmp_path / "p" / "file").read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "q", "r"]


def test_a_folder_that_is_locked_is_left_to_the_process_that_fills_it(tmp_path):
    """Its number says nothing where it runs in another container: here the number is a dead one."""
    with staged(tmp_path / "p") as folder:
        (folder / "file").write_text("new")
        elsewhere = folder.rename(tmp_path / f".p.ropext-{DEAD}")
        write(tmp_path / "q")
        assert elsewhere.exists()
        elsewhere.rename(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "q"]


def test_two_writers_of_one_output_in_one_process_do_not_mix(tmp_path):
    begun, written = threading.Event(), threading.Event()

    def first():
        with staged(tmp_path / "p") as folder:
            (folder / "file").write_text("first")
            begun.set()
            written.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(10)
    with pytest.raises(RopextError, match="File exists"):
        write(tmp_path / "p")
    written.set()
    thread.join()
    assert (tmp_path / "p" / "file").read_text() == "first"


def test_an_output_that_appeared_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(Refused, match="not overwritten unasked"), staged(tmp_path / "p"):
        leftover(tmp_path, "p")
    assert (tmp_path / "p" / "file").read_text() == "x" and len(list(tmp_path.iterdir())) == 1


def test_every_copied_file_and_folder_reaches_the_disk_once_and_no_hard_link_does(tmp_path, monkeypatch):
    source, synced = bare_checkpoint(tmp_path / "m", shards=2), []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    for weights in ("copy", "link"):
        synced.clear()
        out = tmp_path / weights
        ropext.patch(str(source), method="ntk", factor=4.0, out=out, weights=weights, verify=False)
        assert open_checkpoint(out)
        names = [Path(path).name for path in synced if Path(path).parent.name.startswith(".")]
        files = {path.name for path in out.iterdir() if weights == "copy" or path.suffix != ".safetensors"}
        assert sorted(names) == sorted(files) and synced[-1] == str(tmp_path)
