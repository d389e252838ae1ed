"""Next-token loss without whole logits: hidden states go through the head in blocks, in float32.

Whole float32 logits of 128k tokens and 128k words are 67 GB, so neither scoring nor training ever holds them.
Shapes: B sequences, T tokens in one, N tokens in all, D hidden size, V vocabulary. Losses in nats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ropext.errors import RopextError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

HEAD_BLOCK = 256  # tokens that pass the head together: 134 MB of logits at a vocabulary of 128k


def hidden_states(model: PreTrainedModel, ids: Tensor, **more: Tensor) -> Tensor:
    """What the head is applied to: the base model's last hidden states `[B, T, D]`, no logits and no cache."""
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False, **more).last_hidden_state
    return hidden


def token_losses(model: PreTrainedModel, ids: Tensor, block: int = HEAD_BLOCK) -> Tensor:
    """Loss of each token but the first, given those before it: float64 `[B, T - 1]` on the CPU, without gradient.

    The head product is float32 whatever the model's dtype; its last step is float64, so that constant logits give log V
    to double precision. The model must be in eval mode and have passed check_head.
    """
    import torch
    import torch.nn.functional as F

    with torch.no_grad():
        weight, bias = head_weights(model)
        hidden = hidden_states(model, ids)[:, :-1].flatten(0, 1)  # [N, D]
        blocks = zip(hidden.split(block), ids[:, 1:].flatten().split(block), strict=True)
        parts = [_softmax_terms(F.linear(rows.float(), weight, bias), targets) for rows, targets in blocks]
    peak, total, target = torch.cat(parts, dim=1).cpu().double()
    losses: Tensor = peak + total.log() - target
    return losses.view(ids.shape[0], -1)


def summed_loss(model: PreTrainedModel, ids: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
    """Sum of the losses of the tokens `labels` `[B, T]` (-100: not scored), each predicted from what stands before it.

    A scalar to call backward on once; equals plain cross entropy in value and gradient to rounding, in chunks of
    HEAD_BLOCK tokens. `more` are arguments of the model (feed.Batch.arguments). The model must have passed check_head.
    """
    import torch.nn.functional as F
    from torch.nn import LinearCrossEntropyOptions

    hidden = hidden_states(model, ids, **more)[:, :-1].flatten(0, 1).float()  # bf16 here would give a bf16 loss
    weight, bias = head_weights(model)
    loss: Tensor = F.linear_cross_entropy(
        hidden,
        weight,
        labels[:, 1:].flatten(),
        linear_bias=bias,
        reduction="sum",
        options=LinearCrossEntropyOptions(batch_chunk_size=HEAD_BLOCK),
    )
    return loss


def as_loss(model: PreTrainedModel) -> nn.Module:
    """The model as a module whose forward pass is its loss: what wrappers for several processes must see.

    Called with ids, labels and more it gives the summed loss; with ids alone, that of each token (token_losses). The
    model itself is its attribute `model`.
    """
    from torch import nn

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self._no_split_modules = model._no_split_modules  # what Accelerate shards by: whole decoder layers

        def forward(self, ids: Tensor, labels: Tensor | None = None, **more: Tensor) -> Tensor:
            if labels is None:
                return token_losses(self.model, ids)
            return summed_loss(self.model, ids, labels, **more)

    return Loss()


def check_head(model: PreTrainedModel) -> None:
    """Raises RopextError unless the logits are the output head applied to the hidden states, with nothing between.

    Scaled or soft-capped logits (cohere, granite, gemma2) would be scored and trained wrong by this module. Random
    weights hide a soft cap, so the head's output is replaced by a steep ramp that has to come out as it went in.
    """
    import torch

    if getattr(model.get_output_embeddings(), "weight", None) is None:
        raise RopextError(f"a loss needs an output head with one weight matrix: {type(model).__name__} has none")
    weight, bias = head_weights(model)
    ramp = torch.linspace(-100, 100, weight.shape[0], device=weight.device)
    ids = torch.arange(4, device=weight.device)[None] % weight.shape[0]
    with torch.no_grad():
        logits, entered, left = _forward_with_head_output(model, ids, ramp)
        hidden = hidden_states(model, ids)
        plain = torch.nn.functional.linear(hidden.float(), weight, bias)
    if not (_close(logits, ramp.expand_as(logits)) and _close(entered, hidden) and _close(left, plain)):
        raise RopextError(
            f"ropext computes losses from the output head alone, and {type(model).__name__} does more to its logits "
            "(scaling, soft-capping): it cannot be scored or trained yet"
        )


def head_weights(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight `[V, D]` and bias `[V]` of the output head in float32."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return head.weight.float(), None if bias is None else bias.float()


def _softmax_terms(logits: Tensor, targets: Tensor) -> Tensor:
    """`[3, N]`: largest logit, sum of exponentials relative to it, the target's logit. Overwrites `logits` `[N, V]`."""
    import torch

    target = logits.gather(-1, targets[:, None])[:, 0]
    peak = logits.amax(-1)
    total = logits.sub_(peak[:, None]).exp_().sum(-1)
    return torch.stack([peak, total, target])


def _forward_with_head_output(model: PreTrainedModel, ids: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One full forward pass whose head gives out `output`: final logits, what entered the head, what left it."""
    seen: list[Tensor] = []

    def replace(_: object, inputs: tuple[Tensor, ...], left: Tensor) -> Tensor:
        seen.extend([inputs[0], left])
        return output.to(left).expand_as(left)

    handle = model.get_output_embeddings().register_forward_hook(replace)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    entered, left = seen or [logits.new_zeros(()), logits.new_zeros(())]  # a head that is never called is not used
    return logits, entered, left


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equal up to the rounding of `found`'s dtype. NaN equals NaN: broken weights are the scorer's to report."""
    import torch

    found, expected, eps = found.float(), expected.float(), torch.finfo(found.dtype).eps
    largest = expected.nan_to_num(0, 0, 0).abs().max().item()
    tolerance = 16 * eps * max(largest, eps)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)
