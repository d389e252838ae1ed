"""What a patch costs beside loading the checkpoint with transformers and saving it: whole processes, time and memory.

    python tests/benchmarks/patch_smollm2.py CHECKPOINT [RUNS]

CHECKPOINT is a directory, SmolLM2-135M for the figures that are claimed. Prints both ratios with their targets, for the
default way of bringing weights over and for hard links. The other side is the shortest program that leaves a checkpoint
with a scaled config: load, set, save_pretrained, the tokenizer alike.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from measure import ROPEXT, interleaved, verdict

TARGET_TIME, TARGET_MEMORY = 15.0, 5.0  # times faster, times smaller
BY_HAND = """import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.config.rope_parameters["rope_theta"] *= 4.0
model.config.max_position_embeddings *= 4
model.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""


def main(checkpoint: Path, runs: int) -> None:
    with tempfile.TemporaryDirectory(dir=checkpoint.resolve().parent) as name:  # one file system, for the links
        folder = Path(name)
        (folder / "by_hand.py").write_text(BY_HAND)
        out = folder / "out"
        options = ("--method", "ntk", "--factor", "4", "--no-verify", "--out", str(out))
        patch = (*ROPEXT, "patch", str(checkpoint), *options)
        commands = {
            "load and save_pretrained": (sys.executable, str(folder / "by_hand.py"), str(checkpoint), str(out)),
            "ropext patch --no-verify": patch,
            "the same, --weights link": (*patch, "--weights", "link"),
        }
        by_hand, *patches = interleaved(commands, runs, lambda: shutil.rmtree(out, ignore_errors=True))
    print(by_hand)
    for one in patches:
        print(one)
        verdict("  times faster", by_hand.median / one.median, TARGET_TIME, at_most=False)
        verdict("  times less memory", by_hand.peak / one.peak, TARGET_MEMORY, at_most=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
