"""Windows of the native length whose positions reach a longer target: a long target trained at short cost.

PoSE (Zhu et al. 2023, arXiv:2309.10400) with two chunks: a window is cut at random, the first chunk keeps the positions
from 0 on, the second is moved up by a random skip. Its text stays consecutive, and attention is not cut at the jump.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ropext.errors import Refused
from ropext.feed import Batch
from ropext.pack import Windows

DRAWN = 1  # keeps these draws apart from those that order the rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Posed:
    """A feed of windows with skipped positions, for static rotary tables only (see jumps.check_skipping)."""

    windows: Windows
    target: int  # tokens: positions stay below it, and every distance below it occurs

    packed, skips = False, True

    def __post_init__(self) -> None:
        if not 2 <= self.length < self.target:
            raise Refused(
                f"positions are skipped in windows shorter than the target: found {self.length} tokens and a target of "
                f"{self.target}; train at the target's length without --pose"
            )

    @property
    def length(self) -> int:
        """Tokens in a window."""
        return self.windows.length

    @property
    def supply(self) -> int:
        """Distinct windows; each gets another cut and skip whenever it comes."""
        return self.windows.supply

    @property
    def documents(self) -> int:
        """Long enough for a window."""
        return self.windows.documents

    @property
    def share_long_enough(self) -> float:
        """Of the documents, for a window."""
        return self.windows.share_long_enough

    @property
    def largest_position(self) -> int:
        """That a skip can reach."""
        return self.target - 1

    @property
    def largest_distance(self) -> int:
        """From the end of the second chunk to the beginning of the first."""
        return self.target - 1

    @property
    def sha256(self) -> str:
        """Identity of windows and target: hex digest."""
        return hashlib.sha256(f"pose {self.target} {self.windows.sha256}".encode()).hexdigest()

    def batch(self, *, seed: int, stage: int, step: int, size: int) -> Batch:
        """The windows of one optimizer step with their positions, the same whenever it is asked for."""
        import numpy as np

        plain = self.windows.batch(seed=seed, stage=stage, step=step, size=size)
        draws = [np.random.default_rng((seed, stage, step * size + row, DRAWN)) for row in range(size)]
        cuts = np.array([[draw.integers(1, self.length)] for draw in draws])
        skips = np.array([[draw.integers(self.target - self.length + 1)] for draw in draws])
        places = np.arange(self.length)
        return Batch(ids=plain.ids, labels=plain.labels, positions=places + skips * (places >= cuts))

    def described(self) -> str:
        """The windows and their positions, for one line."""
        return f"{self.windows.described()}, positions skipped to reach {self.target}"
