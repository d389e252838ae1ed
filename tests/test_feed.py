"""Feeds: what is in the rows of packed documents, skipped positions and mixtures, and when each row comes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropext.errors import Refused, RopextError, UsageError
from ropext.feed import UNSCORED, Batch
from ropext.mixture import mix
from ropext.pack import Corpus, check_supply
from ropext.packing import pack
from ropext.pose import Posed
from ropext.schedule import Stage


def corpus(lengths, bos=None, answers=None):
    """Documents of these lengths whose tokens are numbered through, from 1."""
    return Corpus(
        tokens=np.arange(1, sum(lengths) + 1, dtype=np.int32),
        ends=np.cumsum(lengths, dtype=np.int64),
        bos=bos,
        answers=None if answers is None else np.array(answers, bool),
    )


def everything(feed):
    """All rows of one epoch."""
    return feed.batch(seed=0, stage=0, step=0, size=feed.supply)


def documents(batch):
    """Ids, labels and positions of each document of packed rows, by the rule of transformers: a jump begins one."""
    for row in zip(batch.ids, batch.labels, batch.positions, strict=True):
        borders = np.flatnonzero(np.diff(row[2]) != 1) + 1
        yield from zip(*(np.split(column, borders) for column in row), strict=True)


# Batches


def test_a_batch_in_parts_has_all_rows_and_counts_the_same_labels():
    batch = everything(pack(corpus([5, 3, 9, 2, 7, 4, 8]), 10))
    for rows in (1, 2, 3, 99):
        parts = list(batch.split(rows))
        assert max(len(part.ids) for part in parts) <= rows and all(part.packed for part in parts)
        assert sum(part.scored for part in parts) == batch.scored == 38 - 7
        for name in ("ids", "labels", "positions"):
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(batch, name))


def test_losses_summed_over_the_labels_do_not_depend_on_the_parts_of_a_batch():
    import torch
    import torch.nn.functional as F

    answers = [False] * 12 + [True] * 4 + [True] * 16 + [False, False, True]
    batch = everything(pack(corpus([16, 16, 3], answers=answers), 16))  # rows of 4, 15 and 1 labels
    torch.manual_seed(0)
    head = torch.randn(36, 36, dtype=torch.float64)

    def loss(part):
        sums = F.cross_entropy(head[part.ids[:, :-1]].mT, torch.from_numpy(part.labels[:, 1:]), reduction="sum")
        return sums / batch.scored

    whole = loss(batch)
    for rows in (1, 2):
        assert sum(loss(part) for part in batch.split(rows)).item() == pytest.approx(whole.item(), rel=1e-12)


# Packed rows


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    length=st.integers(3, 20),
    bos=st.sampled_from([None, 0]),
)
def test_packed_rows_hold_each_token_once_in_whole_documents_with_positions_up_to_the_last(lengths, length, bos):
    source = corpus(lengths, bos)
    feed = pack(source, length)
    if not feed.supply:
        assert all(size < 1 + (bos is None) for size in lengths)
        return
    batch = everything(feed)
    head = [] if bos is None else [bos]
    body, least = length - len(head), 2 - len(head)
    expected = []  # windows as they always were, and what is left of each document
    for end, size in zip(np.cumsum(lengths), lengths, strict=True):
        tokens = list(range(end - size + 1, end + 1))
        pieces = [tokens[at : at + body] for at in range(0, size, body)]
        expected += [head + piece for piece in pieces if len(piece) >= least]
    found = [ids.tolist() for ids, labels, _ in documents(batch) if (labels != UNSCORED).any()]
    assert sorted(found) == sorted(expected)
    for ids, labels, _ in documents(batch):
        assert labels[0] == UNSCORED
        assert (labels[1:] == UNSCORED).all() or labels[1:].tolist() == ids[1:].tolist()
    assert np.array_equal(np.sort(batch.positions), np.tile(np.arange(length), (feed.supply, 1)))
    assert feed.scored == batch.scored == sum(len(piece) - 1 for piece in expected)
    assert feed.padding == pytest.approx(1 - sum(map(len, expected)) / batch.ids.size)
    assert feed.largest_distance == max(map(len, expected)) - 1
    assert (feed.documents, feed.skipped) == (sum(n >= least for n in lengths), sum(n < least for n in lengths))


def test_little_of_packed_rows_is_padding():
    lengths = np.random.default_rng(0).integers(10, 700, 500).tolist()
    feed = pack(corpus(lengths, bos=0), 1024)
    assert feed.padding < 0.01
    assert feed.supply == -(-(sum(lengths) + 500) // 1024) or feed.supply * 1024 < 1.01 * (sum(lengths) + 500)


def test_best_fit_fills_the_fullest_row_that_has_room():
    found = [ids.tolist() for ids, labels, _ in documents(everything(pack(corpus([4, 6, 7, 3]), 10)))]
    rows = everything(pack(corpus([4, 6, 7, 3]), 10)).ids
    assert sorted(map(len, found)) == [3, 4, 6, 7] and len(rows) == 2
    assert {tuple(row) for row in rows.tolist()} == {
        (11, 12, 13, 14, 15, 16, 17, 18, 19, 20),
        (5, 6, 7, 8, 9, 10, 1, 2, 3, 4),
    }


def test_a_packed_feed_says_how_far_its_tokens_see_back():
    feed = pack(corpus([5, 3, 1]), 10)
    assert (feed.largest_position, feed.largest_distance, feed.share_long_enough) == (9, 4, 0)
    assert feed.described() == (
        "1 rows of 10 tokens (20.0% padding, 6 tokens with loss), packed from 2 of 3 documents, "
        "the longest piece 5 tokens"
    )


def test_packed_rows_have_an_identity_of_their_own():
    base = corpus([5, 3, 7])
    same_shape = corpus([5, 3, 7], answers=[True] * 15)
    other = corpus([5, 3, 7], answers=[False] * 3 + [True] * 12)
    feeds = [pack(base, 10), pack(base, 9), pack(corpus([3, 5, 7]), 10), pack(same_shape, 10), pack(other, 10)]
    assert len({base.windows(10).sha256, *(feed.sha256 for feed in feeds)}) == 6
    assert pack(base, 10).sha256 == feeds[0].sha256


def test_a_conversation_that_is_too_long_is_cut_at_its_end_or_left_out():
    answers = [False] * 4 + [True] * 6 + [False] * 9 + [True] + [False, True]
    feed = pack(corpus([10, 10, 2], answers=answers), 8)
    found = {tuple(ids): labels.tolist() for ids, labels, _ in documents(everything(feed)) if labels.max() > 0}
    assert found == {
        (1, 2, 3, 4, 5, 6, 7, 8): [UNSCORED] * 4 + [5, 6, 7, 8],
        (21, 22): [UNSCORED, 22],
    }
    assert (feed.skipped, feed.documents, feed.scored) == (1, 2, 5)


def test_too_few_packed_rows_are_refused_with_what_was_found():
    stage = Stage(length=10, factor=1.0, steps=5, tokens=50, batch=1)
    with pytest.raises(Refused, match=r"needs 2 distinct.*found 1 rows of 10 tokens.*packed from 2 of 2"):
        check_supply([pack(corpus([5, 3]), 10)], [stage])


def test_a_row_that_only_a_bos_fits_is_an_error():
    with pytest.raises(RopextError, match="at least one token of a document: found rows of 1 tokens"):
        pack(corpus([5], bos=0), 1)


# Skipped positions


def posed(size=8, target=20):
    return Posed(windows=corpus([800]).windows(size), target=target)


def test_skipped_positions_are_two_runs_from_zero_to_below_the_target():
    batch = posed().batch(seed=1, stage=0, step=0, size=400)
    assert not batch.packed
    jumps = np.diff(batch.positions) - 1
    assert (batch.positions[:, 0] == 0).all() and batch.positions.max() == 19
    assert (jumps >= 0).all() and ((jumps > 0).sum(1) <= 1).all()
    assert set(np.flatnonzero((jumps > 0).any(0)).tolist()) == set(range(7)), "a cut may be anywhere"
    assert set(jumps.max(1).tolist()) == set(range(13)), "a skip may be of any size that fits"


def test_the_text_of_skipped_positions_is_that_of_the_windows():
    feed = posed()
    plain, skipped = (one.batch(seed=1, stage=2, step=3, size=5) for one in (feed.windows, feed))
    assert np.array_equal(plain.ids, skipped.ids) and np.array_equal(plain.labels, skipped.labels)


def test_every_distance_below_the_target_is_trained_and_none_above():
    batch = posed().batch(seed=0, stage=0, step=0, size=400)
    distances = batch.positions[:, :, None] - batch.positions[:, None]
    assert set(distances[distances >= 0].tolist()) == set(range(20))


def test_the_skips_of_a_step_need_no_step_before_it_and_differ_by_epoch_and_seed():
    feed = posed()
    whole = feed.batch(seed=0, stage=0, step=0, size=200).positions
    alone = np.concatenate([feed.batch(seed=0, stage=0, step=step, size=5).positions for step in range(40)])
    assert np.array_equal(whole, alone)
    others = [whole[100:], feed.batch(seed=1, stage=0, step=0, size=100).positions]
    assert not any(np.array_equal(whole[:100], other) for other in others)


@pytest.mark.parametrize("target", [8, 4])
def test_a_target_that_the_windows_reach_anyway_is_refused(target):
    with pytest.raises(Refused, match=f"found 8 tokens and a target of {target}"):
        posed(8, target)


def test_windows_with_skipped_positions_have_an_identity_and_say_what_they_are():
    assert len({posed().sha256, posed(target=21).sha256, posed(9).sha256, posed().windows.sha256}) == 4
    assert (posed().largest_position, posed().largest_distance) == (19, 19)
    assert posed().described() == "100 windows of 8 tokens, in 1 of 1 documents, positions skipped to reach 20"


# Mixtures


def mixture(weights=(0.6, 0.4), length=10):
    """Windows of the tokens up to 1000, and packed rows of documents of tokens above 5000."""
    short = Corpus(tokens=np.arange(5000, 5300, dtype=np.int32), ends=np.arange(3, 301, 3), bos=None)
    return mix(list(zip((corpus([1000]).windows(length), pack(short, length)), weights, strict=True)))


def part_of(row):
    return int(row.max() >= 5000)


@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    unit=st.sampled_from([1, 0.1, 0.001]),
)
def test_the_share_drawn_is_never_a_whole_row_away_from_the_weights(weights, unit):
    feeds = [Corpus(tokens=np.full(40, n, np.int32), ends=np.array([40]), bos=None).windows(2) for n in range(6)]
    found = mix([(feed, round(weight * unit, 3)) for feed, weight in zip(feeds, weights, strict=False)])
    drawn = found.batch(seed=0, stage=0, step=0, size=150).ids[:, 0]
    for part, weight in enumerate(weights):
        share = Fraction(weight, sum(weights))
        behind = [share * n - int(count) for n, count in enumerate(np.cumsum(drawn == part), 1)]
        assert max(map(abs, behind)) < 1


def test_each_part_of_a_mixture_walks_through_epochs_of_its_own():
    found = mixture()
    rows = [found.batch(seed=3, stage=1, step=step, size=7) for step in range(40)]
    ids = np.concatenate([batch.ids for batch in rows])
    for number, part in enumerate(found.parts):
        own = ids[[part_of(row) == number for row in ids]]
        assert np.array_equal(own, part.batch(seed=3, stage=1, step=0, size=len(own)).ids)
        assert len(own) > part.supply


def test_windows_in_a_mixture_with_packed_rows_have_positions_without_a_jump():
    batch = mixture().batch(seed=0, stage=0, step=0, size=50)
    assert batch.packed
    for row, positions in zip(batch.ids, batch.positions, strict=True):
        assert (np.diff(positions) != 1).any() == part_of(row)


def test_a_mixture_without_jumps_has_no_positions():
    windows = corpus([100]).windows(10)
    batch = mix([(windows, 1), (windows, 1)]).batch(seed=0, stage=0, step=0, size=4)
    assert batch.positions is None and not batch.packed


def test_the_supply_of_a_mixture_lasts_until_a_part_is_used_up():
    found = mixture((3, 1))
    assert [part.supply for part in found.parts] == [100, 34] and found.supply == 133
    drawn = Counter(part_of(row) for row in found.batch(seed=0, stage=0, step=0, size=found.supply).ids)
    assert drawn[0] == 100 and drawn[1] <= 34


def test_what_a_mixture_says_of_itself():
    found = mixture()
    assert (found.largest_position, found.largest_distance, found.documents) == (9, 9, 101)
    assert found.share_long_enough == pytest.approx(0.6)
    assert found.described().startswith("60.0% 100 windows of 10 tokens, in 1 of 1 documents; 40.0% 34 rows of 10")
    assert len({found.sha256, mixture((6, 4)).sha256, mixture((0.5, 0.5)).sha256, mixture(length=9).sha256}) == 3


def test_packed_rows_beside_skipped_positions_are_refused():
    with pytest.raises(RopextError, match="found packed rows beside skipped positions"):
        mix([(pack(corpus([3, 4]), 8), 1), (posed(8), 1)])
    assert mix([(posed(8), 1), (corpus([80]).windows(8), 1)]).skips


@pytest.mark.parametrize("weights", [(1, 0), (1, -1), (1, float("nan")), (1, float("inf")), (1, 0.1234567)])
def test_weights_that_are_no_plain_share_are_refused(weights):
    with pytest.raises(UsageError, match="weight"):
        mixture(weights)


def test_parts_of_different_lengths_are_refused():
    with pytest.raises(UsageError, match=r"one length: found \[8, 9\]"):
        mix([(corpus([80]).windows(8), 1), (corpus([80]).windows(9), 1)])


def test_a_row_without_positions_asks_nothing_of_the_model():
    assert Batch(ids=np.zeros((1, 4), np.int64), labels=np.zeros((1, 4), np.int64)).arguments("cpu") == {}
