"""What is read from a config, in any layout, and what is refused because it is open, contradictory or no rope."""

from __future__ import annotations

import json
import math

import pytest

from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused
from ropext.facts import missing_head_dim, read_facts
from tests.bare import ABSENT, CONFIG, bare_checkpoint


@pytest.fixture
def facts(tmp_path):
    def read(limit=256, stock=True, **config):
        return read_facts(open_checkpoint(bare_checkpoint(tmp_path, limit=limit, **config)), stock=stock)

    return read


def test_the_facts_of_a_plain_llama(facts):
    found = facts()
    assert (found.theta, found.rotary_dims, found.window, found.native_length) == (10000.0, 16, 256, 256)
    assert (found.tokenizer_length, found.scaling, found.sliding_window) == (256, None, None)


@pytest.mark.parametrize("scaling", [None, {}, ABSENT, {"rope_type": "default"}, {"type": "default"}])
def test_null_empty_absent_and_default_all_mean_plain_rope(facts, scaling):
    found = facts(rope_scaling=scaling)
    assert found.scaling is None and found.rope_extras == ()


def test_theta_is_read_from_either_layout(facts):
    assert facts(rope_theta=5e5).theta == 5e5
    block = {"rope_type": "default", "rope_theta": 5e5}
    assert facts(rope_theta=ABSENT, rope_scaling=ABSENT, rope_parameters=block).theta == 5e5
    assert facts(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": None}).theta == 5e5
    assert facts(rope_theta=ABSENT).theta == 10000.0
    neox = {"model_type": "gpt_neox", "rotary_emb_base": 20000}
    assert facts(rope_theta=ABSENT, **neox).theta == facts(rope_theta=None, **neox).theta == 20000.0


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"model_type": "gpt_neox", "rotary_emb_base": 20000},
    ],
)
def test_two_different_thetas_are_refused_with_both_values(facts, config):
    with pytest.raises(Refused, match=r"theta must be the same .* found .*0.* and .*0"):
        facts(**config)


@pytest.mark.parametrize("theta", ["10000", True, 0, 1, -5.0, math.nan, math.inf, 1e300, 10**400, [], {}])
def test_a_theta_that_no_table_can_be_made_of_is_refused(facts, theta):
    with pytest.raises(Refused, match="rope_theta must be a number above 1") as refusal:
        facts(rope_theta=theta)
    assert len(str(refusal.value)) < 300


