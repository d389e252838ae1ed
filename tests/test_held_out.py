"""Text that is kept back from training: which ends of which documents, and what is left."""

from __future__ import annotations

import numpy as np
import pytest

from ropext.held_out import HeldOut
from ropext.pack import Corpus


def corpus(*sizes: int, bos: int | None = None) -> Corpus:
    return Corpus(tokens=np.arange(sum(sizes), dtype=np.int32), ends=np.cumsum(sizes), bos=bos)


def test_the_ends_of_the_longest_documents_are_kept_back_and_the_rest_is_trained_on():
    left, held = HeldOut.cut_from(corpus(0, 700, 100, 900, 800), [16, 32, 1024])
    assert held.lengths == (16, 32)
    assert held.windows.ids.tolist() == [
        list(range(1700 - 32, 1700)),
        list(range(2500 - 32, 2500)),
        list(range(668, 700)),
    ]
    kept = set(left.tokens.tolist())
    assert kept.isdisjoint(held.windows.ids.ravel().tolist()) and len(kept) == 2500 - 96
    assert left.sizes.tolist() == [0, 668, 100, 868, 768]


@pytest.mark.parametrize("bos", [None, 7])
def test_at_most_a_twentieth_of_the_text_and_half_of_a_document_is_kept_back(bos):
    left, held = HeldOut.cut_from(corpus(*[40] * 50, bos=bos), [16, 32])
    assert held.lengths == (16,) and held.windows.ids.shape == (4, 16)
    assert len(left.tokens) >= 0.95 * 2000
    assert (held.windows.ids[:, 0] == 7).all() == (bos == 7)


def test_of_a_text_too_small_nothing_is_kept_back():
    whole = corpus(100, 100)
    left, held = HeldOut.cut_from(whole, [16, 32])
    assert held.lengths == () and held.windows.length == 0
    assert left.tokens.tolist() == whole.tokens.tolist() and left.ends.tolist() == whole.ends.tolist()
