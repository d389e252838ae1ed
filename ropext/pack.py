"""Documents as tokens, and windows of one exact length that are cut from them.

A window is cut from one document, so no token sees another document and positions run from 0 to length - 1 without a
reset. Shapes: N tokens of all documents, W windows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ropext.errors import Refused, RopextError
from ropext.feed import UNSCORED, Batch, Feed, row_numbers
from ropext.lengths import format_length
from ropext.schedule import Stage
from ropext.texts import Document

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

MOST_EPOCHS = 4  # up to four passes are nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus:
    """The token ids of all documents, end to end, and where each document ends."""

    tokens: NDArray[np.int32]  # `[N]`, without any special token that a tokenizer adds
    ends: NDArray[np.int64]  # of each document, in tokens
    bos: int | None  # begins each window, where the tokenizer's convention has one
    answers: NDArray[np.bool_] | None = None  # `[N]`, of conversations: the tokens that are to be predicted

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        import numpy as np

        return np.diff(self.ends, prepend=0)

    def windows(self, length: int) -> Windows:
        """Consecutive whole windows of each document; a remainder, or a shorter document, gives none."""
        import numpy as np

        assert self.answers is None, "a conversation is packed, so that it is never cut in its middle"
        body = length - (self.bos is not None)
        counts = self.sizes // body if body > 0 else np.zeros_like(self.ends)
        starts = [begin + body * np.arange(count) for begin, count in zip(self.ends - self.sizes, counts, strict=True)]
        return Windows(
            length=length,
            corpus=self,
            starts=np.concatenate(starts).astype(np.int64),
            documents=int((counts > 0).sum()),
        )

    def piece(self, start: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """So many tokens from a place on, after a BOS where there is one: ids, and the labels of all but the first."""
        import numpy as np

        body = slice(start, start + size)
        head = np.asarray([] if self.bos is None else [self.bos], np.int64)
        ids = np.concatenate([head, self.tokens[body]])
        labels = ids.copy()
        if self.answers is not None:
            labels[len(head) :][~self.answers[body]] = UNSCORED
        labels[:1] = UNSCORED
        return ids, labels

    def without_ends(self, cuts: Mapping[int, int]) -> Corpus:
        """The corpus with so many tokens less at the end of each of these documents, by their number."""
        import numpy as np

        kept = np.ones(len(self.tokens), np.bool_)
        for number, size in cuts.items():
            kept[self.ends[number] - size : self.ends[number]] = False
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept, dtype=np.int64)])
        return replace(
            self,
            tokens=self.tokens[kept],
            ends=before[self.ends],
            answers=None if self.answers is None else self.answers[kept],
        )

    def digest(self, rows: str, *arrays: NDArray[np.int64]) -> str:
        """Identity of what is cut from these tokens: hex sha256."""
        found = hashlib.sha256(f"{rows} {self.bos} ".encode())
        for array in (self.tokens, *arrays, *(() if self.answers is None else (self.answers,))):
            found.update(array.tobytes())
        return found.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Windows:
    """Every distinct window of one length: a feed of rows that are one piece of a document each."""

    length: int  # tokens, the BOS included
    corpus: Corpus
    starts: NDArray[np.int64]  # `[W]`, places in corpus.tokens
    documents: int  # that are long enough to give a window

    packed = skips = False

    @property
    def supply(self) -> int:
        """Distinct windows."""
        return len(self.starts)

    @property
    def share_long_enough(self) -> float:
        """Of the documents, between 0 and 1."""
        return self.documents / len(self.corpus.ends)

    @property
    def largest_position(self) -> int:
        """The largest position that training on these windows reaches."""
        return self.length - 1

    @property
    def largest_distance(self) -> int:
        """From the last token of a window to its first."""
        return self.length - 1

    @property
    def sha256(self) -> str:
        """Identity of the windows, whatever files they came from: hex digest of their tokens and bounds."""
        return self.corpus.digest(str(self.length), self.starts)

    def batch(self, *, seed: int, stage: int, step: int, size: int) -> Batch:
        """The windows of one optimizer step, the same whenever it is asked for: B = `size`."""
        import numpy as np

        numbers = row_numbers(self.supply, seed=seed, stage=stage, step=step, size=size)
        body = self.length - (self.corpus.bos is not None)
        ids, labels = zip(*(self.corpus.piece(start, body) for start in self.starts[numbers]), strict=True)
        return Batch(ids=np.stack(ids), labels=np.stack(labels))

    def described(self) -> str:
        """The windows, for one line."""
        return (
            f"{self.supply} windows of {self.length} tokens, in {self.documents} of {len(self.corpus.ends)} documents"
        )


def bos_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS that the tokenizer's own convention puts before a text, or None where it puts none."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str | Document, bos: int | None, most: int | None = None
) -> NDArray[np.int32]:
    """Token ids of a text, without special ones added: `[N]`. A BOS that the text begins with is left out.

    A document is read and encoded a piece at a time, no further than the first `most` tokens ask for. One that has
    several pieces is encoded as several texts: its tokens may differ where a piece begins.
    """
    return _encode(tokenizer, text, bos, most, sized=False)[0]


def encode_sized(
    tokenizer: PreTrainedTokenizerBase, text: str | Document, bos: int | None, most: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
    """What `encode` gives, and how many UTF-8 bytes of the text each token stands for: two arrays `[N]`.

    A token reaches from the end of the one before it to its own end, so what a tokenizer drops (white space) counts for
    the token after it, and of several tokens of one character the first counts it whole. No sizes from a tokenizer that
    does not tell where its tokens end (a slow one).
    """
    import numpy as np

    tokens, ends = _encode(tokenizer, text, bos, most, sized=tokenizer.is_fast)
    return tokens, None if ends is None else np.diff(ends).astype(np.int32)


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str | Document, bos: int | None, most: int | None, *, sized: bool
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
    """Tokens `[N]` and, if `sized`, the byte where the first begins and each ends `[N + 1]`."""
    import numpy as np

    ids, ends, begin = [], [np.zeros(1, np.int64)], 0
    for piece in [text] if isinstance(text, str) else text.pieces():
        # verbose=False: the warning about texts beyond model_max_length does not apply, since windows are cut
        found = tokenizer(
            piece, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=sized
        )
        ids.append(np.asarray(found["input_ids"], dtype=np.int32))
        if sized:
            characters = np.fromiter((end for _, end in found["offset_mapping"]), np.int64, len(ids[-1]))
            bytes_before = _bytes_before(piece)
            ends.append(begin + bytes_before[characters])
            begin += int(bytes_before[-1])
        if most is not None and sum(map(len, ids)) > most:  # not at `most`: one may be a BOS
            break
    tokens = np.concatenate(ids)
    first = int(bos is not None and tokens[:1].tolist() == [bos])
    stop = len(tokens) if most is None else first + most
    reached = np.maximum.accumulate(np.concatenate(ends))[first : stop + 1] if sized else None
    return tokens[first:stop], reached


def _bytes_before(text: str) -> NDArray[np.int64]:
    """UTF-8 bytes before each character of a text, and in all."""
    import numpy as np

    if text.isascii():
        return np.arange(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + sum((points >= bound).astype(np.int8) for bound in (0x80, 0x800, 0x10000))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(widths, dtype=np.int64)])


def tokenize(tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document]) -> Corpus:
    """All documents as tokens, each text encoded once. Raises RopextError where there is no document."""
    import numpy as np

    bos = bos_of(tokenizer)
    ids = [encode(tokenizer, document, bos) for document in documents]
    if not ids:
        raise RopextError("training needs at least one document: found none; check what --data names")
    ends = np.cumsum([len(tokens) for tokens in ids], dtype=np.int64)
    return Corpus(tokens=np.concatenate(ids), ends=ends, bos=bos)


def check_supply(feeds: Sequence[Feed], stages: Sequence[Stage]) -> None:
    """Raises Refused unless each stage has enough distinct rows to repeat none more than `MOST_EPOCHS` times."""
    for feed, stage in zip(feeds, stages, strict=True):
        needed = stage.steps * stage.batch
        if feed.supply * MOST_EPOCHS < needed:
            length = format_length(stage.length)
            raise Refused(
                f"the {length} stage needs {-(-needed // MOST_EPOCHS)} distinct windows of {feed.length} tokens "
                f"({needed} in all, each at most {MOST_EPOCHS} times): found {feed.described()}; give more long "
                f"documents with --data, lower --tokens-per-stage or --steps-per-stage, or leave {length} out of "
                "--schedule"
            )
