"""A loaded model as lm-eval sees it: nothing cut off, one BOS by the tokenizer's own convention, nothing printed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ropext.errors import RopextError
from ropext.pack import bos_of, encode
from ropext.process import ALONE, Team, quiet
from ropext.retrieval.answers import Answers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BOOTSTRAPS = 200  # draws behind the standard error of a metric that is no mean


def as_lm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int = 1,
    team: Team = ALONE,
    told: Callable[[int, int], None] | None = None,
) -> Any:  # a class of its own, below HFLM
    """The model for lm-eval's evaluator. `told` hears of requests done and requests in all.

    A request runs at its full length, even beyond the model's window: lm-eval's own class would cut it on the left.
    Only rolling perplexities of whole documents are taken in windows of the model, as lm-eval defines them.
    lm-eval deals the documents out to the processes of the team.
    """
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

    answers, bos = Answers(model, batch_size), bos_of(tokenizer)
    heard = told or (lambda done, total: None)

    class Uncut(HFLM):  # type: ignore[misc]  # lm-eval ships no types
        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
        ) -> list[int]:
            head = [] if bos is None or add_special_tokens is False else [bos]
            return [*head, *encode(self.tokenizer, string, bos).tolist()]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            places: dict[tuple[int, ...], list[int]] = {}
            for place, (_text, context, _continuation) in enumerate(requests):
                places.setdefault(tuple(context), []).append(place)
            found: dict[int, tuple[float, bool]] = {}
            for context, own in places.items():
                scored = answers.log_likelihoods(context, [requests[place][2] for place in own])
                found |= zip(own, scored, strict=True)
                if override_bs is None:  # else a part of a rolling request
                    heard(len(found), len(requests))
            return [found[place] for place in range(len(requests))]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            written = []
            for request in requests:
                context, asked = request.args
                written.append(self._written(context, normalize_gen_kwargs(asked, self.max_gen_toks)))
                heard(len(written), len(requests))
            return written

        def _written(self, context: str, settings: Any) -> str:
            if settings["do_sample"] or settings.get("num_beams", 1) != 1:
                raise RopextError("only greedy generation is scored: this task samples or searches with beams")
            ends = model.generation_config.eos_token_id if model.generation_config else None
            stops = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
            until = handle_stop_sequences(settings["until"], eos=None)

            def ended(made: list[int]) -> bool:
                return made[-1] in stops or any(stop in self.tok_decode(made) for stop in until if stop)

            made = answers.greedy(self.tok_encode(context), settings["max_gen_toks"], ended)
            return str(postprocess_generated_text(self.tok_decode(made), until, None))

        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.stack(team.gather(tensor.cpu()))

        def gather_object(self, obj: Any, dst: int = 0) -> list[Any]:
            return team.gather(obj)

        def barrier(self) -> None:
            team.gather(None)

    lm = Uncut(pretrained=model, tokenizer=copy.deepcopy(tokenizer))  # its own: lm-eval gives it a padding token
    lm._rank, lm._world_size = team.rank, team.size
    return lm


@contextmanager
def silence() -> Iterator[None]:
    """lm-eval without its warnings, progress bars, prints and pools of processes, and afterwards as it was."""
    import datasets
    from lm_eval.api import metrics, task

    def bootstrap_stderr(metric: Any, values: Any, iters: int) -> Any:
        return metrics.sample_stddev(metrics._bootstrap_internal(metric, iters)((0, values)))

    kept = task.tqdm, metrics.bootstrap_stderr, datasets.are_progress_bars_disabled()
    task.tqdm, metrics.bootstrap_stderr = (lambda items, **_: items), bootstrap_stderr
    datasets.disable_progress_bars()
    try:
        with quiet("lm_eval"), quiet("huggingface_hub"):  # the latter tells of each try without a network
            yield
    finally:
        task.tqdm, metrics.bootstrap_stderr = kept[:2]
        if not kept[2]:
            datasets.enable_progress_bars()
