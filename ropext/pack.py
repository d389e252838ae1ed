"""Documents -> windows of one exact length, and the windows of each optimizer step.

A window is cut from one document, so no token sees another document and positions run from 0 to length - 1 without a
reset. Shapes: N tokens of all documents, W windows, B windows in a step, T tokens in a window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropext.errors import Refused, RopextError
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

    def windows(self, length: int) -> Windows:
        """Consecutive whole windows of each document; a remainder, or a shorter document, gives none."""
        import numpy as np

        body = length - (self.bos is not None)
        begins = np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])
        counts = (self.ends - begins) // body if body > 0 else np.zeros_like(begins)
        starts = [begin + body * np.arange(count) for begin, count in zip(begins, counts, strict=True)]
        return Windows(
            length=length,
            corpus=self,
            starts=np.concatenate(starts).astype(np.int64),
            documents=int((counts > 0).sum()),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Windows:
    """Every distinct window of one length."""

    length: int  # tokens, the BOS included
    corpus: Corpus
    starts: NDArray[np.int64]  # `[W]`, places in corpus.tokens
    documents: int  # that are long enough to give a window

    @property
    def share_long_enough(self) -> float:
        """Of the documents, between 0 and 1."""
        return self.documents / len(self.corpus.ends)

    @property
    def largest_position(self) -> int:
        """The largest position that training on these windows reaches."""
        return self.length - 1

    @property
    def sha256(self) -> str:
        """Identity of the windows, whatever files they came from: hex digest of their tokens and bounds."""
        digest = hashlib.sha256(f"{self.length} {self.corpus.bos} ".encode())
        for array in (self.corpus.tokens, self.starts):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def batch(self, *, seed: int, stage: int, step: int, size: int) -> NDArray[np.int64]:
        """The windows of one optimizer step, the same whenever it is asked for: `[B, T]`.

        Each epoch is a permutation of all windows that depends on the seed, the number of the stage and of the epoch.
        """
        import numpy as np

        places = range(step * size, (step + 1) * size)
        orders = {
            epoch: np.random.default_rng((seed, stage, epoch)).permutation(len(self.starts))
            for epoch in {place // len(self.starts) for place in places}
        }
        numbers = [orders[place // len(self.starts)][place % len(self.starts)] for place in places]
        head = [] if self.corpus.bos is None else [self.corpus.bos]
        body = self.length - len(head)
        rows = [self.corpus.tokens[start : start + body] for start in self.starts[numbers]]
        return np.stack([np.concatenate([np.asarray(head, np.int64), row]) for row in rows])


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


def check_supply(windows: Sequence[Windows], stages: Sequence[Stage]) -> None:
    """Raises Refused unless each stage has enough distinct windows to repeat none more than `MOST_EPOCHS` times."""
    for found, stage in zip(windows, stages, strict=True):
        needed = stage.steps * stage.batch
        if len(found.starts) * MOST_EPOCHS < needed:
            length = format_length(stage.length)
            raise Refused(
                f"the {length} stage needs {-(-needed // MOST_EPOCHS)} distinct windows of {stage.length} tokens "
                f"({needed} in all, each at most {MOST_EPOCHS} times): found {len(found.starts)}, in "
                f"{found.documents} of {len(found.corpus.ends)} documents; give more long documents with --data, lower "
                f"--tokens-per-stage or --steps-per-stage, or leave {length} out of --schedule"
            )
