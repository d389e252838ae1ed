"""Scores a model on documents: a loss per token, and from it the perplexity at every length.

How documents are cut is the definition of the perplexity (ropext.cut). With a static rotary table a token's loss does
not depend on what follows it, so one pass over the longest windows serves all lengths.
Shapes: N rows, T tokens in one (BOS counted), B rows in a batch, D documents, K lengths. Losses in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropext.cut import Cut, Pass
from ropext.errors import RopextError
from ropext.load import refresh_rotary
from ropext.loss import check_head, token_losses

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from transformers import PreTrainedModel

POSITION_BLOCK = 256  # positions that share one figure in by_position
RESAMPLES = 1000  # bootstrap draws behind a confidence interval
SEED = 0  # of those draws, the same for every model and length


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthScore:
    """One model at one context length. A figure that was not measured is None; `status` is "ok" or says why."""

    length: int
    perplexity: float | None  # exp(nll); None too where that overflows
    nll: float | None  # mean loss of the scored tokens, nats
    tokens: int  # scored; truncated: positions 1 .. length - 1 of each window
    documents: int
    windows: int  # 0 where the length was not measured
    ci95: tuple[float, float] | None  # of the perplexity, resampling documents; None for fewer than two
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionScore:
    """Mean loss of the tokens scored at positions start .. end - 1 of the longest windows.

    Position 0 opens a window and is never predicted, so the first block scores one token a window less.
    """

    start: int
    end: int
    nll: float | None
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScores:
    """What one model scored."""

    model: str  # path or hub id
    label: str  # column heading: source, patched, tuned ...
    results: tuple[LengthScore, ...]
    by_position: tuple[PositionScore, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How the scores were made: figures with different protocols cannot be compared."""

    definition: str  # "truncated" or "sliding"
    stride: int | None  # tokens; None: consecutive windows
    bos: bool  # whether each window starts with one BOS
    data: str  # name of the corpus
    data_hash: str  # Cut.data_hash
    dtype: str  # of the arithmetic


def score(
    model: PreTrainedModel,
    cut: Cut,
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[LengthScore, ...], tuple[PositionScore, ...]]:
    """A score for each length, in the order given, and the loss by position in the longest windows.

    With a static rotary table one forward pass over consecutive windows serves all lengths. A table that changes with
    the input's length (dynamic, longrope) takes a pass a length, each forward pass with a fresh rotary state.
    `progress` is told (rows done, rows in all) after each batch. Raises RopextError for a model whose logits are more
    than its head (loss.check_head).
    """
    changing = has_changing_table(model)
    passes = cut.passes(lengths, together=not changing)
    if not passes:
        return tuple(_not_measured(length, cut.longest) for length in lengths), ()
    _check_vocabulary(model, passes)
    check_head(model)
    told = _Told(progress, sum(len(one.rows) for one in passes))
    scores: dict[int, LengthScore] = {}
    by_position: tuple[PositionScore, ...] = ()
    for one in passes:
        totals = _sum_losses(model, one, len(cut.documents), batch_size, fresh=changing, told=told)
        for column, length in enumerate(one.lengths):
            scores[length] = _length_score(length, one, totals, column)
        if max(one.lengths) == max(max(other.lengths) for other in passes):
            by_position = _position_scores(totals)
    return tuple(scores.get(length, _not_measured(length, cut.longest)) for length in lengths), by_position


def has_changing_table(model: nn.Module) -> bool:
    """Whether a rotary table of the model depends on the length of the input."""
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        types = found.values() if isinstance(found, dict) else [found]  # gemma3: one for each layer type
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in types):
            return True
    return False


