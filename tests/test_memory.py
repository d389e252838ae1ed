"""The activation count against what autograd really keeps, and the choice made from it."""

from __future__ import annotations

import pytest
import torch

from ropext import memory
from ropext.load import load_model
from ropext.memory import activation_bytes, available_bytes, checkpointing_pays, training_bytes
from tests.tiny import make_checkpoint


def kept_for_backward(model, ids):
    """Bytes of the distinct storages that a forward pass of the layers saves, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # holding it keeps its address its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=ids, use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    ("family", "lowest", "highest"), [("llama", 0.95, 1.05), ("qwen3", 0.8, 1.05), ("gpt_neox", 1.0, 1.4)]
)
def test_the_count_of_activations_is_near_what_autograd_keeps(tmp_path, family, lowest, highest):
    model = load_model(make_checkpoint(tmp_path, family, num_hidden_layers=4))
    kept = kept_for_backward(model, torch.randint(320, (2, 128)))
    ratio = activation_bytes(model.config, 256) / kept
    assert lowest < ratio < highest


def test_checkpointing_pays_only_where_activations_would_not_fit_comfortably():
    assert training_bytes(100) == 1200
    assert not checkpointing_pays(activations=400, training=200, available=1000)
    assert checkpointing_pays(activations=401, training=200, available=1000)
    assert checkpointing_pays(activations=1, training=1000, available=900)


def test_a_container_limit_bounds_what_is_available(tmp_path, monkeypatch):
    device = torch.device("cpu")
    free = available_bytes(device)
    assert free > 2**26
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMIT", limit)
    limit.write_text("max\n")
    assert available_bytes(device) == pytest.approx(free, rel=0.1)
    limit.write_text(f"{2**20}\n")
    assert available_bytes(device) < 2**20
