"""What finetune trains on: batches of rows with positions and labels, and what every source of them tells.

Shapes: B rows of a batch, T tokens in a row. Positions are those that the rotary tables are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

UNSCORED = -100  # the label that torch's losses leave out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Rows that go through the model together."""

    ids: Ids  # `[B, T]`
    labels: Ids  # `[B, T]`, the token itself where it is to be predicted from those before it, else UNSCORED
    positions: Ids | None = None  # `[B, T]`; None for 0 .. T - 1
    packed: bool = False  # a new document begins wherever positions do not go up by exactly one

    @property
    def scored(self) -> int:
        """How many labels count: what a sum of losses is divided by."""
        return int((self.labels != UNSCORED).sum())

    def split(self, rows: int) -> Iterator[Batch]:
        """The batch in parts of at most so many rows."""
        for start in range(0, len(self.ids), rows):
            part = slice(start, start + rows)
            positions = None if self.positions is None else self.positions[part]
            yield Batch(ids=self.ids[part], labels=self.labels[part], positions=positions, packed=self.packed)

    def arguments(self, device: Any) -> dict[str, torch.Tensor]:
        """What a model's forward takes beside the ids, so that it sees each row as it is meant.

        Transformers takes positions that jump for the beginning of another document unless it is given a mask.
        """
        import torch

        if self.positions is None:
            return {}
        positions = torch.from_numpy(self.positions).to(device)
        whole = {} if self.packed else {"attention_mask": torch.ones_like(positions)}
        return {"position_ids": positions, **whole}


class Feed(Protocol):
    """A source of rows of one length."""

    @property
    def length(self) -> int:
        """Tokens in a row."""

    @property
    def supply(self) -> int:
        """Distinct rows."""

    @property
    def documents(self) -> int:
        """How many documents the rows are made of."""

    @property
    def share_long_enough(self) -> float:
        """Of the documents read, those that fill a row: between 0 and 1."""

    @property
    def largest_position(self) -> int:
        """The largest position that a token is trained at."""

    @property
    def largest_distance(self) -> int:
        """The farthest that a token sees back, in positions: what training at a length is about."""

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents."""

    @property
    def skips(self) -> bool:
        """Whether positions jump inside a document."""

    @property
    def sha256(self) -> str:
        """Identity of the rows, whatever files they came from: hex digest."""

    def batch(self, *, seed: int, stage: int, step: int, size: int) -> Batch:
        """The `size` rows of one optimizer step, the same whenever they are asked for.

        Each epoch is a permutation of all rows that depends on the seed, the number of the stage and of the epoch.
        """

    def described(self) -> str:
        """The rows, for one line before training."""


def row_numbers(supply: int, *, seed: int, stage: int, step: int, size: int) -> list[int]:
    """Which of `supply` rows a step takes, epoch after epoch without a gap."""
    places = range(step * size, (step + 1) * size)
    return [int(_order(seed, stage, place // supply, supply)[place % supply]) for place in places]


@lru_cache(maxsize=8)  # of a mixture: an epoch of each part
def _order(seed: int, stage: int, epoch: int, supply: int) -> Ids:
    import numpy as np

    return np.random.default_rng((seed, stage, epoch)).permutation(supply)
