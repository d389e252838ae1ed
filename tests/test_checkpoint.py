"""What is read from a directory, and everything that is refused: damage, pickles, links out, disagreement."""

from __future__ import annotations

import json
import struct

import pytest

from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused, RopextError, UsageError
from tests.bare import NAMES, bare_checkpoint, edit_json, snapshot, with_header, write_safetensors

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


def test_tensor_names_shapes_and_dtypes_come_from_the_headers(tmp_path):
    checkpoint = open_checkpoint(bare_checkpoint(tmp_path))
    assert set(checkpoint.tensors) == set(NAMES)
    tensor = checkpoint.tensors[NAMES[0]]
    assert (tensor.dtype, tensor.shape, tensor.file) == ("F32", (2, 4), "model.safetensors")
    assert checkpoint.weight_files["model.safetensors"].size == (tmp_path / "model.safetensors").stat().st_size
    assert checkpoint.tokenizer_config["model_max_length"] == 256 and checkpoint.record is None


def test_shards_are_read_through_their_index(tmp_path):
    checkpoint = open_checkpoint(bare_checkpoint(tmp_path, shards=2))
    assert set(checkpoint.tensors) == set(NAMES) and len(checkpoint.weight_files) == 2


def test_opening_changes_nothing(tmp_path):
    before = snapshot(bare_checkpoint(tmp_path, shards=2))
    open_checkpoint(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_checkpoint_needs_no_tokenizer(tmp_path):
    bare_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_checkpoint(tmp_path).tokenizer_config == {}


@pytest.mark.parametrize("name", ["absent", "org/model", "x" * 300, "model.safetensors"])
def test_a_model_that_is_no_directory_is_wrong_usage(tmp_path, name):
    bare_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="a MODEL is a checkpoint directory"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "ropext.json"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "readable JSON"),
        (b"{", "readable JSON"),
        (b"not json", "readable JSON"),
        (b'{"rope_theta": 1, "rope_theta": 2}', "'rope_theta' stands twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' stands twice"),
        (b'{"a": "\xff"}', "readable JSON"),
        ('{"a": 1}'.encode("utf-16"), "readable JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "readable JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "readable JSON"),
        (b'{"a":' * 100_000, "readable JSON"),
        (b"[]", "holds a list"),
        (b'"text"', "holds a str"),
        (b"null", "holds a NoneType"),
    ],
)
def test_a_json_file_that_is_no_plain_object_is_refused_in_one_or_two_lines(tmp_path, name, content, reason):
    bare_checkpoint(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=reason) as refusal:
        open_checkpoint(tmp_path)
    assert name in str(refusal.value) and len(str(refusal.value).splitlines()) == 1


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"needs config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_directory_where_a_file_should_be_is_an_error_without_traceback(tmp_path, name):
    bare_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(RopextError, match="readable"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path, name):
    bare_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(Refused, match=rf"a pickle can run code: found {name}\. Convert it with .*save_pretrained"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    bare_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(Refused, match="needs safetensors weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\\b"])
def test_an_index_that_leads_out_of_the_directory_is_refused(tmp_path, shard):
    folder = bare_checkpoint(tmp_path / "m", shards=2)
    for target in (tmp_path / "x.safetensors", folder / "sub" / "x.safetensors"):
        target.parent.mkdir(exist_ok=True)
        write_safetensors(target, ["elsewhere"])
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=weight_map | {"elsewhere": shard})
    with pytest.raises(Refused, match="own directory: .* names"):
        open_checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, [], "x", {"a": 1}, {"a": None}, {}])
def test_an_index_without_a_map_of_shards_is_refused(tmp_path, weight_map):
    edit_json(bare_checkpoint(tmp_path, shards=2) / INDEX, weight_map=weight_map)
    with pytest.raises(Refused, match=INDEX):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_refused_by_name(tmp_path):
    (bare_checkpoint(tmp_path, shards=2) / SHARD).unlink()
    with pytest.raises(Refused, match=f"'{SHARD}' is missing"):
        open_checkpoint(tmp_path)


def test_a_single_file_beside_shards_is_refused_as_stale(tmp_path):
    write_safetensors(bare_checkpoint(tmp_path, shards=2) / "model.safetensors", NAMES)
    with pytest.raises(Refused, match="one file or shards"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_safetensors(bare_checkpoint(tmp_path, shards=2) / SHARD, NAMES)
    with pytest.raises(Refused, match="a tensor is stored once"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_tensor_which_its_shard_lacks_is_refused(tmp_path):
    index = bare_checkpoint(tmp_path, shards=2) / INDEX
    edit_json(index, weight_map=json.loads(index.read_text())["weight_map"] | {"lm_head.weight": SHARD})
    with pytest.raises(Refused, match=r"index and shards must agree: .*'lm_head.weight'"):
        open_checkpoint(tmp_path)


def test_weights_cut_short_at_any_point_are_refused(tmp_path):
    weights = bare_checkpoint(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(Refused, match="safetensors"):
            open_checkpoint(tmp_path)
    weights.write_bytes(whole + b"\0")
    with pytest.raises(Refused, match="as long as its header says"):
        open_checkpoint(tmp_path)


ENTRY = '{"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}'


@pytest.mark.parametrize(
    "header",
    [
        b"{}}",
        b"not json at all",
        b"[1, 2]",
        b"null",
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": 8, "data_offsets": [0, 32]}}',
        b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 32]}}',
        b'{"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 1e999]}}',
        b'{"a": {"dtype": "F32", "shape": [8], "data_offsets": {"1": 32}}}',
        f'{{"a": {ENTRY}, "a": {ENTRY}}}'.encode(),
        b'{"\xff": 1}',
        b'{"a":' * 50_000,
    ],
)
def test_a_damaged_header_is_refused_without_a_traceback(tmp_path, header):
    (bare_checkpoint(tmp_path) / "model.safetensors").write_bytes(with_header(header, bytes(32)))
    with pytest.raises(Refused, match="safetensors header of .* cannot be read"):
        open_checkpoint(tmp_path)


def test_a_header_length_beyond_the_file_is_refused_unread(tmp_path):
    (bare_checkpoint(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + bytes(100))
    with pytest.raises(Refused, match="starts with its header"):
        open_checkpoint(tmp_path)


def test_another_header_is_noticed_by_its_hash(tmp_path):
    one = open_checkpoint(bare_checkpoint(tmp_path / "one")).weight_files["model.safetensors"]
    same = open_checkpoint(bare_checkpoint(tmp_path / "same")).weight_files["model.safetensors"]
    other = bare_checkpoint(tmp_path / "other", metadata={"format": "pt", "extra": "x"})
    assert one == same != open_checkpoint(other).weight_files["model.safetensors"]


@pytest.mark.parametrize(
    "change",
    [{"schema": 2}, {"kind": "other"}, {"window": "1024"}, {"native_length": None}, {"rope": []}, {"source": {}}],
)
def test_a_record_that_ropext_did_not_write_is_refused(tmp_path, change):
    record = {"schema": 1, "kind": "patch", "window": 1024, "native_length": 256, "rope": {}, "source": {"model": "x"}}
    path = bare_checkpoint(tmp_path) / "ropext.json"
    path.write_text(json.dumps(record))
    assert open_checkpoint(tmp_path).record == record
    edit_json(path, **change)
    with pytest.raises(Refused, match="must be what ropext of schema 1 wrote"):
        open_checkpoint(tmp_path)
