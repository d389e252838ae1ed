"""What a plan writes: one canonical layout, an exact factor, and nothing but the rope keys changed."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused, UsageError
from ropext.facts import read_facts
from ropext.plan import make_plan
from tests.bare import ABSENT, bare_checkpoint

few = settings(max_examples=30, deadline=None)  # the time that an example takes says nothing here
ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"}


@pytest.fixture
def planned(tmp_path):
    def plan(method="linear", *, native_length=None, inner=None, factor=None, to=None, settings=None, **config):
        checkpoint = open_checkpoint(bare_checkpoint(tmp_path / "m", **config))
        request = {"method": method, "native_length": native_length, "factor": factor, "to": to}
        request["settings"] = {"inner": inner, **(settings or {})}
        return make_plan(checkpoint.config, read_facts(checkpoint), **request)

    return plan


def test_linear_is_written_in_both_layouts_with_the_factor_a_float(planned):
    config = planned("linear", factor=4).config
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    assert config["max_position_embeddings"] == 1024
    assert '"factor": 4.0' in json.dumps(config["rope_scaling"])


def test_ntk_is_a_larger_theta_of_the_plain_type(planned):
    plan = planned("ntk", factor=4)
    assert plan.theta == pytest.approx(48760.546, abs=1e-3)
    assert plan.theta == plan.config["rope_theta"] == plan.config["rope_parameters"]["rope_theta"]
    assert plan.config["rope_scaling"] is None
    assert plan.config["rope_parameters"]["rope_type"] == "default"
    assert plan.config_changes["rope_theta"] == (10000.0, plan.theta)


@pytest.mark.parametrize("inner", ["ntk", "linear"])
def test_progressive_writes_the_inner_method_at_the_final_factor(planned, inner):
    progressive, final = planned("progressive", inner=inner, factor=4), planned(inner, factor=4)
    assert (progressive.method, progressive.inner) == ("progressive", inner)
    assert progressive.config == final.config and progressive.frequencies == final.frequencies


@pytest.mark.parametrize("method", ["linear", "ntk", "progressive"])
def test_the_planned_table_is_what_the_written_config_means(planned, method):
    plan = planned(method, factor=4)
    divisor = (plan.config["rope_scaling"] or {"factor": 1.0})["factor"]
    table = [plan.config["rope_theta"] ** (-pair / 8) / divisor for pair in range(8)]
    assert plan.frequencies == pytest.approx(table, rel=1e-12)


def test_null_empty_absent_and_default_scaling_give_the_same_bytes(planned):
    forms = [None, {}, ABSENT, {"rope_type": "default"}]
    written = {json.dumps(planned("linear", factor=4, rope_scaling=form).config) for form in forms}
    assert len(written) == 1 and "{}" not in written.pop()


def test_only_rope_keys_and_the_window_change_and_the_rest_keeps_its_order(planned):
    extras = {"my_key": 1, "name": "naïve 漢字", "quantization_config": {"bits": 4}, "tie_word_embeddings": False}
    plan = planned("ntk", factor=4, **extras)
    assert {key: plan.config[key] for key in extras} == extras
    assert set(plan.config_changes) <= ROPE
    assert list(plan.config)[-3:] == ["my_key", "name", "quantization_config"]


def test_a_number_that_is_nan_in_an_unrelated_key_is_no_change(planned):
    plan = planned("ntk", factor=4, limits=[0.0, math.inf], unknown=math.nan)
    assert set(plan.config_changes) <= ROPE


def test_the_layout_of_transformers_5_is_planned_like_the_older_one(planned):
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": ABSENT}
    older = planned("ntk", factor=4, rope_theta=5e5)
    assert planned("ntk", factor=4, **newer, rope_scaling=ABSENT).config == older.config


def test_gpt_neox_keeps_its_own_names_of_theta_and_rotated_share_in_step(planned):
    names = {"rotary_emb_base": 10000, "rotary_pct": 0.5, "rope_theta": ABSENT}
    plan = planned("ntk", factor=4, model_type="gpt_neox", **names)
    assert plan.rotary_dims == 8
    assert plan.config["rotary_emb_base"] == plan.config["rope_theta"] == plan.theta
    assert plan.theta == pytest.approx(10000 * 4 ** (8 / 6))
    assert plan.config["rotary_pct"] == plan.config["rope_parameters"]["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("request_", "native", "target", "factor"),
    [
        ({"factor": 4}, 256, 1024, 4.0),
        ({"to": 1000}, 256, 1000, 3.90625),
        ({"to": 1000, "factor": 3.90625}, 256, 1000, 3.90625),
        ({"factor": 1.0001, "native_length": 100, "max_position_embeddings": 100_000}, 100, None, None),
        ({"factor": 2.5, "native_length": 255}, 255, 637, 637 / 255),
        ({"factor": 4, "native_length": 256, "max_position_embeddings": 320}, 256, 1024, 4.0),
        ({"factor": 4, "max_position_embeddings": 320}, 320, 1280, 4.0),
    ],
)
def test_factor_and_target_follow_from_each_other_exactly(planned, request_, native, target, factor):
    if target is None:  # floor(native * factor) is the native length again
        with pytest.raises(Refused, match="longer than the native length 100"):
            planned("linear", **request_)
        return
    plan = planned("linear", **request_)
    assert (plan.native_length, plan.target_length, plan.factor) == (native, target, factor)
    assert plan.config["max_position_embeddings"] == target
    assert plan.config["rope_scaling"]["factor"] == factor


@few
@given(native=st.integers(min_value=1, max_value=2**20), factor=st.floats(min_value=1.0, max_value=2**24))
def test_every_factor_gives_its_floor_or_a_refusal(tmp_path_factory, native, factor):
    checkpoint = open_checkpoint(
        bare_checkpoint(tmp_path_factory.getbasetemp() / "any", max_position_embeddings=native)
    )
    try:
        plan = make_plan(checkpoint.config, read_facts(checkpoint), method="ntk", factor=factor)
    except Refused:
        assert factor <= 1 or native * factor > 2**24 or math.floor(native * factor) <= native
        return
    assert plan.target_length == math.floor(native * factor) > native
    assert plan.factor == plan.target_length / native


def test_the_target_may_be_named_instead_of_the_factor_but_not_contradict_it(planned):
    with pytest.raises(UsageError, match=r"256 tokens times 4 are 1024, not 1000"):
        planned(factor=4, to=1000)
    with pytest.raises(UsageError, match=r"give --factor.* or --to"):
        planned()


@pytest.mark.parametrize("factor", [0.0, -2.0, 1.0, math.nan, math.inf, -math.inf])
def test_a_factor_that_is_not_a_finite_number_above_1_is_refused(planned, factor):
    with pytest.raises(Refused, match=f"finite number above 1, it lengthens the context: found {factor:g}"):
        planned(factor=factor)


def test_a_factor_below_1_is_asked_back_as_its_inverse(planned):
    with pytest.raises(Refused, match=r"found 0\.25\. Did you mean 4\?"):
        planned(factor=0.25)


@pytest.mark.parametrize("request_", [{"factor": 1e9}, {"factor": 1e308}, {"to": 2**24 + 1}, {"to": 10**400}])
def test_a_target_beyond_what_float32_counts_is_refused(planned, request_):
    with pytest.raises(Refused, match="16777216"):
        planned(**request_)


@pytest.mark.parametrize("to", [256, 255, 1, 0, -1])
def test_a_target_within_the_native_length_is_refused(planned, to):
    with pytest.raises(Refused, match="longer than the native length 256"):
        planned(to=to)


def test_a_stated_native_length_lies_within_the_window(planned):
    with pytest.raises(Refused, match="257 is above max_position_embeddings 256"):
        planned(native_length=257, factor=4)
    for length in (0, -5):
        with pytest.raises(UsageError, match=f"above 0: found {length}"):
            planned(native_length=length, to=1024)
