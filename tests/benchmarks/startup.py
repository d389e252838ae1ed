"""What `ropext --help` costs beside a bare Typer program: medians of interleaved runs.

    python tests/benchmarks/startup.py [RUNS]

Prints the ratio and the target. Typer renders help with rich unless told not to, and ropext tells it: the third
program is a bare one that does the same, to show what ropext itself adds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from measure import interleaved, verdict

TARGET = 1.5  # ropext --help / bare Typer --help
BARE = """import typer
app = typer.Typer({options})
@app.command()
def hello(name: str) -> None:
    "Say hello."
app()
"""


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        commands = {"ropext --help": [sys.executable, "-m", "ropext", "--help"]}
        for name, options in (("bare Typer --help", ""), ("the same, no rich", "rich_markup_mode=None")):
            program = Path(folder) / f"bare{len(commands)}.py"
            program.write_text(BARE.format(options=options))
            commands[name] = [sys.executable, str(program), "--help"]
        ours, bare, plain = found = interleaved(commands, runs, lambda: None)
    for one in found:
        print(one)
    print(f"ratio to the one without rich {ours.median / plain.median:.2f}")
    verdict("ratio", ours.median / bare.median, TARGET)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 11)
