"""Predicted bytes against what autograd keeps, what the allocator hands out in a step, and what lands on the disk."""

from __future__ import annotations

import pytest
import torch

from ropext import memory
from ropext.load import load_model
from ropext.loss import HEAD_BLOCK, summed_loss
from ropext.memory import (
    activation_bytes,
    available_bytes,
    checkpointing_pays,
    disk_bytes,
    parameters,
    predict,
    training_bytes,
)
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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("mistral", {"num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
        ("gemma", {"head_dim": 24}),
        ("phi3", {}),
        ("gpt_neox", {}),
        ("falcon", {}),
    ],
)
def test_parameters_are_those_of_the_built_model(tmp_path, monkeypatch, family, changes, tied):
    model = load_model(make_checkpoint(tmp_path, family, tie_word_embeddings=tied, **changes))
    if family in memory.LLAMA_LIKE:
        monkeypatch.delattr(memory, "_counted")  # arithmetic alone
    assert parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())


def allocated_at_most(train):
    """The most bytes that PyTorch's allocator had handed out at once while `train` ran, beyond those before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        train()
    held = most = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("tokens", "passes", "checkpointing", "moment", "shape"),
    [
        (1024, 1, False, "the backward pass of the last layer", {"num_hidden_layers": 6}),
        (1024, 1, True, "the backward pass of the last layer", {"num_hidden_layers": 6}),
        (512, 1, False, "the loss", {"num_hidden_layers": 1, "vocab_size": 20000}),
        (128, 1, True, "the backward pass of the first layer", {"num_hidden_layers": 12}),
        (16, 1, False, "the end of the backward pass", {"vocab_size": 20000}),
        (16, 2, False, "the end of the backward pass", {"vocab_size": 20000}),
        (8, 1, False, "the end of the backward pass", {"num_hidden_layers": 12, "tie_word_embeddings": False}),
    ],
)
def test_the_predicted_peak_is_near_what_a_step_allocates(tmp_path, tokens, passes, checkpointing, moment, shape):
    model = load_model(make_checkpoint(tmp_path, **{"tie_word_embeddings": True} | shape)).train()
    if checkpointing:
        older = model.gradient_checkpointing_enable  # transformers renamed it within its version 5
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        for _ in range(passes):
            ids = torch.randint(320, (1, tokens))
            summed_loss(model, ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    predicted = predict(model.config, tokens=tokens, passes=passes, checkpointing=checkpointing)
    assert predicted.at == moment
    ratio = allocated_at_most(step) / (predicted.gradients + predicted.activations + predicted.loss)
    assert 0.85 < ratio < 1.15
    assert predicted.weights + predicted.moments == 12 * model.num_parameters() and memory.LOSS_BLOCK == HEAD_BLOCK
    shown = str(predicted)
    assert moment in shown and f"{predicted.peak / 1e6:.0f} MB" in shown


def test_a_saved_state_takes_three_floats_for_each_parameter(tmp_path):
    from accelerate import Accelerator

    model = load_model(make_checkpoint(tmp_path / "checkpoint", hidden_size=256))
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.randint(320, (1, 16))
    summed_loss(model, ids, ids).backward()
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    state = sum(path.stat().st_size for path in (tmp_path / "state").iterdir())
    assert disk_bytes(model.num_parameters(), checkpoint=0, stages=3, states=0) == pytest.approx(state, rel=0.05)
    assert disk_bytes(10, checkpoint=100, stages=3, states=2) == 300 + 3 * 120
