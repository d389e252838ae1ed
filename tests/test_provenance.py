"""ropext.json holds what makes a patch explainable and undoable, and lineage follows it back to the source."""

from __future__ import annotations

import hashlib
import json
import shutil

import ropext
from ropext.checkpoint import open_checkpoint
from ropext.provenance import lineage, source_path, weights_sha256
from tests.bare import bare_checkpoint, edit_json


def patched(source, out, **options):
    ropext.patch(str(source), **({"method": "ntk", "factor": 4.0, "out": out, "verify": False} | options))
    return open_checkpoint(out)


def test_the_record_names_source_method_numbers_and_findings(tmp_path):
    source = bare_checkpoint(tmp_path / "m")
    record = patched(source, tmp_path / "p", method="progressive", inner="linear").record
    assert (record["schema"], record["kind"], record["version"]) == (1, "patch", ropext.__version__)
    assert (record["window"], record["native_length"]) == (1024, 256)
    rope = {"method": "progressive", "inner": "linear", "factor": 4.0, "native_length": 256, "target_length": 1024}
    assert rope.items() <= record["rope"].items()
    assert record["rope"]["theta_before"] == record["rope"]["theta"] == 10000.0
    assert [found["code"] for found in record["findings"]] == ["RPX007", "RPX054"]
    assert record["config_changes"]["max_position_embeddings"] == [256, 1024]
    assert record["source"]["model"] == str(source)


def test_the_original_bytes_of_each_changed_file_are_kept(tmp_path):
    source = bare_checkpoint(tmp_path / "m", note="naïve 漢字")
    raw = (source / "config.json").read_bytes().replace(b"\n", b"\r\n")
    (source / "config.json").write_bytes(raw)
    record = patched(source, tmp_path / "p").record
    kept = {name: text.encode() for name, text in record["original_files"].items()}
    assert kept == {name: (source / name).read_bytes() for name in ("config.json", "tokenizer_config.json")}


def test_hashes_of_small_files_and_headers_belong_to_the_source(tmp_path):
    source = bare_checkpoint(tmp_path / "m", shards=2)
    described = patched(source, tmp_path / "p").record["source"]
    for name, digest in described["files"].items():
        assert digest == hashlib.sha256((source / name).read_bytes()).hexdigest()
    for name, file in described["weights"].items():
        raw = (source / name).read_bytes()
        header = raw[: 8 + int.from_bytes(raw[:8], "little")]
        assert file == {"size": len(raw), "header_sha256": hashlib.sha256(header).hexdigest()}
    assert len(described["weights"]) == 2


def test_an_unchanged_tokenizer_is_not_recorded_as_changed(tmp_path):
    record = patched(bare_checkpoint(tmp_path / "m", limit=10**30), tmp_path / "p").record
    assert set(record["original_files"]) == {"config.json"}


def test_the_hash_of_the_weights_changes_with_one_byte_of_them(tmp_path):
    source = open_checkpoint(bare_checkpoint(tmp_path / "m", shards=2))
    before = weights_sha256(source)
    assert before == weights_sha256(patched(source.path, tmp_path / "p"))
    shard = tmp_path / "m" / sorted(source.weight_files)[-1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    assert weights_sha256(source) != before


def test_lineage_runs_from_the_source_to_the_checkpoint(tmp_path):
    source = bare_checkpoint(tmp_path / "m")
    result = patched(source, tmp_path / "p")
    assert lineage(result, tmp_path) == [("source", source), ("patched", tmp_path / "p")]
    assert lineage(open_checkpoint(source), tmp_path) == [("source", source)]


def test_lineage_stops_where_the_source_is_gone(tmp_path):
    result = patched(bare_checkpoint(tmp_path / "m"), tmp_path / "p")
    shutil.rmtree(tmp_path / "m")
    assert source_path(result, tmp_path) is None
    assert lineage(result, tmp_path) == [("patched", tmp_path / "p")]


def test_lineage_ends_when_a_record_names_itself(tmp_path):
    patched(bare_checkpoint(tmp_path / "m"), tmp_path / "p")
    source = json.loads((tmp_path / "p" / "ropext.json").read_text())["source"]
    edit_json(tmp_path / "p" / "ropext.json", source=source | {"model": str(tmp_path / "p")})
    assert lineage(open_checkpoint(tmp_path / "p"), tmp_path) == [("patched", tmp_path / "p")]


def test_the_built_in_checkpoint_is_recorded_by_name_and_found_where_the_package_lies(tmp_path):
    patched(bare_checkpoint(tmp_path / "m"), tmp_path / "p")
    source = json.loads((tmp_path / "p" / "ropext.json").read_text())["source"]
    edit_json(tmp_path / "p" / "ropext.json", source=source | {"model": "built-in"})
    built_in = bare_checkpoint(tmp_path / "package")
    assert lineage(open_checkpoint(tmp_path / "p"), built_in)[0] == ("source", built_in)
