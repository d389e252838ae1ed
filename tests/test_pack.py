"""Windows of exact length: what is in them, when each is used, and when there are too few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropext import texts
from ropext.demo import CHECKPOINT
from ropext.errors import Refused, RopextError
from ropext.pack import Corpus, bos_of, check_supply, encode, encode_sized, tokenize
from ropext.schedule import Stage
from ropext.texts import Document, read_documents
from tests.tiny import make_checkpoint


def corpus(lengths, bos=None):
    """Documents of these lengths whose tokens are numbered through, from 1."""
    return Corpus(tokens=np.arange(1, sum(lengths) + 1, dtype=np.int32), ends=np.cumsum(lengths), bos=bos)


def everything(windows, *, seed=0, stage=0, epoch=0):
    """All windows of one epoch, by their first document token."""
    size = len(windows.starts)
    batch = windows.batch(seed=seed, stage=stage, step=epoch, size=size).ids
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
        name: windows.batch(seed=seed, stage=stage, step=epoch, size=100).ids[:, 0].tolist()
        for name, seed, stage, epoch in (("a", 0, 0, 0), ("seed", 1, 0, 0), ("stage", 0, 1, 0), ("epoch", 0, 0, 1))
    }
    assert all(sorted(order) == list(range(1, 401, 4)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4


def test_the_batch_of_a_step_needs_no_step_before_it_and_epochs_join_without_a_gap():
    windows = corpus([28]).windows(4)
    whole = windows.batch(seed=5, stage=0, step=0, size=21).ids
    alone = [windows.batch(seed=5, stage=0, step=step, size=3).ids for step in range(7)]
    assert np.array_equal(np.concatenate(alone), whole)


def test_windows_and_their_order_are_those_that_earlier_releases_trained_on():
    windows = corpus([21, 3, 16], bos=0).windows(4)  # a run that they began resumes with the same batches
    assert windows.sha256 == "5b5f86bba424753a45ff819e18ebed0cb4c30a471230ee05574cad6f7a2483e7"
    found = windows.batch(seed=7, stage=1, step=2, size=3)
    assert found.ids.tolist() == [[0, 19, 20, 21], [0, 28, 29, 30], [0, 31, 32, 33]] and found.ids.dtype == np.int64


def test_every_token_of_a_window_but_the_first_has_its_label():
    found = corpus([10]).windows(4).batch(seed=0, stage=0, step=0, size=2)
    assert found.labels[:, 1:].tolist() == found.ids[:, 1:].tolist() and found.labels[:, 0].tolist() == [-100, -100]
    assert found.positions is None and not found.packed and found.scored == 6


def test_equal_text_has_the_same_identity_and_any_change_another():
    base = corpus([10, 8]).windows(4).sha256
    assert base == corpus([10, 8]).windows(4).sha256
    changed = [corpus([10, 8], bos=0).windows(4), corpus([10, 8]).windows(3), corpus([8, 10]).windows(4)]
    assert len({base, *(windows.sha256 for windows in changed)}) == 4


def test_too_little_long_text_is_refused_with_what_was_found_and_needed():
    windows = corpus([9, 9, 2]).windows(4)
    stage = Stage(length=4, factor=1.0, steps=17, tokens=68, batch=1)
    with pytest.raises(
        Refused,
        match=r"the 4 stage needs 5 distinct windows of 4 tokens.*found 4 windows of 4 tokens, in 2 of 3 documents",
    ):
        check_supply([windows], [stage])
    check_supply([windows], [Stage(length=4, factor=1.0, steps=16, tokens=64, batch=1)])


def test_a_stage_longer_than_every_document_is_refused():
    stage = Stage(length=16, factor=1.0, steps=1, tokens=16, batch=1)
    with pytest.raises(Refused, match="found 0 windows of 16 tokens, in 0 of 2 documents"):
        check_supply([corpus([9, 9]).windows(16)], [stage])


def test_no_document_at_all_is_an_error(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path))
    with pytest.raises(RopextError, match="at least one document"):
        tokenize(tokenizer, [])


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
    row = found.windows(64).batch(seed=0, stage=0, step=0, size=1).ids[0]
    assert row.tolist()[: len(first)] == first and 0 not in row[len(first) :] and len(row) == 64


def test_long_text_is_tokenized_without_a_warning(tmp_path, caplog, capfd):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path))
    tokenize(tokenizer, [Document(name="a", text="long " * 2000)])
    assert "longer than" not in caplog.text + "".join(capfd.readouterr())


# Bytes of each token

MIXED = "naïve 日本語 🙂"  # 21 bytes


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(make_checkpoint(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def built_in():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHECKPOINT)


def words():
    """One token a word, white space dropped: <s>, a, bb, and é for every other word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "bb": 2, "é": 3}, unk_token="é"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


