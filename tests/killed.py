"""Patches a checkpoint again and again, killed each time one step later, and prints what every death left behind.

    python tests/killed.py SOURCE FOLDER clone|copy|link [--overwrite]

The output is FOLDER/p; with --overwrite there is an older one each time. A step is a call into the operating system
from the first folder made on (os, open files, fcntl), and the process dies by SIGKILL before it. Then FOLDER/q is
made, which has to clean up. Prints a JSON list, a row a death: [step, what FOLDER then showed, what it showed after
the next write], where a showing is {visible name: hash of what a checkpoint there holds, "broken" for any other thing}
and hidden names have no hash. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from ropext import api
from ropext.checkpoint import RECORD, open_checkpoint
from ropext.errors import RopextError
from ropext.staging import staged


def patch(source: Path, out: Path, weights: Any, factor: float, *, overwrite: bool = False) -> None:
    api.patch(
        str(source), method="ntk", factor=factor, out=out, weights=weights, overwrite=overwrite, verify=False
    )  # no torch


def die_at(step: int, told: int) -> None:
    """Ends this process before its `step`-th call into the system; its name goes to the pipe `told`."""
    calls = 0

    def watch(_: object, event: str, called: Any) -> None:
        nonlocal calls
        owner = type(getattr(called, "__self__", None)).__module__
        if event != "c_call" or (called.__module__ not in ("posix", "io", "_io", "fcntl") and owner != "_io"):
            return
        if calls or called.__name__ == "mkdir":
            calls += 1
        if calls == step:
            os.write(told, called.__name__.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def one_death(source: Path, out: Path, weights: str, overwrite: bool, step: int) -> str | None:
    """The name of the call before which a patch died; None where it ended before that many calls."""
    reading, told = os.pipe()
    if not (child := os.fork()):
        die_at(step, told)
        patch(source, out, weights, 4.0, overwrite=overwrite)
        os._exit(0)
    os.close(told)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        name = pipe.read()
    if os.WIFSIGNALED(status):
        return name
    assert status == 0, status
    return None


def showing(folder: Path) -> dict[str, str | None]:
    return {path.name: None if path.name.startswith(".") else content(path) for path in sorted(folder.iterdir())}


def content(path: Path) -> str:
    """A hash over names and bytes of all files but the record, which holds the time."""
    try:
        open_checkpoint(path)
    except RopextError:
        return "broken"
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != RECORD)
    rows = [f"{file.relative_to(path)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def main(source: Path, folder: Path, weights: str, overwrite: bool) -> None:
    os.fsync = os.get_blocking  # type: ignore[assignment]  # a call that is counted alike and does not wait for a disk
    older = folder.with_name("older")
    patch(source, older, "copy", 2.0)
    deaths = []
    for step in range(1, 10_000):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if overwrite:
            shutil.copytree(older, folder / "p")
        name = one_death(source, folder / "p", weights, overwrite, step)
        after = showing(folder)
        if name is None:
            break
        with staged(folder / "q"):
            pass
        deaths.append([name, after, showing(folder)])
    print(json.dumps(deaths))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], "--overwrite" in sys.argv)
