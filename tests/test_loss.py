"""Losses against plain full-logit cross entropy in stock transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from ropext.errors import RopextError
from ropext.loss import check_head, hidden_states, summed_loss, token_losses

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def build(family: str, vocabulary: int = 101, **more: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=vocabulary, **SHAPE, **more)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # far from uniform, so that a wrong target or weight shows
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def some_ids(vocabulary: int = 101, batch: int = 2, length: int = 40) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def float64_losses(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.double()[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2", "phi"])
def test_token_losses_equal_the_cross_entropy_of_whole_logits(family: str) -> None:
    model, ids = build(family), some_ids()
    torch.testing.assert_close(token_losses(model, ids), float64_losses(model, ids), rtol=2e-6, atol=2e-6)


def test_a_block_that_does_not_divide_the_tokens_changes_nothing() -> None:
    model, ids = build("llama"), some_ids()
    torch.testing.assert_close(token_losses(model, ids, block=7), token_losses(model, ids), rtol=1e-6, atol=1e-6)


def test_token_losses_carry_no_gradient() -> None:
    assert not token_losses(build("llama"), some_ids()).requires_grad


def test_the_head_of_a_bfloat16_model_multiplies_in_float32() -> None:
    model, ids = build("llama").to(torch.bfloat16), some_ids()
    with torch.no_grad():
        logits = hidden_states(model, ids).double() @ model.lm_head.weight.double().T
    exact = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(token_losses(model, ids), exact, rtol=1e-6, atol=1e-5)


class Largest(TorchDispatchMode):
    """Records the most elements that any tensor made under it has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return made


def test_neither_loss_ever_holds_whole_logits() -> None:
    vocabulary, length = 5000, 2000
    model, ids = build("llama", vocabulary), some_ids(vocabulary, 1, length)
    with Largest() as scoring:
        token_losses(model, ids)
    with Largest() as training:
        summed_loss(model, ids, ids).backward()
    assert scoring.elements <= 256 * vocabulary
    assert training.elements < length * vocabulary / 2


@pytest.mark.parametrize(("family", "more"), [("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("phi", {})])
def test_the_summed_loss_has_the_value_and_gradients_of_plain_cross_entropy(
    family: str, more: dict[str, object]
) -> None:
    model, ids = build(family, **more), some_ids(length=300)  # more than one block
    plain = F.cross_entropy(model(ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected = torch.autograd.grad(plain, list(model.parameters()))
    loss = summed_loss(model, ids, ids) / (ids.numel() - len(ids))
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=2e-6, atol=0)
    largest = max(gradient.abs().max() for gradient in expected)
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        assert (weight.grad - gradient).abs().max() <= 1e-5 * largest


def test_the_summed_loss_of_a_bfloat16_model_is_float32() -> None:
    model, ids = build("llama").to(torch.bfloat16), some_ids()
    loss = summed_loss(model, ids, ids) / (ids.numel() - len(ids))
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(token_losses(model, ids).mean().item(), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox", "qwen2", "qwen3", "phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_head_passes_the_check(family: str, dtype: torch.dtype) -> None:
    check_head(build(family).to(dtype))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"final_logit_softcapping": 30.0}),
    ],
)
def test_scaled_or_soft_capped_logits_are_refused(family: str, more: dict[str, object]) -> None:
    with pytest.raises(RopextError, match="does more to its logits"):
        check_head(build(family, **more))


def test_the_check_leaves_the_model_as_it_was() -> None:
    model, ids = build("llama"), some_ids()
    before = token_losses(model, ids)
    check_head(model)
    assert torch.equal(token_losses(model, ids), before)
    assert not model.lm_head._forward_hooks


def test_broken_weights_are_left_to_the_scorer_to_report() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("inf")
    check_head(model)
