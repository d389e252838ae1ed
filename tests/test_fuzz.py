"""Damaged and hostile checkpoints, made up by hypothesis: a plan or a short refusal, and nothing broken written.

What is written is read by stock transformers, the outside judge.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import ropext
from ropext.errors import RopextError
from tests.bare import CONFIG, bare_checkpoint, with_header

REQUESTS = [{"method": name} for name in ("linear", "ntk", "dynamic", "yarn", "ntk-by-parts", "llama3", "progressive")]
REQUESTS += [{"method": "abf", "theta": 1e6}, {"method": "yarn", "extend_scaling": True}]
REQUESTS += [{"method": "ntk", "replace_scaling": True, "native_length": 128}]
ROPE_KEYS = ["rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"]
OTHER_KEYS = ["head_dim", "sliding_window", "use_sliding_window", "layer_types", "text_config", "auto_map", "my_key"]
OTHER_KEYS += ["seq_length", "n_positions", "n_ctx", "original_max_position_embeddings", "quantization_config"]
BLOCK_KEYS = ["type", "rope_type", "factor", "rope_theta", "original_max_position_embeddings", "attention_factor"]
BLOCK_KEYS += ["short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "mrope_section"]
BLOCK_KEYS += ["full_attention", "sliding_attention", "partial_rotary_factor", "mscale", "truncate", "x"]
TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "su", "mrope", "ntk", "proportional"]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt_neox", "falcon", "gpt2", "no_such_type"]

numbers = st.one_of(
    st.integers(-2, 300),
    st.sampled_from([2**31, 2**63, -(2**70), 10**400, 256.0, 0.5, 1e308, -1e-308, math.nan, math.inf, -math.inf]),
    st.floats(),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=4), st.sampled_from(TYPES))
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
blocks = st.dictionaries(st.sampled_from(BLOCK_KEYS), scalars | st.sampled_from(TYPES) | junk, max_size=5)
edits = st.dictionaries(
    st.sampled_from(ROPE_KEYS * 3 + OTHER_KEYS + list(CONFIG)), st.one_of(junk, blocks, blocks), min_size=1, max_size=3
)
quick = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)  # a gate: the same each time
fresh = itertools.count()


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def outcome(source: Path, **options: object) -> Path | None:
    """Where the patch of a source was written; None where it was refused, which must be short and leave nothing."""
    out = source.with_name(f"p{next(fresh)}")
    try:
        ropext.patch(str(source), **({"method": "ntk", "factor": 4.0, "out": out, "verify": False} | options))
    except RopextError as error:
        assert len(str(error).splitlines()) <= 2 and len(str(error)) < 1000, error
        assert not out.exists()
        return None
    return out


def loads(folder: Path) -> bool:
    """Whether stock transformers reads the config."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # whatever it raises, the answer is no
        return False
    return True


def edited(tmp_path: Path, changes: dict[str, object], drop: set[str], model_type: str) -> Path:
    source = tmp_path / f"m{next(fresh)}"
    bare_checkpoint(source, **({"model_type": model_type} | changes))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in drop}))
    return source


@given(
    changes=edits,
    drop=st.sets(st.sampled_from(list(CONFIG)), max_size=1),
    model_type=st.sampled_from(["llama"] * 8 + FAMILIES),
    request=st.sampled_from(REQUESTS),
)
@example(changes={"rope_scaling": {"type": math.nan}}, drop=set(), model_type="llama", request=REQUESTS[0])
@settings(quick, max_examples=300)
def test_no_config_ends_in_a_traceback_and_what_loads_still_loads_when_patched(
    tmp_path_factory, changes, drop, model_type, request
):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    source = edited(tmp_path, changes, drop, model_type)
    out = outcome(source, **request)
    if out is not None and not loads(out):
        assert not loads(source), (source / "config.json").read_text()
    shutil.rmtree(tmp_path)


@given(changes=edits, model_type=st.sampled_from(["llama"] * 4 + FAMILIES), request=st.sampled_from(REQUESTS))
@settings(quick, max_examples=40)
def test_whatever_is_written_with_verification_is_read_by_stock_transformers(
    tmp_path_factory, changes, model_type, request
):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    out = outcome(edited(tmp_path, changes, set(), model_type), verify=True, **request)
    assert out is None or loads(out)
    shutil.rmtree(tmp_path)


NAMES = ["config.json", "tokenizer_config.json", "ropext.json", "model.safetensors.index.json"]
NAMES += ["model-00001-of-00002.safetensors"]


@given(
    name=st.sampled_from(NAMES),
    at=st.floats(0, 1),
    gone=st.integers(0, 40),
    put=st.binary(max_size=6)
    | st.sampled_from([b'"a": 1, "a": 2,', b"{" * 50, b"[" * 3000, b"\xff", b"\xef\xbb\xbf", b"9" * 5000]),
    cut=st.booleans(),
)
@settings(quick, max_examples=200)
def test_bytes_changed_anywhere_in_any_file_end_in_no_traceback(tmp_path_factory, name, at, gone, put, cut):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    source = bare_checkpoint(tmp_path / "m", shards=2)
    if name == "ropext.json":
        source = outcome(source)
    raw = (source / name).read_bytes()
    start = int(at * len(raw))
    (source / name).write_bytes(raw[:start] + put + (b"" if cut else raw[start + gone :]))
    out = outcome(source)
    if out is not None:
        json.loads((out / "config.json").read_bytes())
    shutil.rmtree(tmp_path)


paths = st.sampled_from(
    ["../x", "/etc/passwd", "..", ".", "", "\0", "a\\b", "\ud800", "x" * 5000, "sub/../x", "~", "CON"]
)


@given(weight_map=st.dictionaries(st.text(max_size=3), paths | junk | st.sampled_from(NAMES), max_size=4))
@settings(quick, max_examples=100)
def test_no_index_leads_out_of_the_directory_or_to_a_traceback(tmp_path_factory, weight_map):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    source = bare_checkpoint(tmp_path / "m", shards=2)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert outcome(source) is None
    shutil.rmtree(tmp_path)


header_entries = st.dictionaries(
    st.text(max_size=3) | st.just("__metadata__"),
    junk
    | st.fixed_dictionaries(
        {
            "dtype": junk | st.just("F32"),
            "shape": st.lists(numbers, max_size=3) | junk,
            "data_offsets": st.lists(numbers) | junk,
        }
    ),
    max_size=3,
)


@given(header=header_entries)
@example(header={"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}})
@settings(quick, max_examples=150)
def test_no_safetensors_header_ends_in_a_traceback(tmp_path_factory, header):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    source = bare_checkpoint(tmp_path / "m")
    (source / "model.safetensors").write_bytes(with_header(json.dumps(header).encode(), bytes(32)))
    out = outcome(source)
    if out is not None:
        from safetensors import safe_open

        with safe_open(out / "model.safetensors", framework="pt") as file:
            assert set(file.keys()) == set(header) - {"__metadata__"}
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("depth", [50, 900, 100_000])
def test_deep_nesting_in_any_file_ends_in_no_traceback(tmp_path, name, depth):
    source = bare_checkpoint(tmp_path / "m", shards=2)
    raw = (source / name).read_text()
    nested = '{"a":' * depth + "1" + "}" * depth
    (source / name).write_text(raw.rstrip().removesuffix("}") + f', "deep": {nested}}}')
    for verify in (False, True):
        out = outcome(source, verify=verify)
        assert out is None or loads(out)
