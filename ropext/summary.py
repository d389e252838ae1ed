"""Losses of single tokens become figures: by length, by position, by context, and of two models on the same text.

Pure arithmetic on what a pass scored; runs no model. Losses in nats, float64. Shapes: S scored tokens of a pass, row
after row, D documents, R bootstrap draws, C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropext.cut import Cut, Pass
from ropext.figures import ContextScore, Interval, LengthScore, Paired, PositionScore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POSITION_BLOCK = 256  # positions that share one figure in by_position
RESAMPLES = 1000  # bootstrap draws behind a confidence interval
SEED = 0  # of those draws, the same for every model and length


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """A pass and the loss of each token that it scores."""

    run: Pass
    losses: NDArray[np.float64]  # `[S]`
    too_long: tuple[int, ...]  # lengths of the asked pass that did not fit in memory

    @property
    def positions(self) -> NDArray[np.int64]:
        """Of each scored token in its row: `[S]`."""
        import numpy as np

        rows = zip(self.run.rows, self.run.first, strict=True)
        return np.concatenate([np.arange(first, len(row)) for row, first in rows])

    @property
    def owners(self) -> NDArray[np.int64]:
        """The document of each scored token: `[S]`."""
        import numpy as np

        return np.repeat(self.run.owners, scored_of(self.run)).astype(np.int64)

    @property
    def sizes(self) -> NDArray[np.float64] | None:
        """Bytes of text of each scored token: `[S]`."""
        import numpy as np

        if self.run.sizes is None:
            return None
        rows = zip(self.run.sizes, self.run.first, strict=True)
        return np.concatenate([sizes[first:] for sizes, first in rows]).astype(np.float64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Totals:
    """Sums over the tokens scored at one length, by document."""

    documents: tuple[str, ...]  # sha256 of the D documents that have such tokens
    losses: NDArray[np.float64]  # `[D]`
    tokens: NDArray[np.float64]  # `[D]`
    bytes: NDArray[np.float64] | None  # `[D]`: of text that those tokens stand for
    broken_at: int | None  # first position with a loss that is NaN or infinite


def scored_of(run: Pass) -> NDArray[np.int64]:
    """How many tokens of each row are scored: `[N]`."""
    import numpy as np

    lengths = np.asarray([len(row) for row in run.rows], dtype=np.int64)
    return lengths - np.minimum(run.first, lengths)


def totals_at(length: int, scored: Scored, cut: Cut, *, since: int = 0) -> Totals:
    """What the tokens at positions from `since` on and below `length` add up to."""
    import numpy as np

    positions = scored.positions
    chosen = (positions >= since) & (positions < length)
    losses, owners = scored.losses[chosen], scored.owners[chosen]
    broken = positions[chosen][~np.isfinite(losses)]
    tokens = np.bincount(owners, minlength=len(cut.documents)).astype(np.float64)
    used = tokens > 0
    sizes = scored.sizes
    return Totals(
        documents=tuple(digest for digest, some in zip(cut.documents, used, strict=True) if some),
        losses=_by_owner(owners, losses, len(used))[used],
        tokens=tokens[used],
        bytes=None if sizes is None else _by_owner(owners, sizes[chosen], len(used))[used],
        broken_at=int(broken.min()) if len(broken) else None,
    )


def _by_owner(owners: NDArray[np.int64], values: NDArray[np.float64], documents: int) -> NDArray[np.float64]:
    """Sums of the values of each document: `[D]`."""
    import numpy as np

    return np.bincount(owners, weights=values, minlength=documents).astype(np.float64)


def length_score(length: int, totals: Totals, windows: int) -> LengthScore:
    """The score of one measured length."""
    nll = perplexity = ci95 = bits = None
    if totals.broken_at is not None:
        status = _broken(totals.broken_at)
    else:
        nll = float(totals.losses.sum() / totals.tokens.sum())
        perplexity = _exp(nll)
        status = "ok" if perplexity is not None else f"perplexity overflows: exp({nll:.1f})"
        ci95 = _exp_of(_percentiles(_means(totals.losses, totals.tokens)))
        if totals.bytes is not None and totals.bytes.sum() > 0:
            bits = float(totals.losses.sum() / totals.bytes.sum() / math.log(2))
    return LengthScore(
        length=length,
        perplexity=perplexity,
        nll=nll,
        bits_per_byte=bits,
        tokens=int(totals.tokens.sum()),
        documents=len(totals.documents),
        windows=windows,
        ci95=ci95,
        status=status,
    )


def no_length_score(length: int, status: str, windows: int = 0) -> LengthScore:
    """A length without a figure, and why."""
    return LengthScore(
        length=length,
        perplexity=None,
        nll=None,
        bits_per_byte=None,
        tokens=0,
        documents=0,
        windows=windows,
        ci95=None,
        status=status,
    )


def position_scores(scored: Scored) -> tuple[PositionScore, ...]:
    """Mean loss of each block of positions, the last one possibly short."""
    import numpy as np

    positions, width = scored.positions, len(scored.run.rows[0])
    blocks = positions // POSITION_BLOCK
    sums = np.bincount(blocks, weights=scored.losses)
    counts = np.bincount(blocks)
    scores = []
    for block, start in enumerate(range(0, width, POSITION_BLOCK)):
        total, tokens = (float(sums[block]), int(counts[block])) if block < len(sums) else (0.0, 0)
        nll = total / tokens if tokens and math.isfinite(total) else None
        scores.append(PositionScore(start=start, end=min(start + POSITION_BLOCK, width), nll=nll, tokens=tokens))
    return tuple(scores)


def context_score(length: int, last: int, totals: Totals) -> ContextScore:
    """The loss of the last tokens of each window under one context length."""
    nll = ci95 = None
    status = "ok"
    if totals.broken_at is not None:
        status = _broken(totals.broken_at)
    else:
        nll = float(totals.losses.sum() / totals.tokens.sum())
        ci95 = _percentiles(_means(totals.losses, totals.tokens))
    return ContextScore(
        length=length, last_tokens=last, nll=nll, tokens=int(totals.tokens.sum()), ci95=ci95, status=status
    )


def no_context_score(length: int, last: int, status: str) -> ContextScore:
    """A context length without a figure, and why."""
    return ContextScore(length=length, last_tokens=last, nll=None, tokens=0, ci95=None, status=status)


def paired(length: int, one: tuple[str, Totals], against: tuple[str, Totals], *, same_tokens: bool) -> Paired | None:
    """Two models, each with its label, on the documents that both were scored on; None where there is none, or a loss
    is broken. Every draw takes the same documents for both, so what makes a document hard for both cancels.

    With other tokens (`same_tokens` false) a loss per token does not compare; bits per byte do.
    """
    import numpy as np

    (label, mine), (other, theirs) = one, against
    places = {digest: place for place, digest in enumerate(theirs.documents)}
    pairs = [(own, places[digest]) for own, digest in enumerate(mine.documents) if digest in places]
    if not pairs or mine.broken_at is not None or theirs.broken_at is not None:
        return None
    left, right = (np.asarray(column) for column in zip(*pairs, strict=True))
    nll = ratio = bits = nll_ci95 = ratio_ci95 = bits_ci95 = None
    if same_tokens:
        columns = (mine.losses[left], mine.tokens[left], theirs.losses[right], theirs.tokens[right])
        nll, nll_ci95 = _difference(*columns)
        ratio, ratio_ci95 = _exp(nll), _exp_of(nll_ci95)
    if mine.bytes is not None and theirs.bytes is not None and min(mine.bytes[left].sum(), theirs.bytes[right].sum()):
        columns = (
            mine.losses[left] / math.log(2),
            mine.bytes[left],
            theirs.losses[right] / math.log(2),
            theirs.bytes[right],
        )
        bits, bits_ci95 = _difference(*columns)
    return Paired(
        label=label,
        against=other,
        length=length,
        documents=len(pairs),
        nll_difference=nll,
        nll_ci95=nll_ci95,
        perplexity_ratio=ratio,
        perplexity_ratio_ci95=ratio_ci95,
        bits_per_byte_difference=bits,
        bits_per_byte_ci95=bits_ci95,
    )


def _difference(*columns: NDArray[np.float64]) -> tuple[float, Interval | None]:
    """Mean of the first two columns less that of the others, and its interval."""
    mine, own, theirs, other = (float(column.sum()) for column in columns)
    draws = _means(columns[0], columns[1], columns[2], columns[3])
    return mine / own - theirs / other, _percentiles(draws)


def _means(*columns: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Quotient of the sums of two columns `[D]` under each draw of documents with replacement: `[R]`. Of four columns
    the difference of two such quotients. None below two documents."""
    import numpy as np

    size = len(columns[0])
    if size < 2:
        return None
    rng = np.random.default_rng(SEED)
    table = np.stack(columns, axis=1)  # [D, C]
    draws = (rng.integers(size, size=size) for _ in range(RESAMPLES))
    sums = np.stack([table[draw].sum(axis=0) for draw in draws])  # [R, C]
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = sums[:, ::2] / sums[:, 1::2]
    means: NDArray[np.float64] = quotients[:, 0] - (quotients[:, 1] if quotients.shape[1] == 2 else 0)
    return means


def _percentiles(means: NDArray[np.float64] | None) -> Interval | None:
    import numpy as np

    if means is None or not np.isfinite(means).all():
        return None
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _exp_of(interval: Interval | None) -> Interval | None:
    low, high = (None, None) if interval is None else (_exp(interval[0]), _exp(interval[1]))
    return None if low is None or high is None else (low, high)


def _exp(nll: float) -> float | None:
    """exp(nll), or None where a double cannot hold it."""
    try:
        return math.exp(nll)
    except OverflowError:
        return None


def _broken(position: int) -> str:
    return f"failed: the loss at position {position} is not a finite number"
