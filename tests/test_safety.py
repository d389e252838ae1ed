"""Every rule of the verdict: what it finds, how severe, and where it keeps silent."""

from __future__ import annotations

import json

import pytest

from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused
from ropext.facts import read_facts
from ropext.plan import make_plan
from ropext.safety import judge_patch, judge_source
from tests.bare import ABSENT, bare_checkpoint

RECORD = {"schema": 1, "kind": "patch", "window": 1024, "native_length": 256, "rope": {"factor": 4.0}}


@pytest.fixture
def judged(tmp_path):
    """Findings of a patch by code: code -> (severity, message and fix)."""

    def judge(method="ntk", *, factor=4.0, stated=None, verified=True, record=None, limit=256, **config):
        folder = bare_checkpoint(tmp_path, limit=limit, **config)
        if record is not None:
            (folder / "ropext.json").write_text(json.dumps(record))
        checkpoint = open_checkpoint(folder)
        facts = read_facts(checkpoint)
        plan = make_plan(checkpoint.config, facts, method=method, factor=factor, native_length=stated)
        verdict = judge_patch(checkpoint, facts, plan, verified=verified, native_length_stated=stated is not None)
        return {found.code: (found.severity, f"{found.message}. {found.fix}") for found in verdict.findings}

    return judge


def source_verdict(folder, **options):
    checkpoint = open_checkpoint(folder)
    return judge_source(checkpoint, read_facts(checkpoint), **options)


def test_an_ordinary_patch_only_notes_what_was_taken_and_how_far_ntk_reaches(judged):
    assert {code: severity for code, (severity, _) in judged().items()} == {"RPX007": "note", "RPX010": "note"}
    assert set(judged("linear")) == {"RPX007"}
    assert set(judged("linear", stated=256)) == set()


def test_a_window_other_than_the_recorded_one_is_refused_whatever_is_stated(tmp_path):
    bare_checkpoint(tmp_path, max_position_embeddings=4096, limit=4096)
    (tmp_path / "ropext.json").write_text(json.dumps(RECORD | {"source": {"model": "x"}}))
    for stated in (False, True):
        verdict = source_verdict(tmp_path, native_length_stated=stated)
        assert [found.code for found in verdict.findings] == ["RPX001"]
        with pytest.raises(Refused, match=r"is 4096, ropext\.json wrote 1024\. .*ropext patch .*\[RPX001\]"):
            verdict.require()


@pytest.mark.parametrize("key", ["n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length"])
def test_a_second_window_raised_beside_the_first_is_refused(tmp_path, key):
    with pytest.raises(Refused, match=rf"{key} is 1024, max_position_embeddings 256\. .*\[RPX002\]"):
        source_verdict(bare_checkpoint(tmp_path, **{key: 1024})).require()
    source_verdict(bare_checkpoint(tmp_path, **{key: 256})).require()


def test_a_window_above_the_tokenizers_is_refused_until_the_native_length_is_stated(tmp_path):
    bare_checkpoint(tmp_path, max_position_embeddings=1024, limit=256)
    with pytest.raises(Refused, match=r"is 1024, the tokenizer states 256\. .*--native-length 256.*\[RPX003\]"):
        source_verdict(tmp_path).require()
    source_verdict(tmp_path, native_length_stated=True).require()


@pytest.mark.parametrize("limit", [1024, 2048, ABSENT, None, int(1e30)])
def test_a_tokenizer_that_states_no_smaller_limit_says_nothing_against_the_window(tmp_path, limit):
    source_verdict(bare_checkpoint(tmp_path, max_position_embeddings=1024, limit=limit)).require()


def test_what_ropext_wrote_is_not_doubted_because_of_a_tokenizer_that_it_left_alone(tmp_path):
    bare_checkpoint(tmp_path, max_position_embeddings=1024, limit=512)
    (tmp_path / "ropext.json").write_text(json.dumps(RECORD | {"source": {"model": "x"}}))
    assert not source_verdict(tmp_path).findings


def test_a_patch_of_a_patch_is_refused_with_the_source_to_patch_instead(judged):
    record = RECORD | {"source": {"model": "/models/base"}}
    severity, text = judged(record=record, max_position_embeddings=1024, limit=1024)["RPX004"]
    assert severity == "refuse" and "already extended by 4.0" in text and "/models/base" in text


