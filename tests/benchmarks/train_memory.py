"""The predicted peak memory of training against the measured one, at four lengths, with and without checkpointing.

    python tests/benchmarks/train_memory.py

The model is that of train_cost.py. Each length is trained for two steps in a process of its own, once as finetune
chooses with all memory of this machine and once with none to spare; the peak is that of the process (Linux) above what
it held after its imports. Prints every prediction, what was measured, their ratio and its bounds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from train_cost import LAYERS, finetune, in_a_process, make_checkpoint

LENGTHS, STEPS = (1024, 2048, 4096, 8192), 2
LOWEST, HIGHEST, LEAST = 0.8, 1.25, 300e6  # measured / predicted; bytes predicted


def main() -> None:
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder, "model"), layers=LAYERS, length=2 * max(LENGTHS))
        for length in LENGTHS:
            for memory in ("roomy", "tight"):
                out = str(Path(folder, f"{memory}-{length}"))
                found = in_a_process(__file__, memory, str(length), str(Path(folder, "model")), out)
                assert found["predicted"] >= LEAST, "too little for the libraries' own memory not to matter"
                ratios.append(found["bytes"] / found["predicted"])
                print(f"{length:5} tokens, {'gradient checkpointing' if found['checkpointing'] else 'all kept':22}")
                print(f"  predicted {found['parts']}")
                print(f"  measured  {found['bytes'] / 1e6:.0f} MB, {ratios[-1]:.2f} of it", flush=True)
    met = min(ratios) >= LOWEST and max(ratios) <= HIGHEST
    bounds = f"target {LOWEST} to {HIGHEST}: {'met' if met else 'missed'}"
    print(f"measured over predicted {min(ratios):.2f} to {max(ratios):.2f}, {bounds}")


def one_length(memory: str, length: int, folder: Path, out: Path) -> dict:
    from transformers import AutoConfig

    from ropext.memory import predict

    found = finetune(folder, out, tight=memory == "tight", length=length, steps=STEPS)
    checkpointing = any("gradient checkpointing" in line for line in found.pop("said"))
    predicted = predict(AutoConfig.from_pretrained(folder), tokens=length, checkpointing=checkpointing)
    return found | {"checkpointing": checkpointing, "predicted": predicted.peak, "parts": str(predicted)}


if __name__ == "__main__":
    if sys.argv[1:]:
        memory, length, folder, out = sys.argv[1:]
        print(json.dumps(one_length(memory, int(length), Path(folder), Path(out))))
    else:
        main()
