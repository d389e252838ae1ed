"""Figures from losses made by hand: sums by document, bits per byte, intervals, and pairs of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from ropext.cut import Pass
from ropext.summary import Scored, Totals, length_score, paired, position_scores, totals_at


@dataclass(frozen=True)
class Documents:
    """Of a cut, what sums need."""

    documents: tuple[str, ...]


def scored(losses: list[float], sizes: list[list[int]] | None = None) -> Scored:
    """Two windows of document 0, one of document 2, of four tokens each."""
    rows = [np.zeros(4, np.int32)] * 3
    run = Pass(
        name="first 4",
        lengths=(2, 4),
        rows=rows,
        sizes=None if sizes is None else [np.asarray(row, np.int32) for row in sizes],
        owners=np.asarray([0, 0, 2], np.int32),
        first=np.ones(3, np.int64),
    )
    return Scored(run=run, losses=np.asarray(losses), too_long=())


CUT = Documents(("a", "b", "c"))


def test_sums_go_to_the_documents_of_their_windows_and_stop_at_the_length():
    found = scored([1, 2, 3, 10, 20, 30, 100, 200, 300], sizes=[[0, 5, 1, 1], [0, 6, 1, 1], [0, 7, 1, 1]])
    whole, short = totals_at(4, found, CUT), totals_at(2, found, CUT)
    assert whole.documents == ("a", "c")
    assert whole.losses.tolist() == [66, 600] and whole.tokens.tolist() == [6, 3]
    assert short.losses.tolist() == [11, 100] and short.tokens.tolist() == [2, 1]
    assert short.bytes.tolist() == [11, 7] and whole.bytes.tolist() == [15, 9]
    assert totals_at(4, found, CUT, since=3).losses.tolist() == [33, 300]


def test_a_loss_in_nats_becomes_bits_of_the_text_it_stands_for():
    found = scored([math.log(2)] * 9, sizes=[[0, 2, 2, 2]] * 3)
    figure = length_score(4, totals_at(4, found, CUT), 3)
    assert figure.bits_per_byte == pytest.approx(0.5, rel=1e-12)
    assert length_score(4, totals_at(4, scored([1.0] * 9), CUT), 3).bits_per_byte is None


def test_a_block_of_positions_is_the_mean_of_its_tokens():
    (block,) = position_scores(scored([1, 2, 3, 10, 20, 30, 100, 200, 300]))
    assert (block.start, block.end, block.tokens, block.nll) == (0, 4, 9, pytest.approx(74))


def totals(
    losses: list[float], tokens: list[float], documents: Sequence[str], sizes: list[float] | None = None
) -> Totals:
    return Totals(
        documents=tuple(documents),
        losses=np.asarray(losses, float),
        tokens=np.asarray(tokens, float),
        bytes=None if sizes is None else np.asarray(sizes, float),
        broken_at=None,
    )


def test_a_difference_is_that_of_the_documents_both_were_scored_on():
    mine, theirs = totals([20, 40, 9], [10, 10, 1], "abx"), totals([7, 10, 30], [1, 10, 10], "yab")
    pair = paired(8, ("mine", mine), ("theirs", theirs), same_tokens=True)
    assert (pair.documents, pair.label, pair.against, pair.length) == (2, "mine", "theirs", 8)
    assert pair.nll_difference == pytest.approx(60 / 20 - 40 / 20)
    assert pair.perplexity_ratio == pytest.approx(math.e)


def test_what_makes_a_document_hard_for_both_models_does_not_widen_the_interval_of_their_difference():
    hardness = np.random.default_rng(1).normal(3, 1, 50)
    tokens, names = [100.0] * 50, [f"d{number}" for number in range(50)]
    theirs, mine = (totals(list(100 * column), tokens, names) for column in (hardness, hardness + 0.05))
    pair = paired(8, ("mine", mine), ("theirs", theirs), same_tokens=True)
    assert pair.nll_ci95 == pytest.approx((0.05, 0.05), abs=1e-9)
    alone = length_score(8, mine, 50)
    assert math.log(alone.ci95[1] / alone.ci95[0]) > 0.4  # each model by itself is uncertain all the same


def test_the_interval_of_a_difference_is_that_of_the_normal_approximation():
    rng = np.random.default_rng(2)
    mine, theirs = rng.normal(3, 1, 80), rng.normal(3, 1, 80)
    names = [f"d{number}" for number in range(80)]
    one, other = (totals(list(100 * column), [100.0] * 80, names) for column in (mine, theirs))
    low, high = paired(8, ("a", one), ("b", other), same_tokens=True).nll_ci95
    spread = 2 * 1.96 * float(np.std(mine - theirs)) / math.sqrt(80)
    assert high - low == pytest.approx(spread, rel=0.15)


def test_models_with_other_tokens_compare_in_bits_per_byte_alone():
    mine, theirs = totals([20, 40], [10, 10], "ab", [40, 80]), totals([10, 20], [5, 5], "ab", [20, 40])
    pair = paired(8, ("mine", mine), ("theirs", theirs), same_tokens=False)
    assert pair.nll_difference is None and pair.perplexity_ratio is None
    assert pair.bits_per_byte_difference == pytest.approx(0, abs=1e-12)


def test_nothing_is_compared_without_a_document_in_common_or_with_a_broken_loss():
    mine = totals([20], [10], "a")
    assert paired(8, ("a", mine), ("b", totals([20], [10], "b")), same_tokens=True) is None
    broken = Totals(documents=("a",), losses=mine.losses, tokens=mine.tokens, bytes=None, broken_at=3)
    assert paired(8, ("a", mine), ("b", broken), same_tokens=True) is None
    alone = paired(8, ("a", mine), ("b", mine), same_tokens=True)
    assert (alone.nll_difference, alone.nll_ci95) == (0.0, None)