@pytest.mark.parametrize(
    "block",
    [
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        {"rope_type": "linear", "factor": "4"},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "ntk", "factor": 4.0},
        {"rope_type": None},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_scaled_checkpoint_is_refused(judged, key, block):
    severity, text = judged(**{key: block})["RPX004"]
    assert severity == "refuse" and str(block.get("factor")) in text


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox"])
def test_known_model_types_need_no_proof(judged, model_type):
    assert "RPX005" not in judged(model_type=model_type, verified=False)


def test_another_model_type_is_refused_unless_verified(judged):
    severity, text = judged(model_type="olmo2", verified=False)["RPX005"]
    assert severity == "refuse" and "olmo2" in text and "--no-verify" in text
    assert "RPX005" not in judged(model_type="olmo2", verified=True)


def test_rope_settings_that_would_be_lost_are_refused(judged):
    severity, text = judged(rope_scaling={"rope_type": "default", "short_mscale": 2.0})["RPX006"]
    assert severity == "refuse" and "short_mscale" in text
    assert judged(rope_scaling={"factor": 4.0})["RPX006"][0] == "refuse"
    assert "RPX006" not in judged(rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]})  # carried over


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RPX028"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.25}}, "RPX023"),
        ({"max_sequence_length": 4096}, "RPX002"),
    ],
)
def test_what_check_refuses_of_a_checkpoint_a_patch_of_it_refuses_too(judged, config, code):
    assert judged(**config)[code][0] == "refuse"


def test_a_plan_for_dynamic_warns_of_its_cache(judged):
    assert judged("dynamic")["RPX032"][0] == "warn" and "RPX032" not in judged("ntk")


def test_the_native_length_that_was_taken_is_said(judged):
    assert "taking 320 as the native length" in judged(max_position_embeddings=320, limit=320)["RPX007"][1]
    assert "RPX007" not in judged(stated=256)


def test_a_factor_above_64_warns(judged):
    assert "RPX008" not in judged(factor=64)
    severity, text = judged(factor=65)["RPX008"]
    assert severity == "warn" and "found 65" in text


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "mistral", "max_position_embeddings": 2048, "limit": 2048}, 4096),  # stock's default
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, 128),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, None),
        ({"model_type": "qwen3", "sliding_window": 128}, None),  # off unless asked for
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 1024}, None),  # as long as the target
    ],
)
def test_a_sliding_window_shorter_than_the_target_warns_and_names_it(judged, config, window):
    found = judged("linear", **config)
    assert ("RPX009" in found) == (window is not None)
    if window is not None:
        assert found["RPX009"][0] == "warn" and f"sliding_window is {window}" in found["RPX009"][1]


def test_the_reach_of_ntk_equals_the_worked_example(judged):
    shape = {"max_position_embeddings": 2048, "limit": 2048, "head_dim": 64}
    severity, text = judged("ntk", **shape)["RPX010"]
    assert severity == "note" and "by 2.56" in text and "about 52" in text  # about 5.2k of 8192 tokens
    larger = float(text.split("factor ")[-1])
    reach = judged("ntk", factor=larger * 1.01, **shape)["RPX010"][1].split("about ")[1].split()[0]
    assert int(reach) >= 8192


def test_the_suggested_factor_is_finite_however_large_the_request(judged):
    found = judged("ntk", factor=2**16, head_dim=256)
    assert found["RPX008"][0] == "warn" and "inf" not in found["RPX010"][1]


def test_code_beside_the_checkpoint_warns_that_it_is_not_proved(judged):
    assert judged(auto_map={"AutoModelForCausalLM": "modeling_x.Model"})["RPX011"][0] == "warn"
    assert "RPX011" not in judged()


def test_the_first_refusal_is_raised_with_its_code_and_cure(tmp_path):
    bare_checkpoint(tmp_path, seq_length=4096, max_position_embeddings=1024, limit=256)
    verdict = source_verdict(tmp_path)
    assert [found.code for found in verdict.findings] == ["RPX002", "RPX003"]
    with pytest.raises(Refused, match=r"^window keys must agree: .*\. Set both .* \[RPX002\]$"):
        verdict.require()