class _Told:
    """Counts rows over several passes for whoever watches."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def rows(self, count: int) -> None:
        self.done += count
        if self.progress:
            self.progress(self.done, self.total)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Totals:
    """Sums of losses over all rows of a pass, float64, and how many tokens are in them. D documents, K lengths."""

    sums: NDArray[np.float64]  # `[D, K]`: over the scored positions below each length
    tokens: NDArray[np.int64]  # `[D, K]`
    position_sums: NDArray[np.float64]  # `[W]`
    position_tokens: NDArray[np.int64]  # `[W]`

    @property
    def broken_at(self) -> int | None:
        """First position whose loss is NaN or infinite in some row."""
        import numpy as np

        broken = np.flatnonzero(~np.isfinite(self.position_sums))
        return int(broken[0]) if len(broken) else None


def _sum_losses(
    model: PreTrainedModel, one: Pass, documents: int, batch_size: int, *, fresh: bool, told: _Told
) -> _Totals:
    """Runs the model over the rows, up to `batch_size` of equal length at a time."""
    import numpy as np
    import torch

    width = len(one.rows[0])
    sums = np.zeros((documents, len(one.lengths)))
    tokens = np.zeros((documents, len(one.lengths)), dtype=np.int64)
    position_sums, position_tokens = np.zeros(width), np.zeros(width, dtype=np.int64)
    for batch in _batches(one.rows, batch_size):
        rows = np.stack(one.rows[batch]).astype(np.int64)
        if fresh:
            refresh_rotary(model)
        losses = np.zeros(rows.shape)  # position 0 is not predicted: nothing to add
        losses[:, 1:] = token_losses(model, torch.from_numpy(rows).to(model.device)).numpy()
        scored = np.arange(rows.shape[1]) >= one.first[batch, None]  # [B, T]
        losses = np.where(scored, losses, 0.0)
        ends = np.minimum(one.lengths, rows.shape[1]) - 1
        np.add.at(sums, one.owners[batch], losses.cumsum(axis=1)[:, ends])
        np.add.at(tokens, one.owners[batch], scored.cumsum(axis=1)[:, ends])
        position_sums[: rows.shape[1]] += losses.sum(axis=0)
        position_tokens[: rows.shape[1]] += scored.sum(axis=0)
        told.rows(len(rows))
    return _Totals(sums=sums, tokens=tokens, position_sums=position_sums, position_tokens=position_tokens)


def _batches(rows: Sequence[NDArray[np.int32]], batch_size: int) -> Iterator[slice]:
    """Runs of at most `batch_size` neighbouring rows of one length: padding would change a dynamic table."""
    start = 0
    while start < len(rows):
        end = start + 1
        while end < min(start + batch_size, len(rows)) and len(rows[end]) == len(rows[start]):
            end += 1
        yield slice(start, end)
        start = end


def _length_score(length: int, one: Pass, totals: _Totals, column: int) -> LengthScore:
    """The score of one measured length from the loss sums of the documents."""
    used = totals.tokens[:, column] > 0
    sums, tokens = totals.sums[used, column], totals.tokens[used, column]
    nll = perplexity = ci95 = None
    if totals.broken_at is not None and totals.broken_at < length:
        status = f"failed: the loss at position {totals.broken_at} is not a finite number"
    else:
        nll = float(sums.sum() / tokens.sum())
        perplexity = _exp(nll)
        status = "ok" if perplexity is not None else f"perplexity overflows: exp({nll:.1f})"
        ci95 = _interval(sums, tokens)
    return LengthScore(
        length=length,
        perplexity=perplexity,
        nll=nll,
        tokens=int(tokens.sum()),
        documents=len(tokens),
        windows=len(one.rows),
        ci95=ci95,
        status=status,
    )


def _not_measured(length: int, longest: int) -> LengthScore:
    """A length that no document reaches: no figure, and the reason."""
    return LengthScore(
        length=length,
        perplexity=None,
        nll=None,
        tokens=0,
        documents=0,
        windows=0,
        ci95=None,
        status=f"not measured: the longest document has {longest} tokens",
    )


def _position_scores(totals: _Totals) -> tuple[PositionScore, ...]:
    """Mean loss of each block of positions, the last one possibly short."""
    scores = []
    for start in range(0, len(totals.position_sums), POSITION_BLOCK):
        end = min(start + POSITION_BLOCK, len(totals.position_sums))
        total = float(totals.position_sums[start:end].sum())
        tokens = int(totals.position_tokens[start:end].sum())
        nll = total / tokens if tokens and math.isfinite(total) else None
        scores.append(PositionScore(start=start, end=end, nll=nll, tokens=tokens))
    return tuple(scores)


def _interval(sums: NDArray[np.float64], tokens: NDArray[np.int64]) -> tuple[float, float] | None:
    """95% percentile interval of the perplexity when whole documents are drawn with replacement; None below two."""
    import numpy as np

    if len(sums) < 2:
        return None
    rng = np.random.default_rng(SEED)
    draws = (rng.integers(len(sums), size=len(sums)) for _ in range(RESAMPLES))
    means = [sums[draw].sum() / tokens[draw].sum() for draw in draws]
    low, high = (_exp(float(bound)) for bound in np.percentile(means, [2.5, 97.5]))
    return None if low is None or high is None else (low, high)


def _exp(nll: float) -> float | None:
    """exp(nll), or None where a double cannot hold it."""
    try:
        return math.exp(nll)
    except OverflowError:
        return None


def _check_vocabulary(model: PreTrainedModel, passes: Sequence[Pass]) -> None:
    """Raises RopextError if the tokenizer knows more tokens than the model has embeddings for."""
    embeddings: Any = model.get_input_embeddings()
    known, largest = embeddings.weight.shape[0], max(int(row.max()) for one in passes for row in one.rows)
    if largest >= known:
        raise RopextError(
            f"tokenizer and model must belong together: the text has token {largest}, the model knows {known} tokens"
        )
