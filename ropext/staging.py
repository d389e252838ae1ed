"""A directory, or a file, that is there whole or not at all: filled in a hidden sibling, then renamed.

The sibling of NAME is .NAME.ropext-PID, with the number of the process that fills it, and is locked while that lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ropext.errors import Refused, RopextError

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.ropext-(?P<pid>[1-9]\d{0,8})(?P<aside>-old)?", re.DOTALL)


@contextlib.contextmanager
def staged(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden sibling of `out` to fill; renamed to `out` at the end, removed where the work fails."""
    try:
        out = out.resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(out.parent)
        folder = out.parent / f".{out.name}.ropext-{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        raise RopextError(f"the output must be writable: {out.parent} is not ({error.strerror})") from error
    try:
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(OSError):  # a file system without locks: its leftovers stay
                lock.enter_context(_locked(folder))
            yield folder
            _flush(folder)
            _put(folder, out, overwrite)
    except OSError as error:
        raise RopextError(f"writing {out} failed, nothing is left of it: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def whole_file(path: Path, fill: Callable[[Path], object]) -> Path:
    """Lets `fill` write a hidden sibling, then renames it to `path`; a folder that is not there yet is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        fill(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _put(folder: Path, out: Path, overwrite: bool) -> None:
    """Rename `folder` to `out`; an older output goes away only when the new one is in its place."""
    if not out.exists():
        folder.rename(out)
        _sync(out.parent)
        return
    if not overwrite:  # another process was quicker, or a killed one had put it aside
        raise Refused(f"an existing output is not overwritten unasked: {out} is there now. Choose another --out")
    aside = folder.with_name(folder.name + "-old")
    out.rename(aside)
    try:
        folder.rename(out)
    except OSError:
        aside.rename(out)
        raise
    _sync(out.parent)
    shutil.rmtree(aside)


def _clear_leftovers(parent: Path) -> None:
    """Remove what killed processes left in `parent`; an output that one had only put aside comes back to its place."""
    if os.name != "posix":  # elsewhere there is no harmless way to ask whether a process lives
        return
    for path in sorted(parent.iterdir()):
        found = _LEFTOVER.fullmatch(path.name)
        if found is None or path.is_symlink() or not path.is_dir() or _lives(int(found["pid"])):
            continue
        # A process in another container, or on another machine, is not seen above: then the lock tells.
        with contextlib.suppress(OSError), _locked(path):
            if found["aside"] and not (parent / found["name"]).exists():
                path.rename(parent / found["name"])
            else:
                shutil.rmtree(path)


def _lives(pid: int) -> bool:
    """Whether another process has this number. Our own may be a dead one's too, as they repeat in containers."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which the system drops with the process. Raises OSError if another holds it."""
    if os.name != "posix":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _flush(folder: Path) -> None:
    """Have files and directories on the disk before the rename makes them the result.

    A hard link brings no data of its own, and its source is not ours to wait for.
    """
    for path in folder.rglob("*"):
        if path.is_dir() or path.stat().st_nlink == 1:
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
