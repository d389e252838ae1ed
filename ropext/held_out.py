"""Loss on text that is not trained on, at every length of a schedule: what each stage gained and cost.

Shapes: N windows of W tokens (BOS counted), the same for all lengths, as the `truncated` definition cuts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropext.cut import Limits, Windows, cut_windows
from ropext.load import refresh_rotary
from ropext.pack import Corpus
from ropext.process import Team
from ropext.score import has_changing_table
from ropext.texts import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOWS = 4  # of the longest length: enough to see a change of one model, too few to compare two
OCTAVES = [2**power for power in range(8, 25)]  # positions
SHARE = 0.05  # of the text, at most, is held out where no other is named


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Mean losses of one model, in nats per token."""

    by_length: Mapping[int, float]
    by_position: Mapping[str, float]  # of the longest windows, by where the token is predicted from, an octave each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """Windows of held-out text, and the lengths to score them at."""

    windows: Windows
    lengths: tuple[int, ...]  # that the windows hold

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], lengths: Sequence[int]) -> HeldOut:
        """The first windows of the longest length that some document reaches."""
        windows = cut_windows(tokenizer, documents, lengths, Limits(tokens=WINDOWS * max(lengths)))
        return cls(windows=windows, lengths=tuple(length for length in lengths if length <= windows.length))

    @classmethod
    def cut_from(cls, corpus: Corpus, lengths: Sequence[int]) -> tuple[Corpus, HeldOut]:
        """The ends of the longest documents, a window of each, and the corpus without them.

        As many windows, at most WINDOWS, of the longest length that SHARE of the text allows; none of a text too small.
        """
        import numpy as np

        head = [] if corpus.bos is None else [corpus.bos]
        room = int(SHARE * len(corpus.tokens))
        longest = int(corpus.sizes.max(initial=0))
        fitting = [length for length in lengths if length - len(head) <= min(room, longest // 2)]
        width = max(fitting, default=0)
        body = width - len(head)
        order = np.argsort(-corpus.sizes, kind="stable")
        most = min(WINDOWS, room // body) if width else 0
        taken = [n for n in order.tolist() if corpus.sizes[n] >= 2 * body][:most]
        ends = [corpus.tokens[corpus.ends[n] - body : corpus.ends[n]] for n in taken]
        rows = [np.concatenate([np.asarray(head, np.int32), end]) for end in ends]
        windows = Windows(
            ids=np.stack(rows) if rows else np.zeros((0, 0), np.int32),
            sizes=None,
            owners=np.arange(len(rows), dtype=np.int32),
            documents=tuple(str(n) for n in taken),
            longest=longest + len(head),
            bos=corpus.bos is not None,
        )
        return corpus.without_ends({n: body for n in taken}), cls(windows=windows, lengths=tuple(sorted(fitting)))

    def score(self, loss: Any, model: Any, team: Team) -> Losses:
        """Of the model in the module `loss` (loss.as_loss), whatever wraps it."""
        import numpy as np
        import torch

        if not self.lengths:
            return Losses(by_length={}, by_position={})
        ids = torch.from_numpy(self.windows.ids[:WINDOWS]).long().to(model.device)
        changing, was_training = has_changing_table(model.config), loss.training
        groups = [(length,) for length in self.lengths] if changing else [self.lengths]
        sums = {max(group): np.zeros(max(group) - 1) for group in groups}  # of each position but the first
        loss.eval()
        with torch.no_grad():
            for longest, total in sums.items():
                for number in range(0, len(ids), team.size):  # all processes take part in each forward pass
                    row = (number + team.rank) % len(ids)
                    if changing:
                        refresh_rotary(model)
                    losses = loss(ids[row : row + 1, :longest])[0].numpy()
                    if number + team.rank < len(ids):
                        total += losses
        loss.train(was_training)
        together = team.gather(sums)
        means = {n: np.sum([one[n] for one in together], axis=0) / len(ids) for n in sums}
        whole = means[max(self.lengths)]
        by_length = {n: float((means[n] if changing else whole)[: n - 1].mean()) for n in self.lengths}
        edges = [0, *(edge for edge in OCTAVES if edge < len(whole)), len(whole)]
        by_position = {f"{a}_to_{b}": float(whole[a:b].mean()) for a, b in zip(edges, edges[1:], strict=False)}
        return Losses(by_length=by_length, by_position=by_position)
