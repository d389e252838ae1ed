"""What `ropext --help` costs beside a bare Typer program: medians of interleaved runs, in seconds of wall time.

    python tests/benchmarks/startup.py [RUNS]

Prints the ratio and the target. All programs run in this Python, started in turn, so that a machine which is busy for
a while slows them alike. Typer renders help with rich unless told not to, and ropext tells it: the third program is a
bare one that does the same, to show what ropext itself adds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = 1.5  # ropext --help / bare Typer --help
BARE = """import typer
app = typer.Typer({options})
@app.command()
def hello(name: str) -> None:
    "Say hello."
app()
"""


def seconds(command: list[str], folder: str) -> float:
    """Wall time of one run."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        commands = {"ropext --help": [sys.executable, "-m", "ropext", "--help"]}
        for name, options in (("bare Typer --help", ""), ("the same, no rich", "rich_markup_mode=None")):
            program = Path(folder) / f"bare{len(commands)}.py"
            program.write_text(BARE.format(options=options))
            commands[name] = [sys.executable, str(program), "--help"]
        times: dict[str, list[float]] = {name: [] for name in commands}
        for run in range(runs + 1):
            for name, command in commands.items():
                took = seconds(command, folder)
                if run:  # the first round fills the disk cache and writes the bytecode
                    times[name].append(took)
    medians = {name: statistics.median(took) for name, took in times.items()}
    for name, took in times.items():
        print(f"{name:18} median {medians[name]:.3f} s, {min(took):.3f} to {max(took):.3f}, {runs} runs")
    ratio = medians["ropext --help"] / medians["bare Typer --help"]
    print(f"ratio to the one without rich {medians['ropext --help'] / medians['the same, no rich']:.2f}")
    print(f"ratio {ratio:.2f}, target at most {TARGET}: {'met' if ratio <= TARGET else 'missed'}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 11)
