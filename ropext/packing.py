"""Whole documents packed into rows of one length, with attention kept inside each document.

Transformers begins a new document wherever positions do not go up by exactly one. The documents of a row therefore
take its positions from the end: the first gets the highest, the next those below it. Each border is then a jump down,
each row trains every position up to its length - 1, and no loss changes, since rotary scores depend on distances only.
Shapes: P pieces (documents, or what windows leave of them), R rows, T tokens in a row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropext.errors import RopextError
from ropext.feed import UNSCORED, Batch, row_numbers
from ropext.pack import Corpus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """A feed of rows of several documents each."""

    length: int  # tokens in a row, the BOS of each piece and padding included
    corpus: Corpus
    starts: NDArray[np.int64]  # `[P]`, places in corpus.tokens, row after row
    sizes: NDArray[np.int64]  # `[P]`, tokens without a BOS
    bounds: NDArray[np.int64]  # `[R + 1]`: row r holds the pieces bounds[r] .. bounds[r + 1] - 1
    documents: int  # that are in the rows, whole or cut
    scored: int  # tokens of an epoch that a loss is taken of

    packed, skips = True, False

    @property
    def supply(self) -> int:
        """Rows."""
        return len(self.bounds) - 1

    @property
    def padding(self) -> float:
        """Of all tokens, between 0 and 1."""
        return 1 - float(self._whole.sum()) / max(1, self.supply * self.length)

    @property
    def skipped(self) -> int:
        """Documents with nothing to predict: empty, or conversations without an answer before `length`."""
        return len(self.corpus.ends) - self.documents

    @property
    def share_long_enough(self) -> float:
        """Of the documents, between 0 and 1."""
        return float((self.corpus.sizes + self._head >= self.length).mean())

    @property
    def largest_position(self) -> int:
        """Each row reaches it."""
        return self.length - 1

    @property
    def largest_distance(self) -> int:
        """Inside the longest piece."""
        return int(self._whole.max(initial=1)) - 1

    @property
    def sha256(self) -> str:
        """Identity of the rows: hex digest of their tokens and of what lies where."""
        return self.corpus.digest(f"packed {self.length}", self.starts, self.sizes, self.bounds)

    def batch(self, *, seed: int, stage: int, step: int, size: int) -> Batch:
        """The rows of one optimizer step, the same whenever it is asked for."""
        import numpy as np

        rows = [self._row(n) for n in row_numbers(self.supply, seed=seed, stage=stage, step=step, size=size)]
        ids, labels, positions = (np.stack(column) for column in zip(*rows, strict=True))
        return Batch(ids=ids, labels=labels, positions=positions, packed=True)

    def described(self) -> str:
        """The rows, what they are made of and how far a token sees back in them, for one line."""
        return (
            f"{self.supply} rows of {self.length} tokens ({self.padding:.1%} padding, {self.scored} tokens with loss), "
            f"packed from {self.documents} of {len(self.corpus.ends)} documents, the longest piece "
            f"{self.largest_distance + 1} tokens"
        )

    @property
    def _head(self) -> int:
        return int(self.corpus.bos is not None)

    @property
    def _whole(self) -> NDArray[np.int64]:
        """Tokens of each piece, its BOS counted."""
        return self.sizes + self._head

    def _row(self, number: int) -> tuple[NDArray[np.int64], ...]:
        """Ids, labels and positions of a row. What is left over is a last document of its own, without a label."""
        import numpy as np

        own = slice(self.bounds[number], self.bounds[number + 1])
        pieces = [self.corpus.piece(*piece) for piece in zip(self.starts[own], self.sizes[own], strict=True)]
        left = self.length - sum(len(ids) for ids, _ in pieces)
        pieces.append((np.zeros(left, np.int64), np.full(left, UNSCORED, np.int64)))
        ends = self.length - np.cumsum([0, *(len(ids) for ids, _ in pieces)])
        positions = [np.arange(begin, end) for end, begin in zip(ends[:-1], ends[1:], strict=True)]
        return (
            np.concatenate([ids for ids, _ in pieces]),
            np.concatenate([labels for _, labels in pieces]),
            np.concatenate(positions),
        )


def pack(corpus: Corpus, length: int) -> Packed:
    """Documents that fit go whole into rows; longer texts are cut into windows, and what is left of them is packed too.

    A conversation that is too long is cut at its end, and left out where no answer is left of it.
    """
    import numpy as np

    head = int(corpus.bos is not None)
    body = length - head
    if body < 1:
        raise RopextError(f"a row holds at least one token of a document: found rows of {length} tokens")
    owners, starts, sizes = [], [], []
    for number, (end, size) in enumerate(zip(corpus.ends.tolist(), corpus.sizes.tolist(), strict=True)):
        begin, last = end - size, end if corpus.answers is None else min(end, end - size + body)
        for start in range(begin, last, body):
            owners.append(number)
            starts.append(start)
            sizes.append(min(body, last - start))
    labels = _labels(corpus, np.asarray(starts, np.int64), np.asarray(sizes, np.int64))
    useful = np.flatnonzero(labels)
    rows = _fill([sizes[piece] + head for piece in useful], length)
    order = useful[[piece for row in rows for piece in row]] if rows else useful
    return Packed(
        length=length,
        corpus=corpus,
        starts=np.asarray(starts, np.int64)[order],
        sizes=np.asarray(sizes, np.int64)[order],
        bounds=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        documents=len({owners[piece] for piece in useful}),
        scored=int(labels.sum()),
    )


def _labels(corpus: Corpus, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens of each piece are predicted: its first never is, a BOS being that where there is one."""
    import numpy as np

    firsts = starts + (corpus.bos is None)
    if corpus.answers is None:
        return starts + sizes - firsts
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(corpus.answers, dtype=np.int64)])
    found: NDArray[np.int64] = before[starts + sizes] - before[np.minimum(firsts, starts + sizes)]
    return found


def _fill(sizes: list[int], length: int) -> list[list[int]]:
    """Which pieces go into each row: the longest first, each where it leaves the least room (best fit decreasing)."""
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by the room that is left in them
    rooms: list[int] = []  # its keys, sorted
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        at = bisect_left(rooms, sizes[piece])
        if at == len(rooms):
            rows.append([])
            number, room = len(rows) - 1, length
        else:
            room = rooms[at]
            number = open_rows[room].pop()
            if not open_rows[room]:
                del rooms[at]
        rows[number].append(piece)
        if left := room - sizes[piece]:
            if not open_rows.setdefault(left, []):
                insort(rooms, left)
            open_rows[left].append(number)
    return rows
