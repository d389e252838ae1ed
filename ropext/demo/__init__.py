"""The built-in checkpoint: where it lies, and what may be left out of a command because of it."""

from pathlib import Path

CHECKPOINT = Path(__file__).with_name("checkpoint")
