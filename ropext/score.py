"""Scores a model on documents: a loss per token, and from one pass the perplexity of every length.

The definition is `truncated` (DESIGN.md): consecutive whole windows of one length, all shorter lengths read from the
same windows. With a static rotary table a token's loss does not depend on what follows it, so one pass serves all.
Shapes: N windows, W tokens in one (BOS counted), B windows in a batch, K lengths. Losses in nats, lengths in tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropext.errors import Refused, RopextError, UsageError
from ropext.loss import check_head, token_losses
from ropext.pack import bos_of, encode
from ropext.texts import Document

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

POSITION_BLOCK = 256  # positions that share one figure in by_position
RESAMPLES = 1000  # bootstrap draws behind a confidence interval
SEED = 0  # of those draws, the same for every model and length


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthScore:
    """One model at one context length. A figure that was not measured is None; `status` is "ok" or says why."""

    length: int
    perplexity: float | None  # exp(nll); None too where that overflows
    nll: float | None  # mean loss of the scored tokens, nats
    tokens: int  # scored: positions 1 .. length - 1 of each window
    documents: int
    windows: int  # 0 where the length was not measured
    ci95: tuple[float, float] | None  # of the perplexity, resampling documents; None for fewer than two
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionScore:
    """Mean loss of the tokens at positions start .. end - 1 of the windows.

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

    definition: str  # "truncated"
    stride: int | None  # tokens; None: consecutive windows
    bos: bool  # whether each window starts with one BOS
    data: str  # name of the corpus
    data_hash: str  # Windows.data_hash
    dtype: str  # of the arithmetic


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Windows:
    """Documents cut for scoring."""

    ids: NDArray[np.int32]  # tokens `[N, W]`
    owners: NDArray[np.int32]  # `[N]`: which of `documents` a window is from
    documents: tuple[str, ...]  # sha256 of each document that gave a window
    longest: int  # tokens of the longest document seen, BOS counted
    bos: bool

    @property
    def length(self) -> int:
        """Tokens in a window, W; 0 where no document reached any asked length."""
        return int(self.ids.shape[1])

    @property
    def data_hash(self) -> str:
        """Identity of the scored text: sha256 over the documents' digests, in order."""
        return hashlib.sha256("\n".join(self.documents).encode()).hexdigest()


def cut_windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    lengths: Sequence[int],
    limit: int | None = None,
) -> Windows:
    """Consecutive whole windows of the longest asked length that some document reaches.

    At most `limit` documents give windows, the first ones that can; no more are read once those are found at the
    longest asked length. Only the tokens of documents that may still give a window are kept.
    """
    _check_request(lengths, limit)
    bos = bos_of(tokenizer)
    opening = 0 if bos is None else 1
    longest, window = 0, 0
    kept: list[tuple[str, NDArray[np.int32]]] = []  # digest and tokens
    for document in documents:
        tokens = encode(tokenizer, document.text, bos)
        size = len(tokens) + opening
        longest = max(longest, size)
        reached = max((length for length in lengths if length <= size), default=0)
        if reached > window:
            window, kept = reached, []
        if window and reached == window and (limit is None or len(kept) < limit):
            kept.append((document.sha256, tokens))
        if window == max(lengths) and len(kept) == limit:
            break
    ids, owners = _cut([tokens for _, tokens in kept], window, bos)
    digests = tuple(digest for digest, _ in kept)
    return Windows(ids=ids, owners=owners, documents=digests, longest=longest, bos=bos is not None)


def score(
    model: PreTrainedModel,
    windows: Windows,
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[LengthScore, ...], tuple[PositionScore, ...]]:
    """One forward pass over the windows: a score for each length, in the order given, and the loss by position.

    `progress` is told (windows done, windows in all) after each batch. Raises Refused for a rotary table that changes
    with the length of the input, RopextError for a model whose logits are more than its head (loss.check_head).
    """
    if not windows.length:
        return tuple(_not_measured(length, windows.longest) for length in lengths), ()
    _check_static(model)
    _check_vocabulary(model, windows)
    check_head(model)
    measured = [length for length in lengths if length <= windows.length]
    totals = _sum_losses(model, windows, measured, batch_size, progress)
    columns = dict(zip(measured, totals.by_document.T, strict=True))
    results = tuple(
        _length_score(length, windows, columns[length], totals.broken_at)
        if length in columns
        else _not_measured(length, windows.longest)
        for length in lengths
    )
    return results, _position_scores(windows, totals.by_block)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Totals:
    """Sums of losses over all windows, float64."""

    by_document: NDArray[np.float64]  # `[documents, K]`: over positions 1 .. length - 1
    by_block: NDArray[np.float64]  # one for each block of POSITION_BLOCK positions
    broken_at: int | None  # first position whose loss is NaN or infinite in some window


