"""What scoring several lengths costs beside the usual loop: time, memory and counted operations.

    python tests/benchmarks/eval_cost.py [RUNS] [CHECKPOINT]

The usual loop is a full `model(ids, labels=ids)` at each of the lengths. Both sides score one window of 4096 tokens at
512, 1024, 2048 and 4096, in processes of their own that are started in turn; the seconds are those of the scoring
alone, the memory is what the peak of the process rises by meanwhile (Linux). CHECKPOINT is a directory; left out,
random weights of the shape of SmolLM2-135M (vocabulary 49152) take its place. Operations are those that PyTorch's own
counter counts, beside one full forward pass at the longest length. Prints the ratios and the targets.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time

from measure import ROOT, verdict

LENGTHS = (512, 1024, 2048, 4096)
SPEED, MEMORY, OPERATIONS = 1.4, 1 / 3, 1.02  # loop / ropext in time; ropext / loop; ropext / one forward pass
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def main(runs: int, checkpoint: str) -> None:
    sides: dict[str, list[dict[str, float]]] = {"loop": [], "ropext": []}
    for number in range(runs):
        for side, found in sides.items():
            found.append(in_a_process(side, checkpoint))
            print(f"{side:7} run {number + 1}: {found[-1]['seconds']:.1f} s, {found[-1]['bytes'] / 1e6:.0f} MB")
    losses = [found[0]["nll"] for found in sides.values()]
    assert math.isclose(*losses, rel_tol=1e-5), f"the two sides measure different things: {losses}"
    loop, ropext = ({key: statistics.median(one[key] for one in found) for key in found[0]} for found in sides.values())
    verdict("the loop's time as a multiple of ropext's", loop["seconds"] / ropext["seconds"], SPEED, at_most=False)
    verdict("ropext's memory as a share of the loop's", ropext["bytes"] / loop["bytes"], MEMORY)
    counted = in_a_process("operations", checkpoint)
    verdict("operations as a multiple of one forward pass", counted["ropext"] / counted["forward"], OPERATIONS)


def in_a_process(side: str, checkpoint: str) -> dict[str, float]:
    """What one side found. Large blocks go back to the system at once, so that the peak is what was held together."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, __file__, side, checkpoint]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} ended with {done.returncode}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_side(side: str, checkpoint: str) -> dict[str, float]:
    """Runs in a process of its own: seconds and bytes of the scoring, and the loss at the longest length."""
    import numpy as np
    import torch

    from ropext.cut import Windows
    from ropext.measure import measure

    model = load(checkpoint)
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, max(LENGTHS))).astype(np.int32)
    cut = Windows(ids=ids, sizes=None, owners=np.zeros(1, np.int32), documents=("a",), longest=max(LENGTHS), bos=False)
    tensor = torch.from_numpy(ids.astype(np.int64))

    def loop() -> float:
        with torch.no_grad():
            return [model(tensor[:, :length], labels=tensor[:, :length]).loss.item() for length in LENGTHS][-1]

    def ropext() -> float:
        return measure(lambda: model, cut, LENGTHS, static=True).results[-1].nll or math.nan

    if side == "operations":
        return {"ropext": operations(ropext), "forward": operations(lambda: model(tensor, use_cache=False))}
    forget_peak()
    before, start = peak(), time.perf_counter()
    nll = loop() if side == "loop" else ropext()
    return {"nll": nll, "seconds": time.perf_counter() - start, "bytes": peak() - before}


def load(checkpoint: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ropext.load import load_model

    if checkpoint:
        return load_model(checkpoint)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def operations(run) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def forget_peak() -> None:
    """Loading takes more than scoring starts with: the peak counts from now on (proc(5), clear_refs)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak() -> int:
    """The most resident memory that this process held, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] and arguments[0] in ("loop", "ropext", "operations"):
        print(json.dumps(one_side(arguments[0], arguments[1])))
    else:
        main(int(arguments[0]) if arguments else 3, arguments[1] if arguments[1:] else "")
