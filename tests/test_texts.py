"""The built-in corpus: which modules it takes, how it splits them, and what counts as a copy of a held-out one."""

from __future__ import annotations

import pytest

from ropext.errors import RopextError
from ropext.texts import Document, built_in, is_held_out, read_documents, standard_library, without_copies


@pytest.fixture(scope="module")
def splits():
    return {split: list(built_in(split)) for split in ("training", "held-out")}


def test_the_split_of_a_module_never_changes():
    # First byte of the sha256, by `printf %s NAME | sha256sum`: 14 00 b9 0a are divisible by 5; ab bd 57 f8 84 are not.
    assert all(map(is_held_out, ["inspect", "collections", "heapq", "logging"]))
    assert not any(map(is_held_out, ["argparse", "ast", "json.decoder", "typing", "os"]))


def test_about_a_fifth_of_the_modules_is_held_out():
    names = [name for name, _ in standard_library()]
    assert len(names) > 300
    assert 0.15 < sum(map(is_held_out, names)) / len(names) < 0.25


def test_training_and_held_out_share_no_module_and_together_are_all(splits):
    training, held_out = ({document.name for document in splits[split]} for split in ("training", "held-out"))
    with_text = {name for name, path in standard_library() if path.read_text(errors="replace").strip()}
    assert not training & held_out
    assert training | held_out == with_text


def test_packages_that_are_left_out_are_absent_at_every_depth():
    names = [name for name, _ in standard_library()]
    for package in ("test", "tests", "idlelib", "tkinter", "lib2to3", "pydoc_data", "site-packages"):
        assert not [name for name in names if package in name.split(".")], package
    assert {"argparse", "json", "json.decoder", "asyncio.base_events"} < set(names)


def test_the_corpus_is_real_text_in_a_stable_order_and_some_of_it_is_long(splits):
    for documents in splits.values():
        names = [document.name for document in documents]
        assert names == sorted(set(names))
        assert all(document.text.strip() for document in documents)
        assert max(len(document.text) for document in documents) > 50_000


def test_a_document_is_known_by_its_text_alone():
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert Document(name="a", text="abc").sha256 == Document(name="b", text="abc").sha256 == known
    assert len(Document(name="lone surrogate", text="\ud800").sha256) == 64


def source(*numbers):
    return "\n".join(f"    this_is_line_number_{number} = compute({number})" for number in numbers)


HELD_OUT = [Document(name="held", text=source(*range(20))), Document(name="other", text=source(*range(100, 120)))]


def test_copies_of_a_held_out_module_are_dropped_even_when_edited():
    copies = [
        Document(name="vendored", text=source(*range(20))),
        Document(name="backport", text=source(*range(14), *range(50, 60))),
        Document(name="indented", text=source(*range(20)).replace("    ", "        ")),
        Document(name="excerpt", text=source(*range(15, 20))),
    ]
    assert list(without_copies(copies, HELD_OUT)) == []


def test_what_shares_half_of_its_lines_or_less_is_kept():
    own = [
        Document(name="half", text=source(*range(10), *range(50, 60))),
        Document(name="half of two", text=source(*range(8), *range(100, 108), *range(50, 53))),
        Document(name="unrelated", text=source(*range(200, 220))),
        Document(name="short lines", text="import os\n\nx = 1\n"),
    ]
    assert list(without_copies(own, HELD_OUT)) == own


def test_lines_that_any_file_may_hold_make_no_copy():
    boilerplate = "import os\nimport sys\n\n\ndef main():\n    return 0\n"
    mine = Document(name="mine", text=boilerplate + source(300))
    assert list(without_copies([mine], [Document(name="held", text=boilerplate + source(301))])) == [mine]


def test_a_row_with_half_a_surrogate_pair_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    with pytest.raises(RopextError, match="line 2 is not"):
        list(read_documents(str(tmp_path / "rows.jsonl")))
