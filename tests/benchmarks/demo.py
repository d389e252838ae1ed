"""The three commands on the built-in checkpoint, in an empty folder and offline: `python tests/benchmarks/demo.py`.

Prints what each took and the table of perplexities, then each claim with the figure that decides it; exit code 1 where
one is missed. Needs two idle cores and about ten minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ("patch", "--method", "ntk", "--factor", "4"),
    ("finetune", "--schedule", "2k,4k,8k"),
    ("eval", "--lengths", "512,2048,8192"),
)
MOST_MINUTES = 10
SHORT_LOSS = 1.03  # tuned over source at 512


def main() -> int:
    """Run, print, judge."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            begun = time.monotonic()
            subprocess.run([sys.executable, "-m", "ropext", *command], cwd=folder, env=environment, check=True)
            print(f"# {' '.join(command)}: {time.monotonic() - begun:.0f} s\n", flush=True)
        minutes = (time.monotonic() - started) / 60
        (report,) = Path(folder).glob("ropext-runs/reports/*/report.json")
        models = {scores["label"]: scores for scores in json.loads(report.read_text())["models"]}
    found = {
        label: {figure["length"]: figure["perplexity"] for figure in scores["results"]}
        for label, scores in models.items()
    }
    source, patched, tuned = found["source"], found["patched"], found["tuned"]
    claims = {
        f"all in at most {MOST_MINUTES} minutes": (minutes, minutes <= MOST_MINUTES),
        "8192: source over its own 2048": (source[8192] / source[2048], source[8192] > source[2048]),
        "8192: source over patched": (source[8192] / patched[8192], source[8192] > patched[8192]),
        "8192: patched over tuned": (patched[8192] / tuned[8192], patched[8192] > tuned[8192]),
        f"512: tuned over source, at most {SHORT_LOSS}": (
            tuned[512] / source[512],
            tuned[512] <= SHORT_LOSS * source[512],
        ),
    }
    for claim, (figure, met) in claims.items():
        print(f"{'met   ' if met else 'MISSED'} {claim}: {figure:.3f}")
    return 0 if all(met for _, met in claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
