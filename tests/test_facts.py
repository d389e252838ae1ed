"""What is read from a config, in any layout, and what is refused because it is open, contradictory or no rope."""

from __future__ import annotations

import json
import math

import pytest

from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused
from ropext.facts import read_facts
from tests.bare import ABSENT, bare_checkpoint


@pytest.fixture
def facts(tmp_path):
    def read(limit=256, **config):
        return read_facts(open_checkpoint(bare_checkpoint(tmp_path, limit=limit, **config)))

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


def test_rope_nested_by_layer_type_is_refused_for_now(facts):
    with pytest.raises(Refused, match="nested by layer type is not built yet"):
        facts(rope_parameters={"full_attention": {"rope_type": "default"}})


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
        ("mamba", "no position embedding", {"max_position_embeddings": ABSENT}),
    ],
)
def test_a_model_without_a_rotary_embedding_is_refused_by_what_it_has(facts, model_type, words, config):
    for scaling in (None, {"rope_type": "linear", "factor": 4.0}):  # such configs load with rope keys all the same
        with pytest.raises(Refused, match=f"{model_type} has {words}"):
            facts(model_type=model_type, rope_scaling=scaling, **config)


def test_falcon_without_alibi_has_a_rotary_embedding(facts):
    assert facts(model_type="falcon", alibi=False).scheme == "rope"


def test_a_family_with_code_of_its_own_is_refused_and_a_known_one_is_read_by_the_stock_rules(facts):
    auto_map = {"AutoModelForCausalLM": "modeling_x.Model"}
    chatglm = {"seq_length": 8192, "rope_ratio": 1, "max_position_embeddings": ABSENT}
    with pytest.raises(Refused, match="code from a checkpoint is never run: chatglm"):
        facts(model_type="chatglm", auto_map=auto_map, **chatglm)
    with pytest.raises(Refused, match="chatglm has seq_length"):
        facts(model_type="chatglm", **chatglm)
    assert facts(auto_map=auto_map).rotary_dims == 16


def test_a_multimodal_config_is_refused_for_now(facts):
    with pytest.raises(Refused, match="text_config"):
        facts(model_type="qwen2_vl", text_config={"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}})


def test_the_recorded_native_length_wins_over_the_window(tmp_path):
    record = {"schema": 1, "kind": "finetune", "window": 1024, "native_length": 512, "rope": {}}
    bare_checkpoint(tmp_path, max_position_embeddings=1024)
    (tmp_path / "ropext.json").write_text(json.dumps(record | {"source": {"model": "x"}}))
    assert read_facts(open_checkpoint(tmp_path)).native_length == 512