def test_layouts_that_disagree_about_the_scaling_are_refused(facts):
    with pytest.raises(Refused, match="rope_scaling and rope_parameters must agree: factor is 2.0 in one and 4.0"):
        facts(
            rope_scaling={"rope_type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        )
    with pytest.raises(Refused, match="rope_type is 'default' in one and 'linear'"):
        facts(rope_scaling={"rope_type": "default"}, rope_parameters={"rope_type": "linear", "factor": 4.0})
    with pytest.raises(Refused, match="'linear' against 'default'"):
        facts(rope_scaling={"type": "linear", "rope_type": "default", "factor": 4.0})


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_a_scaling_in_force_is_seen_under_both_spellings(facts, name):
    block = {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert facts(rope_scaling=block).scaling == block


@pytest.mark.parametrize("value", ["yarn", 4, True, False, 0, "", [], ["linear"]])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_scaling_that_is_no_object_is_refused(facts, key, value):
    with pytest.raises(Refused, match=f"{key} is an object or null"):
        facts(**{key: value})


NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LAYERS = ["sliding_attention", "full_attention"]
GEMMA3 = {"model_type": "gemma3_text", "layer_types": LAYERS, "head_dim": 16, "rope_theta": ABSENT}


def test_of_rope_nested_by_layer_type_the_full_attention_layers_are_extended(facts):
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    for layout in ({"rope_parameters": NESTED, "rope_scaling": ABSENT}, {**old, "rope_scaling": None}):
        found = facts(**GEMMA3 | layout)
        assert (found.theta, found.layer_type, found.rotary_dims) == (1e6, "full_attention", 16)
        assert found.other_layers["sliding_attention"]["rope_theta"] == 1e4
        assert [table.layer_type for table in found.kept_tables] == ["sliding_attention"]


def test_rope_nested_by_layer_type_is_refused_where_it_does_not_belong_or_contradicts(facts):
    with pytest.raises(Refused, match="only flat rope settings are known of this model type"):
        facts(rope_parameters=NESTED)
    with pytest.raises(Refused, match="has no full_attention layers"):
        facts(**GEMMA3 | {"layer_types": LAYERS[:1] * 2})
    with pytest.raises(Refused, match=r"theta must be the same .* 1000000.0 and 500000.0"):
        facts(**GEMMA3 | {"rope_parameters": NESTED, "rope_scaling": ABSENT, "rope_theta": 5e5})


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": value}
        for value in (ABSENT, None, 0, -1, 256.0, "256", True, [256], 2**24 + 1, 10**400)
    ]
    + [{"num_attention_heads": value} for value in (ABSENT, 0, "4")]
    + [{"hidden_size": value} for value in (ABSENT, None, 1.5)]
    + [{"head_dim": value} for value in (0, "16", 10**400, True)]
    + [{"head_dim": 15}, {"head_dim": 2}, {"partial_rotary_factor": 0.01}]
    + [{"partial_rotary_factor": value} for value in (0, -1, 2, "1", True, math.nan, 10**400)]
    + [{"model_type": value} for value in (ABSENT, None, "", 1, ["llama"])],
)
def test_a_key_that_is_missing_or_of_a_wrong_kind_is_refused_by_name(facts, config):
    (key,) = config
    shown = {"head_dim": "head|dim", "partial_rotary_factor": "partial_rotary_factor|rotates"}.get(key, key)
    with pytest.raises(Refused, match=shown) as refusal:
        facts(**config)
    assert len(str(refusal.value)) < 300


def test_head_dim_and_the_rotated_share_give_the_rotary_dimensions(facts):
    assert facts(head_dim=32).rotary_dims == 32
    assert facts(head_dim=None).rotary_dims == 16
    neox = {"model_type": "gpt_neox", "head_dim": 64}
    assert facts(**neox).rotary_dims == 16
    assert facts(**neox, rotary_pct=0.5).rotary_dims == 32


@pytest.mark.parametrize(
    ("limit", "length"),
    [(256, 256), (256.0, 256), (ABSENT, None), (None, None), (int(1e30), None), (1e30, None), ("256", None), (0, None)],
)
def test_a_tokenizer_states_a_limit_only_as_a_plausible_number(facts, limit, length):
    assert facts(limit=limit).tokenizer_length == length


def test_a_sliding_window_counts_where_it_is_in_use(facts):
    assert facts(model_type="mistral", sliding_window=128).sliding_window == 128
    assert facts(model_type="mistral", sliding_window=None).sliding_window is None
    assert facts(model_type="mistral").sliding_window == 4096  # what transformers takes where the config is silent
    assert facts(model_type="qwen2", sliding_window=128, use_sliding_window=True).sliding_window == 128
    for unused in ({"use_sliding_window": False}, {}):
        assert facts(model_type="qwen2", sliding_window=128, **unused).sliding_window is None


@pytest.mark.parametrize(
    ("model_type", "words", "config"),
    [
        ("gpt2", "learned positions", {"n_positions": 256, "max_position_embeddings": ABSENT}),
        ("opt", "learned positions", {}),
        ("bloom", "ALiBi", {"seq_length": 256, "max_position_embeddings": ABSENT}),
        ("mpt", "ALiBi", {"max_seq_len": 256, "max_position_embeddings": ABSENT}),
        ("falcon", "ALiBi", {"alibi": True}),
        ("mamba", "no attention and no position embedding", {"max_position_embeddings": ABSENT}),
        ("xglm", "sinusoidal positions", {}),
        ("gptj", "rotary code of its own", {"n_positions": 256, "max_position_embeddings": ABSENT}),
    ],
)
def test_a_model_without_a_rotary_embedding_is_refused_by_what_it_has(facts, model_type, words, config):
    for scaling in (None, {"rope_type": "linear", "factor": 4.0}):  # such configs load with rope keys all the same
        with pytest.raises(Refused, match=f"{model_type} has {words}"):
            facts(model_type=model_type, rope_scaling=scaling, **config)


def test_falcon_without_alibi_has_a_rotary_embedding(facts):
    assert facts(model_type="falcon", alibi=False).rotary_dims == 16


def test_a_family_with_code_of_its_own_is_refused_and_a_known_one_is_read_by_the_stock_rules(facts):
    auto_map = {"AutoModelForCausalLM": "modeling_x.Model"}
    chatglm = {"seq_length": 8192, "rope_ratio": 1, "max_position_embeddings": ABSENT}
    with pytest.raises(Refused, match="code from a checkpoint is never run: chatglm"):
        facts(model_type="chatglm", auto_map=auto_map, **chatglm)
    with pytest.raises(Refused, match="chatglm has seq_length"):
        facts(model_type="chatglm", **chatglm)
    assert facts(auto_map=auto_map).rotary_dims == 16


TEXT = {key: CONFIG[key] for key in CONFIG if key not in ("architectures", "rope_scaling", "torch_dtype")}
VISION = {"model_type": "qwen2_vl", "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


def test_the_positions_of_a_multimodal_config_are_those_of_its_text_config(tmp_path):
    text = TEXT | {"model_type": "qwen2_vl_text", "rope_scaling": MROPE}
    whole = {"model_type": "qwen2_vl", "vision_config": VISION, "text_config": text}
    found = read_facts(open_checkpoint(bare_checkpoint(tmp_path, **dict.fromkeys(CONFIG, ABSENT) | whole)))
    assert (found.section, found.model_type, found.window) == ("text_config", "qwen2_vl_text", 256)
    assert (found.mrope, found.rope_extras, found.scaling) == ({"mrope_section": [2, 3, 3]}, (), None)
    assert [table.module for table in found.kept_tables] == ["model.visual.rotary_pos_emb"]


def test_without_stock_transformers_an_unknown_model_type_is_read_from_its_config_alone(facts, monkeypatch):
    monkeypatch.setattr("ropext.facts.read_stock", lambda *_: pytest.fail("asked"))
    assert facts(model_type="olmo2", stock=False).theta == 10000.0


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"model_type": "mixtral"}, 16),
        ({"model_type": "mixtral", "head_dim": 32}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_head_dim_is_missing_only_where_stock_code_fails_without(config, missing):
    own = {"hidden_size": 64, "num_attention_heads": 4} | config
    assert missing_head_dim(own, config["model_type"], "yarn") == ({"head_dim": missing} if missing else {})
    assert missing_head_dim(own, config["model_type"], "linear") == {}


@pytest.mark.parametrize(
    ("model_type", "layer_types", "window"),
    [
        ("gemma2", ["sliding_attention", "full_attention"], None),  # the full layers gain
        ("gemma2", ["sliding_attention", "sliding_attention"], 128),
        ("cohere2", ["sliding_attention", "full_attention"], 128),  # the full layers do not rotate
        ("ministral", ["sliding_attention", "sliding_attention"], 128),
    ],
)
def test_a_sliding_window_is_one_where_no_rotary_layer_sees_further(facts, model_type, layer_types, window):
    found = facts(model_type=model_type, layer_types=layer_types, sliding_window=128, pad_token_id=0, head_dim=16)
    assert found.sliding_window == window


def test_the_recorded_native_length_wins_over_the_window(tmp_path):
    record = {"schema": 1, "kind": "finetune", "window": 1024, "native_length": 512, "rope": {}}
    bare_checkpoint(tmp_path, max_position_embeddings=1024)
    (tmp_path / "ropext.json").write_text(json.dumps(record | {"source": {"model": "x"}}))
    assert read_facts(open_checkpoint(tmp_path)).native_length == 512
