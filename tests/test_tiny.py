"""The test checkpoints are what they claim to be, to both transformers majors. Theta 10000, 16 rotary dimensions."""

from __future__ import annotations

import json

import pytest

from tests.tiny import ABSENT, FAMILIES, make_checkpoint

UNSCALED = [10000 ** (-2 * pair / 16) for pair in range(8)]
ROTARY = {"llama": 16, "mistral": 16, "qwen2": 16, "qwen3": 16, "gemma": 16, "phi3": 16, "gpt_neox": 4, "falcon": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    stretched = {"rope_type": "linear", "factor": 0.25}
    return {family: make_checkpoint(root / family, family) for family in ROTARY} | {
        "newer layout": make_checkpoint(root / "newer", layout="new", rope_parameters=linear),
        "dynamic": make_checkpoint(root / "dynamic", rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
        "complained of": make_checkpoint(root / "stretched", rope_scaling=stretched),
        "complained of again": make_checkpoint(root / "again", rope_scaling=stretched),
    }


@pytest.fixture(scope="module")
def read_by_5(folders, this_reader):
    return dict(zip(folders, this_reader([1024, 256], [*folders.values()]), strict=True))


@pytest.fixture(scope="module")
def read_by_4(folders, other_reader):
    return dict(zip(folders, other_reader([1024, 256], [*folders.values()]), strict=True))


@pytest.mark.parametrize(("readings", "major"), [("read_by_5", "5"), ("read_by_4", "4")])
def test_every_rotary_family_has_the_plain_table_in_both_readers(readings, major, request):
    readings = request.getfixturevalue(readings)
    for family, dims in ROTARY.items():
        expected = [10000 ** (-2 * pair / dims) for pair in range(dims // 2)]
        assert readings[family].table(256) == pytest.approx(expected, rel=1e-6), family
        assert set(readings[family].scaling[256].values()) == {1.0}
        assert readings[family].version.split(".")[0] == major
        assert not readings[family].log, family


def test_the_newer_layout_is_read_right_by_5_and_unscaled_by_4(folders, read_by_5, read_by_4):
    assert "rope_theta" not in json.loads((folders["newer layout"] / "config.json").read_text())
    assert read_by_5["newer layout"].table(256) == pytest.approx([w / 4 for w in UNSCALED], rel=1e-6)
    assert read_by_4["newer layout"].table(256) == pytest.approx(UNSCALED, rel=1e-6)


@pytest.mark.parametrize("readings", ["read_by_5", "read_by_4"])
def test_a_reader_shows_what_changes_with_the_length_and_what_transformers_complains_of(readings, request):
    readings = request.getfixturevalue(readings)
    theta = 10000 * (4 * 1024 / 256 - 3) ** (16 / 14)
    longer = [theta ** (-2 * pair / 16) for pair in range(8)]
    assert readings["dynamic"].table(1024) == pytest.approx(longer, rel=1e-5)
    assert readings["dynamic"].table(256) == pytest.approx(UNSCALED, rel=1e-6)
    for name in ("complained of", "complained of again"):
        assert any("factor" in line for line in readings[name].log), name


@pytest.mark.parametrize(("bos", "first"), [("adds", 1), ("has", 0), ("none", 0)])
def test_every_text_becomes_bytes_and_comes_back(tmp_path, bos, first):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path, bos=bos))
    text = "def f(x):\n\treturn 'naïve — 漢字'  # two  spaces"
    ids = tokenizer(text)["input_ids"]
    assert ids[:first] == [tokenizer.bos_token_id] * first
    assert (tokenizer.bos_token is None) == (bos == "none")
    assert len(ids) == first + len(text.encode()) and max(ids) < 320
    assert tokenizer.decode(ids[first:]) == text
    assert tokenizer.model_max_length == 256


def test_shards_hold_the_same_tensors_and_overrides_reach_the_file_alone(tmp_path):
    from safetensors.torch import load_file

    whole = make_checkpoint(tmp_path / "whole")
    split = make_checkpoint(tmp_path / "split", shards=2, rope_scaling=ABSENT, max_position_embeddings=512)
    files = sorted(split.glob("*.safetensors"))
    index = json.loads((split / "model.safetensors.index.json").read_text())
    parts = {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in parts.items()} and len(files) == 2
    tensors = load_file(whole / "model.safetensors")
    assert tensors.keys() == parts.keys() and all(tensors[name].equal(parts[name][1]) for name in parts)
    config = json.loads((split / "config.json").read_text())
    assert "rope_scaling" not in config and config["max_position_embeddings"] == 512
    assert json.loads((split / "tokenizer_config.json").read_text())["model_max_length"] == 512


def test_a_checkpoint_is_the_same_bytes_every_time(tmp_path):
    once, again = make_checkpoint(tmp_path / "once"), make_checkpoint(tmp_path / "again")
    assert len(files := sorted(path.name for path in once.iterdir())) == 5
    assert all((once / file).read_bytes() == (again / file).read_bytes() for file in files)


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_whole_and_in_its_own_dtype(tmp_path, family, layout):
    from transformers import AutoModelForCausalLM

    dtype = {"old": "torch_dtype", "new": "dtype"}[layout]
    folder = make_checkpoint(tmp_path, family, layout=layout, **{dtype: "bfloat16"})
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert str(model.dtype) == "torch.bfloat16"
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 256
