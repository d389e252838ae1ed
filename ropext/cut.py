"""Documents cut for scoring: consecutive windows, or windows that slide over each document.

Shapes: N rows, W tokens in the longest (BOS counted), K lengths. Lengths and positions are in tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ropext.errors import UsageError
from ropext.pack import bos_of, encode
from ropext.texts import Document

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pass:
    """Rows to run through the model once, and the lengths whose scores are read from them."""

    lengths: tuple[int, ...]
    rows: Sequence[NDArray[np.int32]]  # N token sequences, the longer ones first
    owners: NDArray[np.int32]  # `[N]`: which document a row is from
    first: NDArray[np.int64]  # `[N]`: the first scored position of a row; those before it are context


class Cut(Protocol):
    """Documents cut by one definition of perplexity."""

    @property
    def documents(self) -> tuple[str, ...]:
        """sha256 of each document that is scored."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document seen, BOS counted."""

    @property
    def bos(self) -> bool:
        """Whether each text starts with one BOS."""

    @property
    def data_hash(self) -> str:
        """Identity of the scored text: sha256 over the documents' digests, in order."""

    def passes(self, lengths: Sequence[int], *, together: bool) -> list[Pass]:
        """What to run for the lengths that can be measured; `together`: one pass may serve several lengths."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Windows:
    """Consecutive whole windows of one length: the `truncated` definition (DESIGN.md)."""

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
        return _hash(self.documents)

    def passes(self, lengths: Sequence[int], *, together: bool) -> list[Pass]:
        """One pass over whole windows for all lengths, or one a length over the beginnings of the windows."""
        import numpy as np

        measured = tuple(length for length in lengths if length <= self.length)
        groups = [measured] if together else [(length,) for length in measured]
        first = np.ones(len(self.ids), dtype=np.int64)  # position 0 is not predicted
        return [
            Pass(lengths=group, rows=list(self.ids[:, : max(group)]), owners=self.owners, first=first)
            for group in groups
            if group
        ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slides:
    """Whole documents under a window that moves by `stride` (Press et al. 2022, arXiv:2108.12409, appendix B)."""

    texts: tuple[NDArray[np.int32], ...]  # tokens of each document, its one BOS included
    documents: tuple[str, ...]  # sha256 of each of them
    longest: int  # tokens of the longest document seen, BOS counted
    bos: bool
    stride: int  # tokens
    limit: int | None  # documents scored at a length, at most

    @property
    def data_hash(self) -> str:
        """Identity of the scored text: sha256 over the documents' digests, in order."""
        return _hash(self.documents)

    def passes(self, lengths: Sequence[int], *, together: bool) -> list[Pass]:
        """One pass a length: with other windows the same token has another context."""
        return [self._at(length) for length in lengths if length <= self.longest]

    def _at(self, length: int) -> Pass:
        import numpy as np

        long_enough = [number for number, text in enumerate(self.texts) if len(text) >= length][: self.limit]
        found = [
            (self.texts[number][start : start + length], number, first)
            for number in long_enough
            for start, first in _places(len(self.texts[number]), length, self.stride)
        ]
        found.sort(key=lambda row: -len(row[0]))  # stable: whole windows in order, then the shorter last ones
        return Pass(
            lengths=(length,),
            rows=[row for row, _, _ in found],
            owners=np.asarray([owner for _, owner, _ in found], dtype=np.int32),
            first=np.asarray([first for _, _, first in found], dtype=np.int64),
        )


def _places(size: int, length: int, stride: int) -> Iterator[tuple[int, int]]:
    """Start of each window over `size` tokens and its first scored position: a token counts in the first window that
    holds it, unless it opens that window and so has no context."""
    scored, start = 0, 0
    while scored < size:
        yield start, max(1, scored - start)
        scored = min(start + length, size)
        start += stride


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


def slide_windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    lengths: Sequence[int],
    stride: int,
    limit: int | None = None,
) -> Slides:
    """The documents of at least the shortest asked length, whole; `limit` bounds how many are scored at each length.

    Raises UsageError for a stride that would leave tokens out: it lies between 1 and the shortest length.
    """
    import numpy as np

    _check_request(lengths, limit)
    if not 1 <= stride <= min(lengths):
        raise UsageError(f"a stride lies between 1 and the shortest length, {min(lengths)}: found {stride}")
    bos = bos_of(tokenizer)
    kept: list[tuple[str, NDArray[np.int32]]] = []
    longest = 0
    for document in documents:
        tokens = encode(tokenizer, document.text, bos)
        whole = tokens if bos is None else np.insert(tokens, 0, bos)
        longest = max(longest, len(whole))
        if len(whole) >= min(lengths):
            kept.append((document.sha256, whole))
        if limit is not None and sum(len(text) >= max(lengths) for _, text in kept) >= limit:
            break
    return Slides(
        texts=tuple(text for _, text in kept),
        documents=tuple(digest for digest, _ in kept),
        longest=longest,
        bos=bos is not None,
        stride=stride,
        limit=limit,
    )


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


def _hash(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _check_request(lengths: Sequence[int], limit: int | None) -> None:
    """Raises UsageError for lengths or a number of documents that nothing can be scored with."""
    if not lengths or min(lengths) < 2:
        raise UsageError(f"a length to score at has at least 2 tokens, one to predict: found {list(lengths)}")
    if limit is not None and limit < 1:
        raise UsageError(f"the number of documents to score is at least 1: found {limit}")