def test_the_first_of_the_tokens_of_a_character_counts_all_its_bytes(byte_tokenizer):
    tokens, sizes = encode_sized(byte_tokenizer, MIXED, 0)
    assert sizes.tolist() == [1, 1, 2, 0, 1, 1, 1, 3, 0, 0, 3, 0, 0, 3, 0, 0, 1, 4, 0, 0, 0]
    assert tokens.tolist() == encode(byte_tokenizer, MIXED, 0).tolist()
    assert (tokens.dtype, sizes.dtype) == (np.int32, np.int32)


def test_white_space_that_a_tokenizer_drops_counts_for_the_token_after_it():
    tokens, sizes = encode_sized(words(), "  a bb\n\né a  ", None)
    assert (tokens.tolist(), sizes.tolist()) == ([1, 2, 3, 1], [3, 3, 4, 2])


@pytest.mark.parametrize(("bos", "tokens", "sizes"), [(0, [1, 2], [2, 3]), (None, [0, 1, 2], [3, 2, 3])])
def test_a_bos_that_is_left_out_takes_its_bytes_along(bos, tokens, sizes):
    found = encode_sized(words(), "<s> a bb", bos)
    assert (found[0].tolist(), found[1].tolist()) == (tokens, sizes)
    assert encode(words(), "<s> a bb", bos).tolist() == tokens


def test_a_token_that_is_told_to_end_before_the_one_before_it_has_no_bytes():
    class Backwards:
        is_fast = True

        def __call__(self, text, **_):
            return {"input_ids": [5, 6, 7, 8], "offset_mapping": [(0, 2), (0, 1), (0, 0), (2, 4)]}

    assert encode_sized(Backwards(), "a日bc", None)[1].tolist() == [4, 0, 0, 2]


def test_an_empty_text_has_no_tokens_and_no_sizes(byte_tokenizer):
    assert [found.tolist() for found in encode_sized(byte_tokenizer, "", 0)] == [[], []]


def test_a_tokenizer_without_offsets_gives_no_sizes(tmp_path):
    from transformers import ByT5Tokenizer

    tokens, sizes = encode_sized(ByT5Tokenizer(), MIXED, None)
    assert len(tokens) == 21 and sizes is None


def rounded_up(ends, text):
    """Each byte place moved to the end of the character it lies in."""
    borders = np.cumsum([0, *(len(character.encode()) for character in text)])
    return borders[np.searchsorted(borders, ends)].tolist()


@given(text=st.text() | st.text(alphabet=" \n\tabé日🙂()_1"))
def test_sizes_of_byte_level_bpe_are_the_bytes_that_its_tokens_spell(text, byte_tokenizer, built_in):
    for tokenizer in (byte_tokenizer, built_in):
        tokens, sizes = encode_sized(tokenizer, text, None)
        assert sizes.sum() == len(text.encode())
        spelt = [len(token) for token in tokenizer.convert_ids_to_tokens(tokens.tolist())]  # one letter a byte
        assert np.cumsum(sizes).tolist() == rounded_up(np.cumsum(spelt, dtype=int), text)
        assert encode(tokenizer, text, None).tolist() == tokens.tolist()


# Documents in pieces


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A document that is read in pieces, and the same text whole."""
    monkeypatch.setattr(texts, "LARGE_FILE", 100)
    monkeypatch.setattr(texts, "PIECE", 64)
    text = f"<s>a bb {MIXED}\n" + "  a é \n" * 100
    (tmp_path / "a.txt").write_text(text)
    (document,) = read_documents(str(tmp_path / "a.txt"))
    assert len(list(document.pieces())) > 10
    return document, text


def test_a_document_in_pieces_has_the_tokens_and_sizes_of_its_text(large, byte_tokenizer):
    document, text = large
    for tokenizer in (byte_tokenizer, words()):
        assert encode(tokenizer, document, 0).tolist() == encode(tokenizer, text, 0).tolist()
        for piecewise, whole in zip(
            encode_sized(tokenizer, document, 0), encode_sized(tokenizer, text, 0), strict=True
        ):
            assert piecewise.tolist() == whole.tolist()


@pytest.mark.parametrize("most", [0, 1, 5, 40, 64, 10_000])
def test_the_first_tokens_are_those_of_the_whole(large, byte_tokenizer, most):
    document, text = large
    whole = [found.tolist()[:most] for found in encode_sized(byte_tokenizer, text, 0)]
    for source in large:
        assert [found.tolist() for found in encode_sized(byte_tokenizer, source, 0, most)] == whole
        assert encode(byte_tokenizer, source, 0, most).tolist() == whole[0]


def test_no_piece_is_read_past_the_tokens_that_were_asked_for(byte_tokenizer):
    class Watched(Document):
        def pieces(self):
            yield "<s>" + "a" * 10
            yield "b" * 10
            pytest.fail("a piece too many")

    document = Watched(name="a", text="")
    assert len(encode(byte_tokenizer, document, 0, 10)) == 10
    assert (
        len(encode(byte_tokenizer, document, 0, 11)) == 11
    )  # the BOS that is left out was one of 11 in the first piece
    assert len(encode_sized(byte_tokenizer, document, 0, 19)[1]) == 19
