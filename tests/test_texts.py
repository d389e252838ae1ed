"""Documents of every kind of source, read as they are asked for; the built-in corpus, its split and copies of it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tracemalloc

import pytest

from ropext import texts
from ropext.errors import RopextError, UsageError
from ropext.texts import (
    Document,
    LargeText,
    built_in,
    is_held_out,
    read_documents,
    standard_library,
    without_copies,
)


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


# Files


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, columns, **options):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, **options)
    return path


def read(source, text_field="text"):
    return [(document.name, document.text) for document in read_documents(str(source), text_field)]


def test_every_row_of_a_parquet_file_is_a_document_named_by_its_number(tmp_path):
    path = write_parquet(tmp_path / "a.PARQUET", {"n": [1, 2, 3], "body": ["one", "", "日本"]}, row_group_size=2)
    assert read(path, "body") == [(f"{path}:1", "one"), (f"{path}:2", ""), (f"{path}:3", "日本")]


def test_text_columns_of_every_layout_are_read(tmp_path):
    import pyarrow as pa

    words = pa.array(["one", "two", "one"])
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        path = write_parquet(tmp_path / "a.parquet", {"text": words.cast(kind)})
        assert [text for _, text in read(path)] == ["one", "two", "one"], kind


def test_a_folder_gives_files_of_all_kinds_by_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "c.md").write_text("last")
    (tmp_path / "d.csv").write_text("left out")
    write_jsonl(tmp_path / "b" / "rows.jsonl", {"text": "two"}, {"text": "three"})
    write_parquet(tmp_path / "a.parquet", {"text": ["one"]})
    assert [text for _, text in read(tmp_path)] == ["one", "two", "three", "last"]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("{", "no JSON object"),
        ('["text"]', "no JSON object"),
        ("[" * 100_000, "no JSON object"),
        ('{"body": "x", "id": 1}', "its fields are 'body', 'id'"),
        ("{}", "its fields are none"),
        ('{"text": null}', "found None"),
        ('{"text": 5}', "found 5"),
        ('{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_row_without_text_is_named_with_what_it_holds(tmp_path, row, found):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{row}\n')
    rows = read_documents(str(path))
    assert next(rows).text == "fine"
    with pytest.raises(RopextError, match="line 2 is not") as caught:
        next(rows)
    assert found in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "number", "found"), [(["fine"] * 20 + [None, "fine"], 21, "None"), ([5, 6], 1, "5"), ([b"x"], 1, "b'x'")]
)
def test_a_parquet_row_that_is_no_text_is_named(tmp_path, rows, number, found):
    path = write_parquet(tmp_path / "a.parquet", {"text": rows})
    with pytest.raises(RopextError, match=f"row {number} is not .found {found}"):
        read(path)


def test_a_parquet_row_that_is_no_utf8_is_an_error(tmp_path):
    import pyarrow as pa

    damaged = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    path = write_parquet(tmp_path / "a.parquet", {"text": damaged})
    with pytest.raises(RopextError, match="fails after 0 rows.*utf-8"):
        read(path)


def test_a_column_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"body": ["x"], "id": [1]})
    with pytest.raises(UsageError, match="has 'body', 'id'. Name one of them with --text-field"):
        read_documents(str(path))  # at once, before a model is loaded


def test_a_parquet_file_that_is_cut_off_is_an_error_at_once(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", "b"]})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RopextError, match="a.parquet fails after 0 rows"):
        read_documents(str(path))


def test_a_parquet_file_that_is_damaged_within_is_an_error_after_the_rows_that_can_be_read(tmp_path):
    import pyarrow.parquet as pq

    words = [f"word {number}" for number in range(1, 21)]
    path = write_parquet(tmp_path / "a.parquet", {"text": words}, row_group_size=1, use_dictionary=False)
    start = pq.read_metadata(path).row_group(18).column(0).data_page_offset
    whole = path.read_bytes()
    path.write_bytes(whole[:start] + b"\xff" * 16 + whole[start + 16 :])
    rows = read_documents(str(path))
    assert [next(rows).text for _ in range(16)] == words[:16]  # those read together with a damaged one are lost
    with pytest.raises(RopextError, match="a.parquet fails after 16 rows"):
        next(rows)


@pytest.mark.parametrize("name", ["missing.txt", "org/missing.JSONL", "rows.parquet", "a/b/c", "./a/b", "wikitext", ""])
def test_a_name_of_nothing_is_refused_without_asking_a_network(name, monkeypatch):
    monkeypatch.setattr(texts, "_splits", pytest.fail)
    with pytest.raises(UsageError, match="is no file or folder here"):
        read_documents(name)


def test_a_folder_that_exists_is_never_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_splits", pytest.fail)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for source, message in (("org/name", "has none"), ("org/name:config", "no name of a data set")):
        with pytest.raises(UsageError, match=message):
            read_documents(source)


def test_a_file_of_another_kind_is_answered_with_the_kinds(tmp_path):
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(UsageError, match=r"takes .txt, .md, .py, .jsonl, .parquet files: found a.csv"):
        read_documents(str(tmp_path / "a.csv"))


# Larger than the memory


def test_jsonl_is_held_a_row_at_a_time(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", *[{"text": "word " * 4000}] * 400)  # 8 MB
    tracemalloc.start()
    try:
        assert sum(len(document.text) for document in read_documents(str(path))) == 8_000_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("groups", [1, 8])
def test_parquet_is_held_a_few_rows_at_a_time_however_its_row_groups_are_cut(tmp_path, groups):
    import pyarrow as pa

    rows = [f"{number} " * 5000 for number in range(100_000, 100_400)]  # 14 MB
    options = {"compression": "NONE", "use_dictionary": False, "write_batch_size": 8, "data_page_size": 2**16}
    path = write_parquet(tmp_path / "a.parquet", {"text": rows}, row_group_size=400 // groups, **options)
    before, most = pa.total_allocated_bytes(), 0
    for document, row in zip(read_documents(str(path)), rows, strict=True):
        assert document.text == row
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 4_000_000


def test_only_the_text_column_of_a_parquet_file_is_read(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    asked = []
    plain = pq.ParquetFile.iter_batches

    def noted(*args, **options):
        for batch in plain(*args, **options):
            asked.append(batch.schema.names)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    read(write_parquet(tmp_path / "a.parquet", {"image": [b"x"], "text": ["a"], "text2": ["b"]}))
    assert asked == [["text"]]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(texts, "LARGE_FILE", 200)
    monkeypatch.setattr(texts, "PIECE", 64)


@pytest.mark.parametrize(
    ("line", "end"), [("a line of text", "\n"), ("naïve 日本語 🙂", "\n"), ("dos", "\r\n"), ("x" * 50, "\n"), ("y", "")]
)
def test_a_large_text_comes_in_pieces_that_are_the_whole(tmp_path, small_pieces, line, end):
    path = tmp_path / "a.txt"
    path.write_text((line + end) * 250, newline="")
    (document,) = read_documents(str(path))
    whole = Document(name=document.name, text=path.read_text())  # line ends as for a small file
    pieces = list(document.pieces())
    assert isinstance(document, LargeText) and document.name == str(path)
    assert "".join(pieces) == document.text == whole.text and document.sha256 == whole.sha256
    assert len(pieces) > 3 and max(map(len, pieces)) <= 64
    if len(line + end) <= 32 and end:
        assert all(piece.endswith("\n") for piece in pieces)


def test_a_text_at_the_bound_is_one_piece(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_text("a line\n" * 28 + "four")
    (document,) = read_documents(str(tmp_path / "a.txt"))
    assert type(document) is Document and list(document.pieces()) == [document.text] and len(document.text) == 200


def test_a_large_text_is_read_no_further_than_asked_and_never_held(tmp_path):
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        for _ in range(3):
            file.write(b"a line of text\n" * 2**18)  # 12 MB
        file.write(b"\xff")
    (document,) = read_documents(str(path))
    tracemalloc.start()
    try:
        digest = hashlib.sha256()
        with pytest.raises(RopextError, match="a text must be readable UTF-8"):
            for piece in document.pieces():
                digest.update(piece.encode())
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
    assert next(document.pieces()).startswith("a line of text\n")
    with pytest.raises(RopextError, match="a text must be readable UTF-8"):
        document.sha256  # noqa: B018


# Hub data sets


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The library itself, with data sets in a folder in place of the hub: `hub("org/name", {file: content})`."""
    import datasets

    load = datasets.load_dataset
    folder = tmp_path / "hub"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config, streaming: load(str(folder / name), config, streaming=streaming)
    )

    def add(name, files):
        for file, rows in files.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(rows, str):
                path.write_text(rows)
            elif file.endswith(".parquet"):
                write_parquet(path, rows)
            else:
                write_jsonl(path, *rows)

    return add


