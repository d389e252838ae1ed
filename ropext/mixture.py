"""Several feeds as one, by weight: rows of long text beside rows that keep short-context skill.

A repeating pattern says which part each row comes from, so the share drawn is never a whole row away from the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING

from ropext.errors import RopextError, UsageError
from ropext.feed import Batch, Feed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST_PATTERN = 100_000  # rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mixture:
    """A feed of rows from several parts of one length, each of which walks through epochs of its own."""

    parts: tuple[Feed, ...]
    shares: tuple[Fraction, ...]  # of the rows, 1 in all
    pattern: tuple[int, ...]  # the part of each row, over and over
    counts: tuple[tuple[int, ...], ...]  # rows of each part before each place of the pattern, and in all of it

    @property
    def length(self) -> int:
        """Of each part."""
        return self.parts[0].length

    @property
    def supply(self) -> int:
        """Rows until some part begins its second epoch."""
        return min(int(part.supply / share) for part, share in zip(self.parts, self.shares, strict=True))

    @property
    def documents(self) -> int:
        """Of all parts, one that is in several counted in each."""
        return sum(part.documents for part in self.parts)

    @property
    def share_long_enough(self) -> float:
        """Of the documents of each part, by its share."""
        return sum(float(s) * part.share_long_enough for part, s in zip(self.parts, self.shares, strict=True))

    @property
    def largest_position(self) -> int:
        """Of any part."""
        return max(part.largest_position for part in self.parts)

    @property
    def largest_distance(self) -> int:
        """Of any part."""
        return max(part.largest_distance for part in self.parts)

    @property
    def packed(self) -> bool:
        """Whether some rows are; a row without a jump is one document either way."""
        return any(part.packed for part in self.parts)

    @property
    def skips(self) -> bool:
        """Whether some rows do."""
        return any(part.skips for part in self.parts)

    @property
    def sha256(self) -> str:
        """Identity of parts and shares: hex digest."""
        named = (f"{share} {part.sha256}" for part, share in zip(self.parts, self.shares, strict=True))
        return hashlib.sha256(b"mixture\n" + "\n".join(named).encode()).hexdigest()

    def batch(self, *, seed: int, stage: int, step: int, size: int) -> Batch:
        """The rows of one optimizer step, the same whenever it is asked for."""
        import numpy as np

        rows = []
        for place in range(step * size, (step + 1) * size):
            turn, at = divmod(place, len(self.pattern))
            part = self.pattern[at]
            own = turn * self.counts[-1][part] + self.counts[at][part]  # rows of this part before this one
            rows.append(self.parts[part].batch(seed=seed, stage=stage, step=own, size=1))
        jumps = any(row.positions is not None for row in rows)
        return Batch(
            ids=np.concatenate([row.ids for row in rows]),
            labels=np.concatenate([row.labels for row in rows]),
            positions=np.concatenate([_positions(row) for row in rows]) if jumps else None,
            packed=self.packed,
        )

    def described(self) -> str:
        """Each part with its share, for one line."""
        return "; ".join(
            f"{float(share):.1%} {part.described()}" for part, share in zip(self.parts, self.shares, strict=True)
        )


def mix(parts: Sequence[tuple[Feed, float]]) -> Mixture:
    """Feeds of one length with their weights, in any unit, such as 0.6 and 0.4, or 3 and 2.

    Raises UsageError for weights or lengths that do not fit together, RopextError for parts that no forward pass can
    take together: rows of packed documents, and rows whose positions jump inside a document.
    """
    feeds, weights = [feed for feed, _ in parts], [weight for _, weight in parts]
    if len({feed.length for feed in feeds}) != 1:
        raise UsageError(f"a mixture has parts of one length: found {[feed.length for feed in feeds]}")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UsageError(f"the weight of a part is a number above 0: found {weights}; leave out what has none")
    if any(feed.packed for feed in feeds) and any(feed.skips for feed in feeds):
        raise RopextError(
            "a jump of positions either parts two documents or is skipped inside one: found packed rows beside "
            "skipped positions; mix those with whole windows"
        )
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period > LONGEST_PATTERN:
        raise UsageError(f"weights are plain numbers, such as 0.6 and 0.4: found {weights}; round them")
    pattern = _pattern([int(share * period) for share in shares])
    counts = accumulate(
        pattern,
        lambda before, part: tuple(n + (number == part) for number, n in enumerate(before)),
        initial=(0,) * len(feeds),
    )
    return Mixture(parts=tuple(feeds), shares=tuple(shares), pattern=tuple(pattern), counts=tuple(counts))


def _pattern(rows: Sequence[int]) -> list[int]:
    """`rows[i]` places for each part i, so even that none is ever a whole place ahead or behind.

    Row k of a part may come from floor(k / share) on and must by ceil((k + 1) / share); the earliest deadline goes
    first, which keeps them all (Baruah et al. 1996, Proportionate Progress).
    """
    period, done, pattern = sum(rows), [0] * len(rows), []
    for place in range(period):
        ready = [part for part, n in enumerate(rows) if done[part] < n and done[part] * period // n <= place]
        part = min(ready, key=lambda part: -(-(done[part] + 1) * period // rows[part]))
        done[part] += 1
        pattern.append(part)
    return pattern


def _positions(row: Batch) -> NDArray[np.int64]:
    """`[1, T]`, counted out where the row has none of its own."""
    import numpy as np

    return np.arange(row.ids.shape[1])[None] if row.positions is None else row.positions
