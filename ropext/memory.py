"""Bytes that training needs: whether a stage keeps its activations or computes them twice.

Arithmetic on a config, and one look at what this machine has free. H hidden size, A heads * head size, K key/value
heads * head size, I intermediate size; everything is float32. Amounts are in bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FLOAT = 4  # bytes of a float32
COMFORTABLE_SHARE = 0.5  # of the free memory; allocators, the loss and the batch want the rest
MEMINFO, STATM = Path("/proc/meminfo"), Path("/proc/self/statm")  # proc(5)
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes a container may use, or "max"


def activation_bytes(config: Any, tokens: int) -> int:
    """What the backward pass of all layers finds kept after a forward pass over `tokens` tokens.

    Counted on transformers' llama block with fused attention: 3 H around each of two norms; queries, output and its
    copy A each, keys and values K each; 4 I in the gated MLP. Other families keep about as much.
    """
    hidden = config.hidden_size
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    attention = heads * head_size
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_size
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 6 * hidden + 3 * attention + 2 * keys + 4 * intermediate
    return int(FLOAT * tokens * layer * config.num_hidden_layers)


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
