"""One model on one cut: its passes run, or are taken from the kept scores, and become figures.

Lengths in tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ropext.cut import Cut, Pass, Windows
from ropext.figures import ContextScore, LengthScore, PositionScore
from ropext.kept import Shelf, kept_losses
from ropext.process import ALONE, Team
from ropext.score import check_scorable, score_pass
from ropext.summary import (
    Scored,
    Totals,
    context_score,
    length_score,
    no_context_score,
    no_length_score,
    position_scores,
    scored_of,
    totals_at,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel


KEEP_EVERY = 60.0  # seconds between two times that unfinished scores are written


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The figures of one model on one cut."""

    results: tuple[LengthScore, ...]  # in the order asked for
    by_position: tuple[PositionScore, ...]  # of the longest length that was measured
    by_context: tuple[ContextScore, ...]
    totals: Mapping[int, Totals]  # of each length that was measured
    passes: float  # tokens run through the model, in full passes over the longest windows


def measure(
    model: Callable[[], PreTrainedModel],
    cut: Cut,
    lengths: Sequence[int],
    *,
    static: bool,
    last_tokens: int | None = None,
    batch_size: int = 1,
    shelf: Shelf | None = None,
    rescore: bool = False,
    team: Team = ALONE,
    told: Callable[[int, int], None] | None = None,
) -> Measured:
    """Score what the shelf does not hold, or everything with `rescore`; `model` is called only for that.

    `static`: the rotary table does not change with the length, so one pass serves several. `told` hears (rows done,
    rows in all).
    """
    passes = cut.passes(lengths, together=static)
    contexts = _context_passes(cut, lengths, last_tokens)
    work = _Work(batch_size=batch_size, team=team, shelf=shelf, told=told)
    work.kept = team.first({} if shelf is None or rescore else shelf.read())
    found = {one.name: kept_losses(one, work.kept, longer_serves=static) for one in [*passes, *contexts]}
    missing = [one for one in [*passes, *contexts] if found[one.name] is None]
    fresh = work.run(model(), missing) if missing else {}
    scored = [fresh.get(one.name) or _kept(one, found[one.name]) for one in passes]
    ends = [fresh.get(one.name) or _kept(one, found[one.name]) for one in contexts]
    by_length = {length: one for one in scored for length in one.run.lengths}
    totals = {length: totals_at(length, one, cut) for length, one in by_length.items()}
    widest = sum(map(len, passes[0].rows)) if passes else 0
    return Measured(
        results=tuple(_length(length, totals, by_length, scored, cut) for length in lengths),
        by_position=position_scores(by_length[max(by_length)]) if by_length else (),
        by_context=() if last_tokens is None else tuple(_contexts(lengths, last_tokens, by_length, ends, cut)),
        totals=totals,
        passes=work.tokens / widest if widest else 0.0,
    )


def _context_passes(cut: Cut, lengths: Sequence[int], last_tokens: int | None) -> list[Pass]:
    """The whole windows have the longest context, and a pass for themselves already."""
    if last_tokens is None or not isinstance(cut, Windows):
        return []
    return cut.context_passes([length for length in lengths if length < cut.length], last_tokens)


@dataclass(kw_only=True, slots=True)
class _Work:
    """The passes that must be run: what is done of them is kept now and then, and whatever ends the run."""

    batch_size: int
    team: Team
    shelf: Shelf | None
    told: Callable[[int, int], None] | None
    kept: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # by the name of the pass
    tokens: int = 0  # run through the model
    begun: tuple[str, list[NDArray[np.float64]]] | None = None  # the pass in hand, and its losses so far
    written_at: float = field(default_factory=time.monotonic)

    def run(self, model: PreTrainedModel, missing: Sequence[Pass]) -> dict[str, Scored]:
        """Each pass scored, by its name."""
        check_scorable(model, missing)
        total, done = sum(len(one.rows) for one in missing), 0
        scored = {}
        try:
            for one in missing:
                scored[one.name] = self._run(model, one, done, total)
                done += len(one.rows)
        finally:
            self._write()
        return scored

    def _run(self, model: PreTrainedModel, one: Pass, before: int, total: int) -> Scored:
        begun = self.kept.get(one.name)
        ready = 0 if begun is None else int((scored_of(one).cumsum() <= len(begun)).sum())  # rows that need no run
        self.tokens += sum(len(row) for row in one.rows[ready:])

        def keep(parts: list[NDArray[np.float64]]) -> None:
            self.begun = one.name, parts
            if time.monotonic() - self.written_at > KEEP_EVERY:
                self._write()

        told = self.told
        scored = score_pass(
            model,
            one,
            batch_size=self.batch_size,
            team=self.team,
            begun=begun,
            keep=keep,
            told=None if told is None else lambda rows: told(before + rows, total),
        )
        self.begun = None
        if scored.run.lengths:
            self.kept[scored.run.name] = scored.losses
        return scored

    def _write(self) -> None:
        import numpy as np

        self.written_at = time.monotonic()
        if self.begun is not None:
            name, parts = self.begun
            self.kept[name] = np.concatenate(parts)
        if self.shelf is not None and self.kept and self.team.rank == 0:
            with suppress(OSError):  # a folder that cannot be written keeps nothing: the figures are the same
                self.shelf.write(self.kept)


def _kept(run: Pass, losses: NDArray[np.float64] | None) -> Scored:
    assert losses is not None  # else it would have been run
    return Scored(run=run, losses=losses, too_long=())


def _length(
    length: int, totals: Mapping[int, Totals], by_length: Mapping[int, Scored], scored: Sequence[Scored], cut: Cut
) -> LengthScore:
    if length in totals:
        return length_score(length, totals[length], len(by_length[length].run.rows))
    for one in scored:
        if length in one.too_long:
            return no_length_score(length, f"failed: memory does not suffice for {length} tokens", len(one.run.rows))
    return no_length_score(length, f"not measured: the longest document has {cut.longest} tokens")


def _contexts(
    lengths: Sequence[int], last: int, by_length: Mapping[int, Scored], ends: Sequence[Scored], cut: Cut
) -> list[ContextScore]:
    """The last tokens of each window under each context; the whole windows are scored already."""
    whole = cut.length if isinstance(cut, Windows) else 0
    by_context = {length: one for one in ends for length in one.run.lengths}
    too_long = {length for one in ends for length in one.too_long}
    scores = []
    for length in lengths:
        if length == whole and length in by_length and last < length:
            totals = totals_at(length, by_length[length], cut, since=length - last)
            scores.append(context_score(length, last, totals))
        elif length in by_context:
            scores.append(context_score(length, last, totals_at(length, by_context[length], cut)))
        elif length <= last:
            scores.append(no_context_score(length, last, f"not measured: {length} tokens hold no context for {last}"))
        elif length in too_long or length == whole:
            scores.append(no_context_score(length, last, f"failed: memory does not suffice for {length} tokens"))
        else:
            scores.append(
                no_context_score(length, last, f"not measured: the longest document has {cut.longest} tokens")
            )
    return scores
