"""Bytes that training needs: the peak of a stage, and whether it keeps its activations or computes them twice.

Arithmetic on a config, and one look at what this machine has free. H hidden size, A heads * head size, K key/value
heads * head size, I intermediate size, V vocabulary; everything is float32. Amounts are in bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PARTS = ("weights", "moments", "gradients", "activations", "loss", "libraries")
FLOAT = 4  # bytes of a float32
LIBRARIES = 50_000_000  # code and buffers of PyTorch and the tokenizer, taken when first used; measured
LOSS_BLOCK = 256  # tokens: loss.HEAD_BLOCK, which lies in a room below
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3")  # layers that differ in biases and norms alone
COMFORTABLE_SHARE = 0.5  # of the free memory; allocators, the loss and the batch want the rest
MEMINFO, STATM = Path("/proc/meminfo"), Path("/proc/self/statm")  # proc(5)
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes a container may use, or "max"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """What a process holds at the peak of a training step, above its level after the imports."""

    at: str  # the moment of the step
    weights: int
    moments: int  # AdamW's two
    gradients: int
    activations: int  # kept for the backward pass, computed twice, or passing through
    loss: int  # a block of logits
    libraries: int = LIBRARIES

    @property
    def peak(self) -> int:
        """The sum."""
        return sum(getattr(self, part) for part in PARTS)

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {getattr(self, part) / 1e6:.0f}" for part in PARTS)
        return f"{self.peak / 1e6:.0f} MB in {self.at}: {parts}"


def predict(config: Any, *, tokens: int, checkpointing: bool, passes: int = 1) -> StageMemory:
    """The peak of full training in float32 with AdamW: `passes` forward passes over `tokens` tokens in each step.

    A step has four moments that may be its peak: what lies between them grows or shrinks evenly, and the optimizer
    step needs no more than the gradients that the backward pass ends with. With more than one pass the gradients of
    the passes before are there throughout. Counted on transformers' llama block, as activations are, and held against
    measured peaks (tests/benchmarks/train_memory.py).
    """
    size, count, layers = _sizes(config), parameters(config), int(config.num_hidden_layers)
    head = config.vocab_size * size.hidden
    tied = bool(config.tie_word_embeddings)
    ends = 3 * size.hidden  # around the last norm, and the gradient that the loss leaves
    kept = size.hidden if checkpointing else size.layer
    passing = 2 * size.intermediate + size.hidden  # gradients inside the MLP, less what they free
    again = size.layer - size.hidden if checkpointing else 0  # its input is what was kept
    others = count - head * (1 if tied else 2)  # parameters of the layers
    before, twice = (count, head) if passes > 1 else (0, 0)  # gradients of earlier passes; a second one of head or ends
    candidates = {  # moment -> floats: gradients, activations of each token, of the loss
        "the loss": (before + head, layers * kept + ends, min(LOSS_BLOCK, tokens) * config.vocab_size),
        "the backward pass of the last layer": (before + head, layers * kept + ends + again + passing, 0),
        "the backward pass of the first layer": (before + twice or head + others, kept + again + passing, 0),
        "the end of the backward pass": (count + (head if tied else 0) + twice, size.hidden, 0),
    }
    found = [
        StageMemory(
            at=moment,
            weights=FLOAT * count,
            moments=2 * FLOAT * count,
            gradients=FLOAT * gradients,
            activations=FLOAT * tokens * activations,
            loss=FLOAT * loss,
        )
        for moment, (gradients, activations, loss) in candidates.items()
    ]
    return max(found, key=lambda memory: memory.peak)


def activation_bytes(config: Any, tokens: int) -> int:
    """What the backward pass of all layers finds kept after a forward pass over `tokens` tokens."""
    return int(FLOAT * tokens * _sizes(config).layer * config.num_hidden_layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    hidden: int
    attention: int
    keys: int
    head: int
    intermediate: int

    @property
    def layer(self) -> int:
        """Floats of each token that one layer keeps for its backward pass.

        Counted on transformers' llama block with fused attention: 3 H around each of two norms; queries, output and
        its copy A each, keys and values K each; 4 I in the gated MLP. Other families keep about as much.
        """
        return 6 * self.hidden + 3 * self.attention + 2 * self.keys + 4 * self.intermediate


def _sizes(config: Any) -> _Sizes:
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    return _Sizes(
        hidden=hidden,
        attention=heads * head,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head,
        head=head,
        intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
    )


def parameters(config: Any) -> int:
    """Parameters of the causal model of a config, a tied head counted once.

    By arithmetic for llama and what differs from it in biases and norms; else by building the model without weights.
    """
    if config.model_type not in LLAMA_LIKE:
        return _counted(config)
    size, family = _sizes(config), config.model_type
    hidden, attention, keys, inner = size.hidden, size.attention, size.keys, size.intermediate
    layer = 2 * hidden * (attention + keys) + 3 * hidden * inner + 2 * hidden
    if getattr(config, "attention_bias", False):
        layer += attention + 2 * keys + hidden
    if family == "qwen2":
        layer += attention + 2 * keys
    if family == "qwen3":
        layer += 2 * size.head
    if getattr(config, "mlp_bias", False):
        layer += 2 * inner + hidden
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return int(config.num_hidden_layers * layer + embeddings + hidden)


def _counted(config: Any) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


def disk_bytes(count: int, *, checkpoint: int, stages: int, states: int) -> int:
    """The most that a run's folders take: a checkpoint of each stage, the saved states kept and the one being written.

    `count` parameters; `checkpoint` is the size of the source's weight files, whose dtypes every stage's keep.
    """
    return checkpoint * stages + (states + 1) * 3 * FLOAT * count


def training_bytes(parameters: int) -> int:
    """What AdamW adds to the loaded weights: a gradient and two moments for each parameter."""
    return 3 * FLOAT * parameters


def checkpointing_pays(*, activations: int, training: int, available: int) -> bool:
    """Whether to compute activations twice: only where keeping them would not fit comfortably.

    Gradient checkpointing costs about one more forward pass, a third of the time (Chen et al. 2016, arXiv:1604.06174).
    """
    return activations > COMFORTABLE_SHARE * (available - training)


def available_bytes(device: torch.device) -> int:
    """Memory that this process may still take on `device`."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    page = os.sysconf("SC_PAGE_SIZE")
    if not MEMINFO.exists():  # not Linux: take half of all memory as free
        return os.sysconf("SC_PHYS_PAGES") * page // 2
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
    resident = int(STATM.read_text().split()[1]) * page
    return free if limit == "max" else min(free, int(limit) - resident)
