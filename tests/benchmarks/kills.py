"""A three-stage run that is killed at random moments and resumed each time, beside one that is left alone.

    python tests/benchmarks/kills.py [KILLS]

Kills with SIGKILL, on a tiny model with a state saved at every step, so that a save itself is hit too. In the end the
weights must be the same bits, and each optimizer step stand once in the logs. About ten seconds a kill.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import ROOT

sys.path.insert(0, str(ROOT))
OPTIONS = ("--schedule", "256,512,1k", "--data", "text.txt", "--steps-per-stage", "150", "--batch-tokens", "1k")
COMMAND = (
    sys.executable,
    "-m",
    "ropext",
    "finetune",
    "patched",
    *OPTIONS,
    "--learning-rate",
    "1e-3",
    "--save-every",
    "1",
)

SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def main(kills: int) -> None:
    from safetensors.torch import load_file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from ropext import api
    from tests.tiny import make_checkpoint

    def logged(run: Path) -> list[tuple[int, float]]:
        events = EventAccumulator(str(run / "logs" / "finetune"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss")]

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(" ".join(f"word {number}" for number in range(9000)))
        make_checkpoint(folder / "source", attention_dropout=0.1)
        api.patch(str(folder / "source"), method="progressive", factor=4.0, out=folder / "patched")
        start = time.monotonic()
        alone = subprocess.Popen([*COMMAND, "--out", "alone"], cwd=folder, **SILENT)
        while not list((folder / "alone.run").glob("state-*")):
            time.sleep(0.1)
        ready = time.monotonic() - start
        assert alone.wait() == 0
        rest, killed = time.monotonic() - start - ready, 0
        while not (folder / "killed").exists():
            child = subprocess.Popen([*COMMAND, "--out", "killed", "--resume"], cwd=folder, **SILENT)
            soon = ready + draw.uniform(0, rest / (kills + 1))
            try:
                child.wait(timeout=soon if killed < kills else None)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                killed += 1
                states = sorted(path.name for path in (folder / "killed.run").glob("state-*"))
                print(f"kill {killed}: {', '.join(states) or 'no state yet'}", flush=True)
        mine, theirs = (load_file(folder / run / "model.safetensors") for run in ("killed", "alone"))
        same = all(mine[name].equal(theirs[name]) for name in theirs)
        once = logged(folder / "killed.run") == logged(folder / "alone.run")
        print(f"{killed} kills: weights {'the same bits' if same else 'DIFFER'}", end=", ")
        print(f"steps {'once each' if once else 'NOT once each'} in the logs")
        sys.exit(0 if same and once else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
