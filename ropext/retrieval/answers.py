"""What a model says about a context: log-likelihoods of continuations, and the greedy continuation.

The context runs once and its cache serves all continuations; only hidden states that predict something pass the head,
in float32. A rotary table that changes with the input's length (dynamic, longrope) makes a cache hold keys of several
tables, so such a model takes a whole pass with a fresh table for each continuation and each generated token: what is
measured is then the model at that length, and not what cached generation of a server makes of it.
Shapes: T tokens in a row, B continuations at once, D hidden size, V vocabulary. Log-likelihoods in nats.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ropext.errors import RopextError
from ropext.load import refresh_rotary
from ropext.loss import HEAD_BLOCK, check_head, head_weights
from ropext.score import has_changing_table

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Cache = dict[str, Any]  # transformers' cache under the name that it goes in and comes out by; empty at first
_CACHES = ("cache", "past_key_values")  # that name, the newer one first


class Answers:
    """A loaded model in eval mode, asked one context at a time. Raises RopextError as check_head does."""

    def __init__(self, model: PreTrainedModel, batch_size: int = 1) -> None:
        check_head(model)
        self.model, self.batch_size = model, batch_size
        self.changing = has_changing_table(model.config)
        self.weight, self.bias = head_weights(model)

    def log_likelihoods(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """For each continuation its log-likelihood after the context, and whether it is the greedy one.

        `batch_size` continuations run together on a copy of the context's cache. Raises RopextError for an empty one,
        and where a figure is not a finite number.
        """
        import torch

        if not context or not all(continuations):
            raise RopextError("a likelihood needs a context and a continuation of at least one token each")
        with torch.no_grad():
            if self.changing or len(continuations) == 1:
                return [self._judge(self._whole([*context, *c[:-1]])[-len(c) :], c) for c in continuations]
            last, cache = self._run(torch.tensor([context]), {})
            starts = range(0, len(continuations), self.batch_size)
            batches = [continuations[start : start + self.batch_size] for start in starts]
            return [answer for batch in batches for answer in self._after(last[0, -1:], cache, batch)]

    def greedy(self, context: Sequence[int], most: int, ended: Callable[[list[int]], bool]) -> list[int]:
        """The likeliest next token again and again: at most `most`, or until `ended` says so of those so far."""
        import torch

        made, row = list[int](), list(context)
        cache: Cache = {}
        with torch.no_grad():
            while len(made) < most and not (made and ended(made)):
                if self.changing:
                    hidden = self._whole([*context, *made])
                else:
                    states, cache = self._run(torch.tensor([row]), cache)
                    hidden = states[0]
                logits = self._logits(hidden[-1:])
                if not logits.isfinite().all():
                    raise RopextError(f"a logit after {len(context) + len(made)} tokens is not a finite number")
                row = [int(logits.argmax())]
                made += row
        return made

    def _whole(self, row: list[int]) -> Tensor:
        """Hidden states `[T, D]` of one whole row, with a table that has seen nothing else."""
        import torch

        if self.changing:
            refresh_rotary(self.model)
        hidden: Tensor = self.model.base_model(
            input_ids=torch.tensor([row], device=self.model.device), use_cache=False
        ).last_hidden_state
        return hidden[0]

    def _run(self, ids: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Hidden states `[B, T, D]` of rows that go on after a cache, and the cache with them in it."""
        done = self.model.base_model(input_ids=ids.to(self.model.device), use_cache=True, **cache)
        name = next(name for name in _CACHES if name in done)
        return done.last_hidden_state, {name: done[name]}

    def _after(self, last: Tensor, cache: Cache, batch: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """Answers for continuations of one context, whose last hidden state is `last` `[1, D]`."""
        import torch

        width = max(len(continuation) for continuation in batch) - 1
        hidden = last.new_empty(len(batch), 0, last.shape[-1])
        if width:
            rows = torch.tensor([[*c[:-1], *[0] * (width - len(c) + 1)] for c in batch])  # nothing looks at the padding
            own = copy.deepcopy(cache)
            for held in own.values():
                held.batch_repeat_interleave(len(batch))
            hidden, _ = self._run(rows, own)
        return [
            self._judge(torch.cat([last, states[: len(continuation) - 1]]), continuation)
            for states, continuation in zip(hidden, batch, strict=True)
        ]

    def _judge(self, hidden: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
        """Answer for one continuation of T tokens from the states `[T, D]` that predict them."""
        import torch

        total, greedy = 0.0, True
        targets = torch.tensor(continuation, device=hidden.device)
        for states, wanted in zip(hidden.split(HEAD_BLOCK), targets.split(HEAD_BLOCK), strict=True):
            logs = self._logits(states).log_softmax(-1)
            total += float(logs.gather(-1, wanted[:, None]).sum())
            greedy = greedy and bool((logs.argmax(-1) == wanted).all())
        if not abs(total) < float("inf"):
            raise RopextError(f"the log-likelihood of {len(continuation)} tokens is not a finite number: {total}")
        return total, greedy

    def _logits(self, hidden: Tensor) -> Tensor:
        """`[T, V]`, float32."""
        import torch

        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)
