"""What the tests share: no network, and two readers that tell what stock transformers does with a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so before any test
# A gate gives the same answer each time; elsewhere every run tries other examples. No time decides a test.
hypothesis.settings.register_profile("ropext", deadline=None, derandomize=os.environ.get("CI") == "true")
hypothesis.settings.load_profile("ropext")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What one transformers version does with one checkpoint. By length in tokens, then by the name of the buffer."""

    version: str
    tables: dict[int, dict[str, list[float]]]  # radians per token of each pair
    scaling: dict[int, dict[str, float]]  # factor on cos and sin
    log: list[str]  # the lines that name rope or rotary
    warnings: list[str]

    def table(self, length: int) -> list[float]:
        """The one table that all rotary modules of the model share at this length."""
        first, *others = self.tables[length].values()
        assert all(other == first for other in others), f"layers differ: {self.tables[length]}"
        return first


Reader = Callable[[Sequence[int], Sequence[Path]], list[Reading]]


def _reader(python: str) -> Reader:
    def read(lengths: Sequence[int], folders: Sequence[Path]) -> list[Reading]:
        program = Path(__file__).with_name("readback.py")
        command = [python, "-I", str(program), ",".join(map(str, lengths)), *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [_reading(found) for found in json.loads(done.stdout)]

    return read


def _reading(found: dict) -> Reading:
    by_length = {key: {int(n): value for n, value in found[key].items()} for key in ("tables", "scaling")}
    return Reading(version=found["version"], log=found["log"], warnings=found["warnings"], **by_length)


@pytest.fixture(scope="session")
def this_reader() -> Reader:
    """The installed transformers in a fresh process: `this_reader([256, 1024], [folder, folder])`, a Reading each."""
    return _reader(sys.executable)


@pytest.fixture(scope="session")
def other_reader() -> Reader:
    """The same with the transformers of another environment, whose Python ROPEXT_OTHER_READER names."""
    python = os.environ.get("ROPEXT_OTHER_READER")
    reason = "ROPEXT_OTHER_READER names no Python that has transformers 4 (.ci/run makes one)"
    if not python and os.environ.get("CI") == "true":
        pytest.fail(reason)  # a skip would pass for tested
    if not python:
        pytest.skip(reason)
    return _reader(python)