def split(*words):
    return [{"text": word, "id": number} for number, word in enumerate(words)]


@pytest.mark.parametrize(
    ("splits", "taken"), [(["train"], "train"), (["train", "validation"], "validation"), (["train", "test"], "test")]
)
def test_the_split_of_a_data_set_is_its_only_one_else_test_else_validation(hub, splits, taken):
    hub("org/name", {f"{name}.jsonl": split(name, "more") for name in splits})
    assert read("org/name") == [(f"org/name:default:{taken}:1", taken), (f"org/name:default:{taken}:2", "more")]


def test_a_split_that_is_missing_is_answered_with_those_that_are_there(hub):
    card = "configs:\n- config_name: c\n  data_files:\n" + "".join(
        f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("one", "two")
    )
    files = {f"{name}.jsonl": split(name) for name in ("one", "two")}
    hub("org/name", files | {"README.md": f"---\n{card}---\n"})
    with pytest.raises(UsageError, match="org/name has no test or validation split. Its splits: 'one', 'two'"):
        read_documents("org/name")
    with pytest.raises(UsageError, match="org/name:c:test has no split 'test'. Its splits: 'one', 'two'"):
        read_documents("org/name:c:test")
    assert read("org/name:c:two") == [("org/name:c:two:1", "two")]
    with pytest.raises(UsageError, match="'org/name:d' cannot be opened .*d.* not found. Available: .'c'"):
        read_documents("org/name:d")


