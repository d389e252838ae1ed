"""`ropext check` asks every rule about a checkpoint as it lies there, and goes on whatever is wrong with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ropext
from ropext import safety
from ropext.checkpoint import open_checkpoint
from ropext.errors import UsageError
from ropext.facts import read_facts
from ropext.safety.readers import phase_error, rounded
from ropext.safety.rule import Case, judged
from ropext.safety.views import ORIGINAL
from tests.bare import ABSENT, bare_checkpoint, edit_json, with_header, write_json

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONG = {"max_position_embeddings": 1024, "limit": 1024}
NAN = float("nan")


def longrope(short=8, long=8, **more):
    lists = {"short_factor": [1.0] * short, "long_factor": [2.0] * long}
    return {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 256, **lists, **more}


def found(folder):
    return {finding.code: finding.severity for finding in ropext.check(str(folder)).findings}


def text(folder, code):
    lines = [f"{each.message}. {each.fix}" for each in ropext.check(str(folder)).findings if each.code == code]
    return "\n".join(lines)


def refused(*codes):
    return dict.fromkeys(codes, "refuse")


# What a hand-made config.json holds, and every rule that speaks about it.
CASES = {
    "plain": ({}, {}),
    "null scaling": ({"rope_scaling": None}, {}),
    "empty scaling": ({"rope_scaling": {}}, {}),
    "a good yarn block under its old name": (
        LONG | {"rope_scaling": {"type": "yarn"} | {k: v for k, v in YARN.items() if k != "rope_type"}},
        {},
    ),
    "a good yarn block in both layouts": (
        LONG | {"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 10000.0}},
        {},
    ),
    "Llama 3.1, trained beyond original length times factor": (
        {"max_position_embeddings": 4096, "limit": 4096, "rope_scaling": LLAMA3},
        {},
    ),
    "a good longrope block": (LONG | {"rope_scaling": longrope()}, {"RPX041": "note"}),
    "gemma 3's two layouts": (
        LONG
        | {
            "rope_theta": 1e6,
            "rope_scaling": YARN,
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"RPX021": "warn"},  # llama has no layer types
    ),
    # the window, by any door
    "a raised window": ({"max_position_embeddings": 1024}, refused("RPX003")),
    "a raised window that the tokenizer does not speak against": (LONG, {}),
    "a raised second window": ({"n_positions": 1024}, refused("RPX002")),
    "a second window that a factor accounts for": (
        {"max_sequence_length": 1024, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {},
    ),
    "a remote-code model with its window raised": (
        {"model_type": "chatglm", "auto_map": {"AutoModel": "m.M"}, "max_position_embeddings": ABSENT}
        | {"seq_length": 8192},
        refused("RPX003") | {"RPX011": "warn"},
    ),
    "a remote-code model with its own factor": (
        {"model_type": "chatglm", "auto_map": {"AutoModel": "m.M"}, "max_position_embeddings": ABSENT}
        | {"seq_length": 8192, "rope_ratio": 50},
        {"RPX011": "warn", "RPX021": "warn"},
    ),
    "a scaled window beyond its factor": (
        {"max_position_embeddings": 4096, "limit": 4096, "rope_scaling": YARN},
        refused("RPX029"),
    ),
    "an original length above the window": (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 1024}},
        refused("RPX029"),
    ),
    "a factor that the window does not use": ({"rope_scaling": YARN}, {"RPX042": "warn"}),
    "a multimodal model's window raised inside": (
        {"model_type": "my_vl", "auto_map": {"AutoModel": "m.M"}, "max_position_embeddings": ABSENT}
        | {"text_config": {"max_position_embeddings": 1024}},
        refused("RPX003") | {"RPX011": "warn"},
    ),
    "dynamic of a factor 1 that never grows": ({"rope_scaling": {"rope_type": "dynamic", "factor": 1.0}}, {}),
    "a tokenizer that caps servers": (
        {"max_position_embeddings": 1024, "rope_scaling": YARN, "limit": 512},
        {"RPX037": "note"},
    ),
    # contradictions
    "type against rope_type": (LONG | {"rope_scaling": YARN | {"type": "linear"}}, refused("RPX022")),
    "old layout against new": (
        LONG | {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}},
        refused("RPX022", "RPX042") | {"RPX042": "warn"},
    ),
    "theta against theta": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, refused("RPX022")),
    "old name of theta against new": (
        {"model_type": "gpt_neox", "rope_theta": 5e5, "rotary_emb_base": 10000},
        refused("RPX022"),
    ),
    "original length against original length": (
        LONG | {"rope_scaling": YARN, "original_max_position_embeddings": 512},
        refused("RPX022"),
    ),
    # values
    "a factor below 1": (LONG | {"rope_scaling": YARN | {"factor": 0.25}}, refused("RPX023", "RPX029")),
    "a factor that is NaN": (LONG | {"rope_scaling": YARN | {"factor": NAN}}, refused("RPX023")),
    "a factor in quotes": (LONG | {"rope_scaling": YARN | {"factor": "4"}}, refused("RPX023")),
    "a missing factor": (LONG | {"rope_scaling": {"rope_type": "linear"}}, refused("RPX023")),
    "a negative theta": ({"rope_theta": -10000.0}, refused("RPX023")),
    "an infinite theta": ({"rope_theta": float("inf")}, refused("RPX023")),
    "a window of text": ({"max_position_embeddings": "256"}, refused("RPX023")),
    "a window that is a fraction": ({"max_position_embeddings": 256.0}, refused("RPX023")),
    "a negative attention factor": (LONG | {"rope_scaling": YARN | {"attention_factor": -1.0}}, refused("RPX023")),
    "a partial rotary factor above 1": ({"partial_rotary_factor": 1.5}, refused("RPX023")),
    "scaling that is no object": ({"rope_scaling": 4}, refused("RPX023")),
    "a list that holds NaN": (
        LONG | {"rope_scaling": longrope() | {"long_factor": [NAN] * 8}},
        refused("RPX023") | {"RPX041": "note"},
    ),
    # lists, names, types, bands, original lengths
    "lists of another model": (
        LONG | {"rope_scaling": longrope(8, 4)},
        refused("RPX024") | {"RPX041": "note"},
    ),
    "lists for a whole head of a half-rotated one": (
        LONG | {"rope_scaling": longrope(8, 8), "partial_rotary_factor": 0.5},
        refused("RPX024") | {"RPX041": "note"},
    ),
    "a missing list": (
        LONG | {"rope_scaling": {k: v for k, v in longrope().items() if k != "long_factor"}},
        refused("RPX024") | {"RPX041": "note"},
    ),
    "a misspelt key": (LONG | {"rope_scaling": YARN | {"attn_factor": 0.878}}, {"RPX025": "warn"}),
    "a key with a letter missing": (LONG | {"rope_scaling": YARN | {"beta_fst": 32}}, {"RPX025": "warn"}),
    "the type ntk": ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, refused("RPX026")),
    "a factor without a type": ({"rope_scaling": {"factor": 4.0}}, refused("RPX026")),
    "llama3 with its edges swapped": (
        LONG | {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        refused("RPX027"),
    ),
    "llama3 with equal edges": (LONG | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, refused("RPX027")),
    "llama3 without an edge": (
        LONG | {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}},
        refused("RPX027"),
    ),
    "llama3 whose original length is the window": ({"rope_scaling": LLAMA3}, refused("RPX027")),
    "yarn without its original length": (
        LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        refused("RPX028"),
    ),
    # readers
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, {"RPX032": "warn"}),
    "bfloat16 weights": ({"torch_dtype": "bfloat16"}, {"RPX034": "note"}),
    "the layout of transformers 5 alone": (
        {"rope_theta": ABSENT, "rope_scaling": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"RPX035": "warn"},
    ),
    "the same with what transformers 4 takes anyway": (
        {"rope_theta": ABSENT, "rope_scaling": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {},
    ),
    "scaling in the layout of transformers 5 alone": (
        LONG | {"rope_scaling": ABSENT, "rope_parameters": YARN | {"rope_theta": 10000.0}},
        {"RPX035": "warn"},
    ),
    "rope settings on ALiBi": (
        {"model_type": "bloom", "rope_scaling": YARN},
        {"RPX021": "warn", "RPX040": "warn", "RPX042": "warn"},
    ),
    "a sliding window shorter than an extended one": (
        LONG | {"model_type": "mistral", "sliding_window": 128, "rope_scaling": YARN},
        {"RPX009": "warn"},
    ),
    "a sliding window of an unextended model": ({"model_type": "mistral", "sliding_window": 128}, {}),
    "a sliding window that is off": (
        LONG | {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False, "rope_scaling": YARN},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_config_gets_exactly_the_findings_that_are_right_for_it(tmp_path, name):
    config, wanted = CASES[name]
    result = ropext.check(str(bare_checkpoint(tmp_path, **config)))
    assert {each.code: each.severity for each in result.findings} == wanted
    assert result.verdict == ("refused" if "refuse" in wanted.values() else "allowed")


# What the config.json of well-known public checkpoints says of positions, and what is to be said about it.
PUBLIC = {
    "Llama-3.1-8B": (
        {"max_position_embeddings": 131072, "rope_theta": 5e5, "limit": 131072, "hidden_size": 4096}
        | {"num_attention_heads": 32, "rope_scaling": LLAMA3 | {"factor": 8.0, ORIGINAL: 8192}},
        {},
    ),
    "Qwen2.5-7B": ({"max_position_embeddings": 32768, "rope_theta": 1e6, "limit": 131072}, {}),
    "Qwen2.5-7B with the YaRN of its card": (
        {"max_position_embeddings": 32768, "rope_theta": 1e6, "limit": 131072}
        | {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 32768}},
        {"RPX042": "warn"},
    ),
    "Qwen2-VL-7B": (
        {
            "max_position_embeddings": 32768,
            "limit": 32768,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        {},
    ),
    "vicuna-7b-v1.5-16k": (
        {"max_position_embeddings": 4096, "max_sequence_length": 16384, "limit": 16384}
        | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {},
    ),
    "DeepSeek-V3": (
        {"max_position_embeddings": 163840, "limit": 131072, "qk_rope_head_dim": 64}
        | {
            "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
            | {"mscale_all_dim": 1.0, ORIGINAL: 4096}
        },
        {"RPX037": "note"},
    ),
    "gpt-oss-20b": (
        {"max_position_embeddings": 131072, "initial_context_length": 4096, "head_dim": 64, "limit": 10**30}
        | {"rope_scaling": YARN | {"factor": 32.0, ORIGINAL: 4096, "truncate": False, "beta_fast": 32.0}},
        {},
    ),
    "Phi-4-mini": (
        {"max_position_embeddings": 131072, ORIGINAL: 4096, "hidden_size": 3072, "num_attention_heads": 24}
        | {"partial_rotary_factor": 0.75, "limit": 131072}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
        {"RPX041": "note"},
    ),
    "gemma-3-4b": (
        {"max_position_embeddings": ABSENT, "rope_theta": ABSENT, "limit": 10**30}
        | {"text_config": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}},
        {},
    ),
    "c4ai-command-r-v01": ({"max_position_embeddings": 8192, "model_max_length": 131072, "limit": 10**30}, {}),
    "Qwen-7B": ({"max_position_embeddings": 32768, "seq_length": 8192, "limit": 32768}, {}),
    "HunYuan": (
        {"max_position_embeddings": 32768, "limit": 1048576}
        | {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0, "mscale": 1.0, "mscale_all_dim": 0.0}},
        {},
    ),
    "internlm2": (
        {"max_position_embeddings": 32768, "limit": 10**30, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"RPX032": "warn"},
    ),
    "Yarn-Llama-2-7b-64k": (
        {"max_position_embeddings": 65536, "limit": 10**30}
        | {"rope_scaling": {"type": "yarn", "factor": 16.0, ORIGINAL: 4096, "finetuned": True}},
        {"RPX025": "warn"},
    ),
    "mpt-7b": (
        {"model_type": "mpt", "max_position_embeddings": ABSENT, "max_seq_len": 65536, "limit": 2048},
        {},
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_checkpoints_are_allowed_as_their_makers_published_them(tmp_path, name):
    config, wanted = PUBLIC[name]
    case = Case(checkpoint=open_checkpoint(bare_checkpoint(tmp_path, **config)))
    standing = [each for each in safety.STANDING if each.code != "RPX034"]  # needs facts
    assert {each.code: each.severity for each in judged(case, safety.SOURCE, tuple(standing)).findings} == wanted


def test_rope_settings_beside_a_text_config_are_reported_as_without_effect(tmp_path):
    inner = {"model_type": "llama", "max_position_embeddings": 256, "rope_theta": 10000.0}
    own = {"model_type": "my_vl", "auto_map": {"AutoModel": "m.M"}}
    bare_checkpoint(tmp_path, text_config=inner, rope_scaling=YARN, **own, **LONG)
    assert found(tmp_path)["RPX044"] == "warn"


@pytest.mark.parametrize(
    ("written", "near"),
    [("attn_factor", "attention_factor"), ("beta_fst", "beta_fast"), ("scaling_factor", "factor")],
)
def test_a_misspelt_key_is_named_with_the_spelling_that_would_have_an_effect(tmp_path, written, near):
    bare_checkpoint(tmp_path, rope_scaling=YARN | {written: 2.0}, **LONG)
    assert f"'{written}'" in text(tmp_path, "RPX025") and f"{near} would" in text(tmp_path, "RPX025")


def test_every_contradiction_is_listed_not_only_the_first(tmp_path):
    block = YARN | {"factor": 8.0, "rope_theta": 5e5, "type": "linear"}
    bare_checkpoint(tmp_path, rope_scaling=YARN, rope_parameters=block, **LONG)
    lines = text(tmp_path, "RPX022").splitlines()
    assert len(lines) == 3 and all(any(word in line for line in lines) for word in ("type", "factor", "rope_theta"))


# --- what ropext wrote, edited afterwards


@pytest.fixture
def patched(tmp_path):
    source = bare_checkpoint(tmp_path / "m")
    ropext.patch(str(source), method="yarn", factor=4.0, out=tmp_path / "p", verify=False)
    return tmp_path / "p"


def test_what_ropext_wrote_is_allowed_and_said_to_be_untrained(patched):
    assert found(patched) == {"RPX031": "note"}
    assert "up to 256 of 1024 tokens" in text(patched, "RPX031")


@pytest.mark.parametrize("method", ["linear", "ntk", "dynamic", "llama3", "ntk-by-parts"])
def test_every_method_leaves_a_checkpoint_that_check_allows(tmp_path, method):
    ropext.patch(str(bare_checkpoint(tmp_path / "m")), method=method, factor=4.0, out=tmp_path / "p", verify=False)
    assert set(found(tmp_path / "p")) == {"RPX031"} | ({"RPX032"} if method == "dynamic" else set())


@pytest.mark.parametrize(
    ("file", "key"),
    [("config.json", "max_position_embeddings"), ("config.json", "n_positions"), ("config.json", "seq_length")]
    + [("tokenizer_config.json", "model_max_length")],
)
def test_a_window_raised_after_the_patch_is_refused_whatever_key_holds_it(patched, file, key):
    edit_json(patched / file, **{key: 4096})
    assert found(patched)["RPX001"] == "refuse"
    assert f"{key}" in text(patched, "RPX001") and "4096" in text(patched, "RPX001")


@pytest.mark.parametrize("changes", [{"rope_theta": 5e5}, {"rope_scaling": None}, {"rope_parameters": ABSENT}])
def test_rope_settings_changed_after_the_patch_are_refused(patched, changes):
    edit_json(patched / "config.json", **changes)
    assert found(patched)["RPX030"] == "refuse"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {}),
        ({"max_position_embeddings": 4096}, refused("RPX001")),
        ({"rope_theta": 5e5, "rope_parameters": ABSENT}, refused("RPX030")),
    ],
)
def test_edits_after_training_are_refused_too(tmp_path, changes, wanted):
    ropext.patch(str(bare_checkpoint(tmp_path / "m")), method="ntk", factor=4.0, out=tmp_path / "p", verify=False)
    trained = {"kind": "finetune", "native_length": 1024, "config_changes": ABSENT, "original_files": ABSENT}
    edit_json(tmp_path / "p" / "ropext.json", **trained)
    edit_json(tmp_path / "p" / "tokenizer_config.json", model_max_length=10**30)
    edit_json(tmp_path / "p" / "config.json", **changes)
    assert found(tmp_path / "p") == wanted


def test_other_keys_may_be_changed_after_the_patch(patched):
    edit_json(patched / "config.json", use_cache=False, note="mine")
    edit_json(patched / "tokenizer_config.json", padding_side="left")
    assert found(patched) == {"RPX031": "note"}


# --- files


def test_a_single_file_beside_shards_is_refused_and_the_other_rules_are_asked(tmp_path):
    bare_checkpoint(tmp_path, shards=2, max_position_embeddings=1024)
    bare_checkpoint(tmp_path, max_position_embeddings=1024)
    assert found(tmp_path) == refused("RPX038", "RPX003")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"a": 1, "a": 2}'),
        ("tokenizer_config.json", b"\xff"),
        ("ropext.json", b'{"schema": 99}'),
        ("model.safetensors", b"short"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_finding_that_names_it(tmp_path, file, content):
    bare_checkpoint(tmp_path)
    (tmp_path / file).write_bytes(content)
    assert found(tmp_path) == refused("RPX020") and file in text(tmp_path, "RPX020")


def test_every_unreadable_file_is_named_and_the_config_is_judged_all_the_same(tmp_path):
    bare_checkpoint(tmp_path, rope_theta=-1.0)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert found(tmp_path) == refused("RPX020", "RPX023") and len(text(tmp_path, "RPX020").splitlines()) == 2


def test_pickles_and_strays_beside_the_weights_are_noted(tmp_path):
    bare_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "consolidated.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert found(tmp_path) == {"RPX036": "note", "RPX043": "note"}


def weights(folder: Path, name: str, dtype: str, shape: list[int]) -> None:
    size = {"F32": 4, "F16": 2, "BF16": 2}[dtype]
    length = size * shape[0] * (shape[1] if len(shape) > 1 else 1)
    header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, length]}}
    (folder / "model.safetensors").write_bytes(with_header(json.dumps(header).encode(), bytes(length)))


def test_a_window_longer_than_the_table_of_learned_positions_is_refused(tmp_path):
    config = {"model_type": "gpt2", "max_position_embeddings": ABSENT}
    weights(bare_checkpoint(tmp_path, n_positions=256, **config), "transformer.wpe.weight", "F32", [256, 4])
    assert found(tmp_path) == {"RPX021": "warn"}
    edit_json(tmp_path / "config.json", n_positions=1024)
    assert found(tmp_path)["RPX039"] == "refuse" and "256 rows" in text(tmp_path, "RPX039")


def test_a_roberta_whose_window_is_two_above_its_tokenizers_limit_is_allowed(tmp_path):
    bare_checkpoint(tmp_path, model_type="camembert", max_position_embeddings=514, limit=512)
    weights(tmp_path, "roberta.embeddings.position_embeddings.weight", "F32", [514, 4])
    assert "refuse" not in found(tmp_path).values()


def test_a_stored_rotary_table_warns_where_it_is_half_or_of_before_the_patch(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights(bare_checkpoint(tmp_path / "m"), name, "F32", [8])
    assert found(tmp_path / "m") == {}
    ropext.patch(str(tmp_path / "m"), method="ntk", factor=4.0, out=tmp_path / "p", verify=False)
    assert found(tmp_path / "p")["RPX033"] == "warn"
    weights(tmp_path / "m", name, "F16", [8])
    assert found(tmp_path / "m") == {"RPX033": "warn"} and "F16" in text(tmp_path / "m", "RPX033")


def test_the_phase_error_of_a_half_table_is_what_torch_makes_of_it(tmp_path):
    import torch

    bare_checkpoint(tmp_path, max_position_embeddings=16001, limit=16001)
    facts = read_facts(safety.judge_checkpoint(tmp_path)[0].checkpoint)
    exact = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    for dtype, measured in (("bfloat16", 2.86), ("float16", 1.05)):  # measured on stock transformers at position 16000
        cast = exact.to(getattr(torch, dtype))
        assert [rounded(value, dtype) for value in exact.tolist()] == cast.double().tolist()
        assert phase_error(facts, dtype) == pytest.approx(measured, abs=0.01)


# --- the rules themselves


def test_every_rule_has_a_stable_code_a_page_and_a_source():
    codes = [each.code for each in safety.RULES]
    assert len(set(codes)) == len(codes) and all(re.fullmatch(r"RPX\d{3}", code) for code in codes)
    for each in safety.RULES:
        assert each.title and len(each.page.split()) >= 20 and each.source, each.code
        assert safety.explain(each.code.lower()).startswith(f"{each.code} ({each.severity}): {each.title}")


def test_an_unknown_code_is_wrong_usage_and_lists_the_codes():
    with pytest.raises(UsageError, match=r"no rule 'RPX999': the codes are RPX001, .*RPX020"):
        safety.explain("RPX999")


def test_the_readme_holds_the_rules_as_the_code_has_them():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    between = readme.partition("<!-- rules -->")[2].partition("<!-- /rules -->")[0]
    assert between.strip() == safety.rules_table()


def test_a_directory_that_is_not_there_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="neither"):
        ropext.check(str(tmp_path / "absent"))


def test_an_empty_directory_is_refused_without_a_traceback(tmp_path):
    assert found(tmp_path) == refused("RPX020")


def test_check_needs_no_facts_to_find_an_unsafe_edit(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": 3, "rope_scaling": {"type": "yarn", "factor": "x"}})
    assert {"RPX020", "RPX023", "RPX028"} <= found(tmp_path).keys()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=5) | st.just("yarn"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "factor", "type"]), inner),
    max_leaves=6,
)
NAMES = ["rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "short_factor", "long_factor"]
NAMES += ["low_freq_factor", "high_freq_factor", "attention_factor", "full_attention", "attn_factor"]
BLOCK = st.dictionaries(st.sampled_from(NAMES), JUNK | st.sampled_from(["yarn", "longrope", "llama3", "su", 4.0, 256]))
KEYS = ["rope_scaling", "rope_parameters", "max_position_embeddings", "seq_length", "rope_theta", "rotary_emb_base"]
KEYS += ["hidden_size", "head_dim", "partial_rotary_factor", "torch_dtype", "auto_map", "sliding_window", "rope_ratio"]
KEYS += ["original_max_position_embeddings", "num_attention_heads"]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=st.dictionaries(st.sampled_from(KEYS), JUNK | BLOCK), limit=JUNK, model_type=JUNK | st.just("llama"))
def test_no_config_ends_in_anything_but_findings(tmp_path, config, limit, model_type):
    folder = bare_checkpoint(tmp_path, limit=limit, **config)
    if not isinstance(model_type, str) or model_type == "llama":  # another one is for stock transformers to read
        edit_json(folder / "config.json", model_type=model_type)
    result = ropext.check(str(folder))
    assert all(each.message and each.fix and "\n" not in each.message for each in result.findings)
