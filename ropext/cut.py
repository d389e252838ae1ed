"""Documents cut for scoring: consecutive windows, or windows that slide over each document.

Shapes: N rows, W tokens in the longest (BOS counted). Lengths and positions are in tokens, sizes of tokens in bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ropext.errors import UsageError
from ropext.pack import bos_of, encode_sized
from ropext.texts import Document

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


FIRST = "first "  # begins the name of a pass over the beginnings of windows; their length follows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pass:
    """Rows to run through the model once, and the lengths whose scores are read from them."""

    name: str  # unique among the passes over one cut
    lengths: tuple[int, ...]
    rows: Sequence[NDArray[np.int32]]  # N token sequences, the longer ones first
    sizes: Sequence[NDArray[np.int32]] | None  # bytes of text of each of their tokens; None where it cannot be told
    owners: NDArray[np.int32]  # `[N]`: which document a row is from
    first: NDArray[np.int64]  # `[N]`: the first scored position of a row; those before it are context

    def shorter(self, length: int) -> Pass:
        """The beginnings of the rows, for those of its lengths that are not beyond `length`."""
        return replace(
            self,
            name=f"{FIRST}{length}",
            lengths=tuple(one for one in self.lengths if one <= length),
            rows=[row[:length] for row in self.rows],
            sizes=None if self.sizes is None else [row[:length] for row in self.sizes],
        )


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

    @property
    def tokens_hash(self) -> str:
        """Identity of the scored tokens and of how they are cut: hex sha256."""

    def passes(self, lengths: Sequence[int], *, together: bool) -> list[Pass]:
        """What to run for the lengths that can be measured; `together`: one pass may serve several lengths."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Windows:
    """Consecutive whole windows of one length: the `truncated` definition (DESIGN.md)."""

    ids: NDArray[np.int32]  # tokens `[N, W]`
    sizes: NDArray[np.int32] | None  # bytes of text `[N, W]`
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

    @property
    def tokens_hash(self) -> str:
        """Identity of the windows: hex sha256."""
        return hashlib.sha256(f"windows {self.ids.shape} {self.bos} ".encode() + self.ids.tobytes()).hexdigest()

    def passes(self, lengths: Sequence[int], *, together: bool) -> list[Pass]:
        """One pass over whole windows for all lengths, or one a length over the beginnings of the windows."""
        import numpy as np

        measured = tuple(length for length in lengths if length <= self.length)
        groups = [measured] if together else [(length,) for length in measured]
        first = np.ones(len(self.ids), dtype=np.int64)  # position 0 is not predicted
        return [
            Pass(
                name=f"{FIRST}{max(group)}",
                lengths=group,
                rows=list(self.ids[:, : max(group)]),
                sizes=None if self.sizes is None else list(self.sizes[:, : max(group)]),
                owners=self.owners,
                first=first,
            )
            for group in groups
            if group
        ]

    def context_passes(self, lengths: Sequence[int], last: int) -> list[Pass]:
        """One pass a length over the ends of the windows, where only the `last` tokens count: the same for each length.

        A length that leaves no context for the first of them gives no pass.
        """
        import numpy as np

        return [
            Pass(
                name=f"last {last} of {length}",
                lengths=(length,),
                rows=list(self._ends(length)),
                sizes=None,
                owners=self.owners,
                first=np.full(len(self.ids), length - last, dtype=np.int64),
            )
            for length in lengths
            if last < length <= self.length
        ]

    def _ends(self, length: int) -> NDArray[np.int32]:
        """The last tokens of each window, begun with the window's own BOS where there is one: `[N, length]`."""
        ends = self.ids[:, self.length - length :].copy()
        if self.bos:
            ends[:, 0] = self.ids[:, 0]
        return ends


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slides:
    """Whole documents under a window that moves by `stride` (Press et al. 2022, arXiv:2108.12409, appendix B)."""

    texts: tuple[NDArray[np.int32], ...]  # tokens of each document, its one BOS included
    sizes: tuple[NDArray[np.int32], ...] | None  # bytes of text of each of them
    documents: tuple[str, ...]  # sha256 of each of them
    longest: int  # tokens of the longest document seen, BOS counted
    bos: bool
    stride: int  # tokens
    limit: int | None  # documents scored at a length, at most

    @property
    def data_hash(self) -> str:
        """Identity of the scored text: sha256 over the documents' digests, in order."""
        return _hash(self.documents)

    @property
    def tokens_hash(self) -> str:
        """Identity of the texts and of how the window slides: hex sha256."""
        digest = hashlib.sha256(f"slides {self.stride} {self.limit} {self.bos} ".encode())
        for text in self.texts:
            digest.update(f"{len(text)} ".encode() + text.tobytes())
        return digest.hexdigest()

    def passes(self, lengths: Sequence[int], *, together: bool) -> list[Pass]:
        """One pass a length: with other windows the same token has another context."""
        return [self._at(length) for length in lengths if length <= self.longest]

    def _at(self, length: int) -> Pass:
        import numpy as np

        long_enough = [number for number, text in enumerate(self.texts) if len(text) >= length][: self.limit]
        found = [
            (number, slice(start, start + length), first)
            for number in long_enough
            for start, first in _places(len(self.texts[number]), length, self.stride)
        ]
        found.sort(
            key=lambda row: -len(self.texts[row[0]][row[1]])
        )  # stable: whole windows, then the shorter last ones
        return Pass(
            name=f"slide {length}",
            lengths=(length,),
            rows=[self.texts[number][place] for number, place, _ in found],
            sizes=None if self.sizes is None else [self.sizes[number][place] for number, place, _ in found],
            owners=np.asarray([number for number, _, _ in found], dtype=np.int32),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much text is scored, at most."""

    documents: int | None = None
    tokens: int | None = None  # in windows, over all documents

    def windows(self, length: int) -> int | None:
        """How many whole windows of this length may be scored."""
        return None if self.tokens is None or length == 0 else self.tokens // length

    def __post_init__(self) -> None:
        for name in ("documents", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"the number of {name} to score is at least 1: found {value}")


EVERYTHING = Limits()


def cut_windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    lengths: Sequence[int],
    limits: Limits = EVERYTHING,
) -> Windows:
    """Consecutive whole windows of the longest asked length that some document reaches.

    Documents give windows in their order, within `limits`; no more are read once those are found at the longest asked
    length. Only the tokens of documents that may still give a window are kept.
    """
    _check_lengths(lengths, limits)
    bos = bos_of(tokenizer)
    opening = 0 if bos is None else 1
    longest, window = 0, 0
    kept: list[_Encoded] = []
    for document in documents:
        text = _Encoded.of(tokenizer, document, bos, limits.tokens)
        size = len(text.tokens) + opening
        longest = max(longest, size)
        reached = max((length for length in lengths if length <= size), default=0)
        if reached > window:
            window, kept = reached, []
        if window and reached == window and not _full(kept, limits, window, bos):
            kept.append(text)
        if window == max(lengths) and _full(kept, limits, window, bos):
            break
    return _cut(kept, window, bos, longest, limits)


def slide_windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    lengths: Sequence[int],
    stride: int,
    limits: Limits = EVERYTHING,
) -> Slides:
    """The documents of at least the shortest asked length, whole; `limits` bound what is scored at each length.

    Raises UsageError for a stride that would leave tokens out: it lies between 1 and the shortest length.
    """

    _check_lengths(lengths, limits)
    if not 1 <= stride <= min(lengths):
        raise UsageError(f"a stride lies between 1 and the shortest length, {min(lengths)}: found {stride}")
    bos = bos_of(tokenizer)
    kept: list[_Encoded] = []
    longest, room = 0, limits.tokens
    for document in documents:
        text = _Encoded.of(tokenizer, document, bos, room)
        whole = text if bos is None else text.opened(bos)
        longest = max(longest, len(whole.tokens))
        if len(whole.tokens) >= min(lengths):
            kept.append(whole)
            room = None if room is None else room - len(whole.tokens)
        long_enough = sum(len(text.tokens) >= max(lengths) for text in kept)
        if room is not None and room < min(lengths) or limits.documents is not None and long_enough >= limits.documents:
            break
    return Slides(
        texts=tuple(text.tokens for text in kept),
        sizes=_all([text.sizes for text in kept]),
        documents=tuple(text.sha256 for text in kept),
        longest=longest,
        bos=bos is not None,
        stride=stride,
        limit=limits.documents,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Encoded:
    """One document as tokens."""

    sha256: str
    tokens: NDArray[np.int32]
    sizes: NDArray[np.int32] | None  # bytes of text of each token

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, document: Document, bos: int | None, most: int | None = None
    ) -> _Encoded:
        """Without its BOS; of a document beyond `most` tokens the beginning."""
        tokens, sizes = encode_sized(tokenizer, document, bos, most)
        return cls(sha256=document.sha256, tokens=tokens, sizes=sizes)

    def opened(self, bos: int) -> _Encoded:
        """With its BOS, which stands for no byte of the text."""
        import numpy as np

        sizes = None if self.sizes is None else np.insert(self.sizes, 0, 0)
        return replace(self, tokens=np.insert(self.tokens, 0, bos), sizes=sizes)

    def windows(self, room: int, most: int | None) -> int:
        """How many windows of `room` tokens it gives, at most `most`."""
        found = len(self.tokens) // room
        return found if most is None else min(found, most)


def _cut(kept: Sequence[_Encoded], window: int, bos: int | None, longest: int, limits: Limits) -> Windows:
    """The windows of the documents that are kept; remainders are dropped."""
    import numpy as np

    room = window if bos is None else window - 1
    left = limits.windows(window)
    counts = []
    for text in kept:
        counts.append(text.windows(room, left))
        left = None if left is None else left - counts[-1]
    pairs = [(text, count) for text, count in zip(kept, counts, strict=True) if count]
    rows = [text.tokens[: count * room].reshape(count, room) for text, count in pairs]
    sizes = _all(
        [None if text.sizes is None else text.sizes[: count * room].reshape(count, room) for text, count in pairs]
    )
    ids = np.concatenate(rows) if rows else np.zeros((0, 0), dtype=np.int32)
    widths = np.concatenate(sizes) if sizes else None
    if bos is not None and rows:
        ids = np.insert(ids, 0, bos, axis=1)
        widths = None if widths is None else np.insert(widths, 0, 0, axis=1)
    return Windows(
        ids=ids,
        sizes=widths,
        owners=np.repeat(np.arange(len(pairs), dtype=np.int32), [count for _, count in pairs]),
        documents=tuple(text.sha256 for text, _ in pairs),
        longest=longest,
        bos=bos is not None,
    )


def _full(kept: Sequence[_Encoded], limits: Limits, window: int, bos: int | None) -> bool:
    """Whether the documents that are kept already give all that may be scored in windows of this length."""
    room = window if bos is None else window - 1
    most = limits.windows(window)
    enough = most is not None and sum(text.windows(room, None) for text in kept) >= most
    return enough or limits.documents is not None and len(kept) >= limits.documents


def _all(parts: Sequence[NDArray[np.int32] | None]) -> tuple[NDArray[np.int32], ...] | None:
    """All of them, or None where one is missing."""
    found = tuple(part for part in parts if part is not None)
    return found if len(found) == len(parts) else None


def _hash(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _check_lengths(lengths: Sequence[int], limits: Limits) -> None:
    """Raises UsageError for lengths that nothing can be scored with."""
    if not lengths or min(lengths) < 2:
        raise UsageError(f"a length to score at has at least 2 tokens, one to predict: found {list(lengths)}")
    if limits.tokens is not None and limits.tokens < max(lengths):
        raise UsageError(f"--tokens holds at least one window of {max(lengths)} tokens: found {limits.tokens}")