def test_of_several_configurations_one_must_be_named(hub):
    card = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("en", "de"))
    hub(
        "org/name", {"en.jsonl": split("hello"), "de.jsonl": split("hallo"), "README.md": f"---\nconfigs:\n{card}---\n"}
    )
    assert read("org/name:de") == [("org/name:de:train:1", "hallo")]
    with pytest.raises(UsageError, match="'org/name' cannot be opened.*'en', 'de'") as caught:
        read_documents("org/name")
    assert "\n" not in str(caught.value)


def test_rows_of_a_data_set_without_text_are_named(hub):
    hub("org/rows", {"test.jsonl": [{"text": "fine"}, {"text": None}]})
    with pytest.raises(RopextError, match="org/rows:default:test row 2 is not .found None"):
        read("org/rows")
    hub("org/columns", {"test.parquet": {"body": ["x"], "id": [1]}})
    with pytest.raises(RopextError, match="'body', 'id'.*--text-field"):
        read("org/columns")
    hub("org/damaged", {"test.jsonl": '{"text": "fine"}\n{"text'})
    with pytest.raises(RopextError, match="org/damaged:default:test could not be read after . rows"):
        read("org/damaged")


def test_a_data_set_is_read_a_row_at_a_time(hub):
    hub("org/name", {"a_test.parquet": {"text": ["one", "two"]}, "b_test.parquet": "no parquet"})
    rows = read_documents("org/name")
    assert [next(rows).text, next(rows).text] == ["one", "two"]
    with pytest.raises(RopextError, match="after 2 rows"):
        next(rows)


def test_code_of_a_data_set_is_not_run(hub, tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    hub("org/name", {"name.py": code})
    with pytest.raises(RopextError):
        read("org/name")
    assert not (tmp_path / "ran").exists()


def test_without_a_network_an_unknown_data_set_is_one_line():
    with pytest.raises(UsageError, match="'org/missing' is no file or folder here.*HF_HUB_OFFLINE is set"):
        read_documents("org/missing")


def test_a_hub_that_cannot_be_reached_is_one_line_and_no_traceback(tmp_path):
    with socket.socket() as closed:  # bound and not listening: it refuses every connection
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        program = (
            "import sys\nfrom ropext.errors import RopextError\nfrom ropext.texts import read_documents\n"
            "try: read_documents('org/missing')\n"
            "except RopextError as error: print(error, file=sys.stderr); sys.exit(error.exit_code)\n"
        )
        unset = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "no_proxy": "*"}
        done = subprocess.run([sys.executable, "-c", program], env=os.environ | unset, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "'org/missing' is no file or folder here, and could not be had from the hub" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
