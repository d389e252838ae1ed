"""Windows of exact length: what is in them, when each is used, and when there are too few."""

from __future__ import annotations

import numpy as np
import pytest

from ropext.errors import Refused, RopextError
from ropext.pack import Corpus, bos_of, check_supply, encode, tokenize
from ropext.schedule import Stage
from ropext.texts import Document
from tests.tiny import make_checkpoint


def corpus(lengths, bos=None):
    """Documents of these lengths whose tokens are numbered through, from 1."""
    return Corpus(tokens=np.arange(1, sum(lengths) + 1, dtype=np.int32), ends=np.cumsum(lengths), bos=bos)


def everything(windows, *, seed=0, stage=0, epoch=0):
    """All windows of one epoch, by their first document token."""
    size = len(windows.starts)
    batch = windows.batch(seed=seed, stage=stage, step=epoch, size=size)
    return batch[np.argsort(batch[:, -1])]


def test_windows_are_consecutive_whole_and_never_cross_a_document():
    found = corpus([10, 3, 8]).windows(4)
    assert everything(found).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [14, 15, 16, 17], [18, 19, 20, 21]]
    assert (found.documents, found.share_long_enough, found.largest_position) == (2, 2 / 3, 3)


def test_a_bos_counts_as_a_token_of_its_window():
    found = corpus([10, 3, 8], bos=0).windows(4)
    assert everything(found).tolist() == [
        [0, 1, 2, 3],
        [0, 4, 5, 6],
        [0, 7, 8, 9],
        [0, 11, 12, 13],
        [0, 14, 15, 16],
        [0, 17, 18, 19],
    ]


def test_each_epoch_uses_every_window_once_in_an_order_of_its_own():
    windows = corpus([400]).windows(4)
    orders = {
        name: windows.batch(seed=seed, stage=stage, step=epoch, size=100)[:, 0].tolist()
        for name, seed, stage, epoch in (("a", 0, 0, 0), ("seed", 1, 0, 0), ("stage", 0, 1, 0), ("epoch", 0, 0, 1))
    }
    assert all(sorted(order) == list(range(1, 401, 4)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4


def test_the_batch_of_a_step_needs_no_step_before_it_and_epochs_join_without_a_gap():
    windows = corpus([28]).windows(4)
    whole = windows.batch(seed=5, stage=0, step=0, size=21)
    alone = [windows.batch(seed=5, stage=0, step=step, size=3) for step in range(7)]
    assert np.array_equal(np.concatenate(alone), whole)


def test_equal_text_has_the_same_identity_and_any_change_another():
    base = corpus([10, 8]).windows(4).sha256
    assert base == corpus([10, 8]).windows(4).sha256
    changed = [corpus([10, 8], bos=0).windows(4), corpus([10, 8]).windows(3), corpus([8, 10]).windows(4)]
    assert len({base, *(windows.sha256 for windows in changed)}) == 4


def test_too_little_long_text_is_refused_with_what_was_found_and_needed():
    windows = corpus([9, 9, 2]).windows(4)
    stage = Stage(length=4, factor=1.0, steps=17, tokens=68, batch=1)
    with pytest.raises(Refused, match=r"the 4 stage needs 5 distinct windows of 4 tokens.*found 4, in 2 of 3"):
        check_supply([windows], [stage])
    check_supply([windows], [Stage(length=4, factor=1.0, steps=16, tokens=64, batch=1)])


def test_a_stage_longer_than_every_document_is_refused():
    stage = Stage(length=16, factor=1.0, steps=1, tokens=16, batch=1)
    with pytest.raises(Refused, match="found 0, in 0 of 2 documents"):
        check_supply([corpus([9, 9]).windows(16)], [stage])


def test_no_document_at_all_is_an_error(tmp_path):
    with pytest.raises(RopextError, match="at least one document"):
        tokenize(None, [])


@pytest.mark.parametrize(("bos", "first"), [("adds", [0]), ("has", []), ("none", [])])
def test_windows_begin_with_a_bos_only_where_the_tokenizer_adds_one(tmp_path, bos, first, capfd):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path, bos=bos))
    text = "A text far longer than the window. " * 20
    found = tokenize(tokenizer, [Document(name="a", text=text), Document(name="b", text="")])
    assert bos_of(tokenizer) == (first or [None])[0]
    assert (
        found.tokens.tolist()
        == encode(tokenizer, text, found.bos).tolist()
        == tokenizer(text)["input_ids"][len(first) :]
    )
    row = found.windows(64).batch(seed=0, stage=0, step=0, size=1)[0]
    assert row.tolist()[: len(first)] == first and 0 not in row[len(first) :] and len(row) == 64


def test_long_text_is_tokenized_without_a_warning(tmp_path, caplog, capfd):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path))
    tokenize(tokenizer, [Document(name="a", text="long " * 2000)])
    assert "longer than" not in caplog.text + "".join(capfd.readouterr())
