"""What finetune costs beside the plain transformers Trainer: peak memory and tokens per second.

    python tests/benchmarks/train_cost.py [RUNS]

Both sides train the same llama (SmolLM2-135M's widths, 6 layers, random weights) for three optimizer steps on one
sequence of 4096 tokens, in float32 with AdamW, and must report the same losses. The Trainer has gradient checkpointing;
finetune chooses, once with all memory of this machine and once with a tight `--memory`. Each runs in a process of its
own that is started in turn; memory is the peak of the process (Linux) above what it held after its imports and above
16 bytes per parameter; the seconds are those of the steps. Prints the ratios and the targets.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eval_cost import SHAPE, forget_peak, peak
from measure import ROOT, verdict

LENGTH, STEPS, LAYERS, RATE = 4096, 3, 6, 1e-4
TIGHT = 2_500_000_000  # bytes: what the longest stage needs with activations computed twice, not what it would like
MEMORY, SPEED, LOSS = 0.4, 0.9, 1e-4  # ropext / Trainer; ropext / Trainer; nats
SIDES = {"trainer": "Trainer", "roomy": "finetune", "tight": "finetune, tight --memory"}


def main(runs: int) -> None:
    found: dict[str, list[dict]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_checkpoint(Path(folder, "model"), layers=LAYERS, length=LENGTH)
        for number in range(runs):
            for side, name in SIDES.items():
                one = in_a_process(__file__, side, str(Path(folder, "model")), str(Path(folder, f"{side}-{number}")))
                one["bytes"] -= 16 * parameters
                one["speed"] = STEPS * LENGTH / one["seconds"]
                found[side].append(one)
                print(f"{name:30} run {number + 1}: {one['speed']:.0f} tokens/s, {one['bytes'] / 1e6:.0f} MB")
    losses = [one["losses"] for side in found.values() for one in side]
    apart = max(abs(a - b) for one in losses for a, b in zip(one, losses[0], strict=True))
    assert apart <= LOSS, f"the sides do not train alike: {losses}"
    print(f"losses {', '.join(f'{loss:.5f}' for loss in losses[0])}, at most {apart:.1e} apart")
    middle = {
        side: {key: statistics.median(one[key] for one in many) for key in ("bytes", "speed")}
        for side, many in found.items()
    }
    trainer = middle.pop("trainer")
    for side, one in middle.items():
        verdict(f"{SIDES[side]}: memory as a share of the Trainer's", one["bytes"] / trainer["bytes"], MEMORY)
        verdict(
            f"{SIDES[side]}: speed as a share of the Trainer's", one["speed"] / trainer["speed"], SPEED, at_most=False
        )


def make_checkpoint(folder: Path, *, layers: int, length: int, **shape: object) -> int:
    """A model, a tokenizer with a word for each id, and a text of one sequence. Returns the number of parameters."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": layers} | ends | shape))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(SHAPE["vocab_size"])}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, length)
    (folder / "text.txt").write_text(" ".join(f"w{number}" for number in ids))
    return int(model.num_parameters())


def in_a_process(program: str, *arguments: str) -> dict:
    """What one side found. Large blocks go back to the system at once, so that the peak is what was held together."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "1000000", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


def trainer(folder: Path, out: Path) -> dict:
    """Three steps of the plain Trainer; its linear schedule without warm-up is finetune's curve over three steps."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
    from transformers.models.llama import modeling_llama  # noqa: F401

    class Clock(TrainerCallback):
        seconds = 0.0

        def on_step_begin(self, *_, **__) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_, **__) -> None:
            self.seconds += time.perf_counter() - self.started

    before, clock = fresh_peak(), Clock()
    row = torch.tensor(AutoTokenizer.from_pretrained(folder)((folder / "text.txt").read_text())["input_ids"])
    settings = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        gradient_checkpointing=True,
        learning_rate=RATE,
        adam_beta2=0.95,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    rows = [{"input_ids": row, "labels": row}] * STEPS
    one = Trainer(model=model, args=settings, train_dataset=rows, callbacks=[clock])
    one.train()
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    return {"losses": losses, "seconds": clock.seconds, "bytes": peak() - before}


def finetune(folder: Path, out: Path, *, tight: bool, length: int = LENGTH, steps: int = STEPS) -> dict:
    """A few steps of finetune as the command runs it: it also loads, saves its state and writes the result."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from ropext import api, run  # noqa: F401

    before, said = fresh_peak(), []
    result = api.finetune(
        str(folder),
        schedule=[length],
        data=str(folder / "text.txt"),
        steps_per_stage=steps,
        learning_rate=RATE,
        memory=TIGHT if tight else None,
        out=out,
        device="cpu",
        say=said.append,
        progress=False,
    )
    rise = peak() - before
    (stage,) = result.stages
    assert not tight or any("gradient checkpointing" in line for line in said), said
    events = EventAccumulator(str(Path(result.logs) / "finetune"))
    events.Reload()
    losses = [event.value for event in events.Scalars("loss")]
    return {"losses": losses, "seconds": stage.seconds, "bytes": rise, "said": said}


def fresh_peak() -> int:
    """The peak starts anew, at what the process holds."""
    forget_peak()
    return peak()


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in SIDES:
        side, folder, out = sys.argv[1], *map(Path, sys.argv[2:])
        print(json.dumps(trainer(folder, out) if side == "trainer" else finetune(folder, out, tight=side == "tight")))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
