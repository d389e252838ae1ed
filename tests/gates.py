"""Every gate in one command, in the repository's root: `python -m tests.gates`.

Stops at the first gate that fails and exits with its code. pytest comes last, so its summary ends the output.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

GATES = ("ruff check", "ruff format --check", "mypy", "pytest")


def main() -> int:
    """The exit code of the first gate that fails, or 0."""
    for gate in GATES:
        print(f"$ {gate}", flush=True)
        done = subprocess.run([sys.executable, "-m", *shlex.split(gate)], cwd=Path(__file__).parents[1])
        if done.returncode:
            print(f"gate failed with exit code {done.returncode}: {gate}", file=sys.stderr)
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
