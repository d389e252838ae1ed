"""What the benchmarks share: whole processes, started in turn, their wall time in seconds and peak memory in bytes.

Started in turn, so that a machine which is busy for a while slows all of them alike.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROPEXT = (sys.executable, "-m", "ropext")


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """All runs of one program but the first."""

    name: str
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # bytes

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def peak(self) -> int:
        return max(self.peaks)

    def __str__(self) -> str:
        times = f"median {self.median:.3f} s, {min(self.seconds):.3f} to {max(self.seconds):.3f}"
        return f"{self.name:28} {times}, peak memory {self.peak / 1e6:.0f} MB, {len(self.seconds)} runs"


def interleaved(commands: Mapping[str, Sequence[str]], runs: int, reset: Callable[[], object]) -> list[Runs]:
    """Every command in turn, `runs` times after one round that fills the disk cache and writes the bytecode.

    `reset` removes, outside the measured time, what the commands wrote.
    """
    found = [Runs(name=name) for name in commands]
    for number in range(runs + 1):
        for one in found:
            seconds, peak = whole_process(commands[one.name])
            reset()
            if number:
                one.seconds.append(seconds)
                one.peaks.append(peak)
    return found


def whole_process(command: Sequence[str]) -> tuple[float, int]:
    """Wall time and peak resident memory of one process. Raises SystemExit where it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed ropext has its bytecode, as its libraries have
    start = time.perf_counter()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    said = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{' '.join(command)} ended with {child.returncode}: {said.decode()}")
    return seconds, _bytes(usage)


def _bytes(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def verdict(what: str, found: float, target: float, *, at_most: bool = True) -> None:
    """One line: the figure, the target, and whether it is met."""
    met = found <= target if at_most else found >= target
    print(f"{what} {found:.2f}, target at {'most' if at_most else 'least'} {target:g}: {'met' if met else 'missed'}")