def _sum_losses(
    model: PreTrainedModel,
    windows: Windows,
    lengths: Sequence[int],
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> _Totals:
    """Runs the model over the windows, `batch_size` at a time, all rows of equal length."""
    import numpy as np
    import torch

    by_document = np.zeros((len(windows.documents), len(lengths)))
    by_position = np.zeros(windows.length)
    ends = np.asarray(lengths, dtype=np.int64) - 1
    for start in range(0, len(windows.ids), batch_size):
        batch = slice(start, start + batch_size)
        ids = torch.from_numpy(windows.ids[batch].astype(np.int64)).to(model.device)
        losses = np.zeros((len(ids), windows.length))  # position 0 is not predicted: nothing to add
        losses[:, 1:] = token_losses(model, ids).numpy()
        np.add.at(by_document, windows.owners[batch], losses.cumsum(axis=1)[:, ends])
        by_position += losses.sum(axis=0)
        if progress:
            progress(min(start + batch_size, len(windows.ids)), len(windows.ids))
    by_block = np.add.reduceat(by_position, np.arange(0, windows.length, POSITION_BLOCK))
    broken = np.flatnonzero(~np.isfinite(by_position))
    return _Totals(by_document=by_document, by_block=by_block, broken_at=int(broken[0]) if len(broken) else None)


def _length_score(length: int, windows: Windows, sums: NDArray[np.float64], broken_at: int | None) -> LengthScore:
    """The score of one measured length from the loss sums of the documents `[documents]`."""
    import numpy as np

    count = len(windows.ids)
    tokens = count * (length - 1)
    nll = perplexity = ci95 = None
    if broken_at is not None and broken_at < length:
        status = f"failed: the loss at position {broken_at} is not a finite number"
    else:
        nll = float(sums.sum()) / tokens
        perplexity = _exp(nll)
        status = "ok" if perplexity is not None else f"perplexity overflows: exp({nll:.1f})"
        ci95 = _interval(sums, np.bincount(windows.owners) * (length - 1))
    return LengthScore(
        length=length,
        perplexity=perplexity,
        nll=nll,
        tokens=tokens,
        documents=len(windows.documents),
        windows=count,
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


def _position_scores(windows: Windows, by_block: NDArray[np.float64]) -> tuple[PositionScore, ...]:
    """Mean loss of each block of positions, the last one possibly short."""
    scores = []
    for block, total in enumerate(by_block.tolist()):
        start = block * POSITION_BLOCK
        end = min(start + POSITION_BLOCK, windows.length)
        tokens = (end - max(start, 1)) * len(windows.ids)
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


def _cut(documents: Sequence[NDArray[np.int32]], window: int, bos: int | None) -> tuple[NDArray[np.int32], ...]:
    """Windows `[N, W]` and the number of the document that each is from `[N]`; remainders are dropped."""
    import numpy as np

    if not documents:
        return np.zeros((0, 0), dtype=np.int32), np.zeros(0, dtype=np.int32)
    room = window if bos is None else window - 1
    counts = [len(tokens) // room for tokens in documents]
    ids = np.concatenate([tokens[: n * room].reshape(n, room) for n, tokens in zip(counts, documents, strict=True)])
    if bos is not None:
        ids = np.insert(ids, 0, bos, axis=1)
    return ids, np.repeat(np.arange(len(documents), dtype=np.int32), counts)


def _check_request(lengths: Sequence[int], limit: int | None) -> None:
    """Raises UsageError for lengths or a number of documents that nothing can be scored with."""
    if not lengths or min(lengths) < 2:
        raise UsageError(f"a length to score at has at least 2 tokens, one to predict: found {list(lengths)}")
    if limit is not None and limit < 1:
        raise UsageError(f"the number of documents to score is at least 1: found {limit}")


def _check_static(model: PreTrainedModel) -> None:
    """Raises Refused where the rotary table depends on the input's length, so that one pass would be wrong."""
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        types = found.values() if isinstance(found, dict) else [found]  # gemma3: one for each layer type
        changing = [kind for kind in types if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")]
        if changing:
            raise Refused(
                f"one pass scores all lengths only with a rotary table that stays as it is: found rope type "
                f"{changing[0]!r}, whose table changes with the length, which ropext cannot score yet"
            )


def _check_vocabulary(model: PreTrainedModel, windows: Windows) -> None:
    """Raises RopextError if the tokenizer knows more tokens than the model has embeddings for."""
    embeddings: Any = model.get_input_embeddings()
    known, largest = embeddings.weight.shape[0], int(windows.ids.max())
    if largest >= known:
        raise RopextError(
            f"tokenizer and model must belong together: the text has token {largest}, the model knows {known} tokens"
        )
