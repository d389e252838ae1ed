"""What a run trains on and what it is judged by: the text that was named, as a feed for each stage and held-out text.

Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ropext.chat import Conversation, read_conversations, tokenize_conversations
from ropext.errors import UsageError
from ropext.feed import Feed
from ropext.held_out import HeldOut
from ropext.mixture import mix
from ropext.pack import Corpus, tokenize
from ropext.packing import pack
from ropext.pose import Posed
from ropext.schedule import Stage
from ropext.texts import Document, built_in, read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = TypeVar("Text", Document, Conversation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """The text that was named, and how it is laid out. Raises UsageError where that contradicts itself."""

    data: str | None  # None for the built-in corpus
    text_field: str = "text"
    chat: bool = False  # rows of messages, with a loss on the answers only
    packed: bool = False  # short documents share rows
    skips: bool = False  # positions are skipped in rows of the native length (PoSE)
    short_data: str | None = None  # text that keeps short-context skill, always packed
    short_share: float = 0.4  # of the rows, where there is such text
    held_out: str | None = None  # None for the ends of some documents of `data`

    def __post_init__(self) -> None:
        if self.chat and (self.data is None or Path(self.data).suffix.lower() != ".jsonl"):
            raise UsageError(f"--chat reads conversations from a .jsonl file: found {self.data or 'no --data'}")
        if self.skips and (self.chat or self.packed or self.short_data):
            raise UsageError("--pose skips positions in whole windows: leave out --chat, --pack and --short-data")
        if not 0 < self.short_share < 1:
            raise UsageError(f"--short-share lies between 0 and 1: found {self.short_share:g}")

    @property
    def name(self) -> str:
        """In words, for ropext.json."""
        main = self.data or "the built-in corpus, training split"
        return f"{main}, and {self.short_data} as {self.short_share:.0%} of the rows" if self.short_data else main

    def read(self, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]) -> Prepared:
        """All of it as tokens, and held-out text for scores at these lengths."""
        digests: list[str] = []
        if self.chat:
            assert self.data is not None
            corpus = tokenize_conversations(tokenizer, _noted(read_conversations(Path(self.data)), digests))
        else:
            documents = built_in("training") if self.data is None else read_documents(self.data, self.text_field)
            corpus = tokenize(tokenizer, _noted(documents, digests))
        if self.held_out is not None:
            held_out = HeldOut.of(tokenizer, read_documents(self.held_out, self.text_field), lengths)
        elif self.data is None:
            held_out = HeldOut.of(tokenizer, built_in("held-out"), lengths)
        elif self.chat:  # an answer is no window of text
            held_out = HeldOut.of(tokenizer, (), lengths)
        else:
            corpus, held_out = HeldOut.cut_from(corpus, lengths)
        short = None
        if self.short_data is not None:
            short = tokenize(tokenizer, _noted(read_documents(self.short_data, self.text_field), digests))
        return Prepared(
            material=self,
            corpus=corpus,
            short=short,
            documents=tuple(digests),
            held_out=held_out,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """Tokens of everything that a run needs."""

    material: Material
    corpus: Corpus
    short: Corpus | None
    documents: tuple[str, ...]  # sha256 of all that is trained on
    held_out: HeldOut

    def feed(self, stage: Stage) -> Feed:
        """The rows of a stage."""
        material = self.material
        if material.skips:
            windows = self.corpus.windows(stage.row)
            return windows if stage.row == stage.length else Posed(windows=windows, target=stage.length)
        whole = pack(self.corpus, stage.row) if material.packed or material.chat else self.corpus.windows(stage.row)
        if self.short is None:
            return whole
        return mix([(whole, 1 - material.short_share), (pack(self.short, stage.row), material.short_share)])


def _noted(texts: Iterable[Text], digests: list[str]) -> Iterator[Text]:
    """Passes texts on and keeps their digests."""
    for text in texts:
        digests.append(text.sha256)
        yield text
