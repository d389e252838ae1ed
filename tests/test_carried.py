"""A checkpoint that is scaled already: refused with the commands that are right, extended or replaced when asked."""

from __future__ import annotations

import json
import math
import shlex

import pytest

import ropext
from ropext.cli import app
from ropext.errors import Refused, RopextError, UsageError
from tests.bare import ABSENT, bare_checkpoint, edit_json, write_json

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 256,
}
LISTS = {"short_factor": (1.0,) * 8, "long_factor": (8.0,) * 8}


@pytest.fixture
def scaled(tmp_path):
    """A checkpoint with this scaling and window, made by others than ropext."""

    def make(block, window=1024, **config):
        return bare_checkpoint(
            tmp_path / "m", limit=ABSENT, rope_scaling=block, max_position_embeddings=window, **config
        )

    return make


def patch(source, *, method, verify=False, out=None, **options):
    """A dry run unless `out` is given."""
    return ropext.patch(str(source), method=method, verify=verify, out=out, dry_run=out is None, **options)


def block_of(result):
    return result.config_changes["rope_scaling"][1]


def messages(result, code):
    return [f"{found.severity}: {found.message}. {found.fix}" for found in result.findings if found.code == code]


def commands(error):
    """The commands between backticks in a refusal."""
    return str(error).split("`")[1::2]


@pytest.mark.parametrize(
    ("block", "method", "words"),
    [
        (YARN, "yarn", "yarn', factor 4.0, from 256 tokens"),
        ({**YARN, "rope_type": ABSENT, "type": "yarn"}, "yarn", "from 256 tokens"),
        (LLAMA3, "llama3", "llama3', factor 32.0, from 256 tokens"),
        ({"rope_type": "linear", "factor": 4.0}, "linear", "linear', factor 4.0"),
    ],
)
def test_a_scaled_checkpoint_is_refused_with_two_commands_that_then_work(scaled, tmp_path, block, method, words):
    source = scaled({key: value for key, value in block.items() if value is not ABSENT})
    with pytest.raises(Refused, match="factors never multiply") as refusal:
        patch(source, method="ntk", factor=2.0)
    assert words in str(refusal.value) and len(str(refusal.value).splitlines()) == 1
    extend, replace = commands(refusal.value)
    assert extend == f"ropext patch {source} --method {method} --extend-scaling --to 2k"
    assert replace.startswith(f"ropext patch {source} --method ntk --replace-scaling")
    for number, command in enumerate((extend, replace.replace(" L ", " 256 "))):
        out = tmp_path / str(number)
        app([*shlex.split(command)[1:], "--out", str(out), "--no-verify"], standalone_mode=False)
        assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 2048


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "llama3", "dynamic", "ntk-by-parts", "progressive"])
def test_what_ropext_patched_is_extended_into_what_the_whole_factor_gives(tmp_path, method):
    source = bare_checkpoint(tmp_path / "m")
    patch(source, method=method, factor=4.0, out=tmp_path / "four")
    twice = patch(tmp_path / "four", method=method, factor=2.0, extend_scaling=True, out=tmp_path / "twice")
    patch(source, method=method, factor=8.0, out=tmp_path / "eight")
    assert (twice.factor, twice.native_length, twice.target_length) == (8.0, 256, 2048)
    assert json.loads((tmp_path / "twice" / "config.json").read_text()) == json.loads(
        (tmp_path / "eight" / "config.json").read_text()
    )
    again = patch(tmp_path / "twice", method=method, factor=2.0, extend_scaling=True)
    assert (again.factor, again.target_length) == (16.0, 4096)


@pytest.mark.parametrize("before", ["ntk", "yarn", "dynamic", "llama3"])
@pytest.mark.parametrize("after", ["linear", "yarn", "ntk"])
def test_what_ropext_patched_is_replaced_by_what_its_source_would_get(tmp_path, before, after):
    source = bare_checkpoint(tmp_path / "m")
    patch(source, method=before, factor=4.0, out=tmp_path / "before")
    replaced = patch(tmp_path / "before", method=after, to=2048, replace_scaling=True, out=tmp_path / "replaced")
    direct = patch(source, method=after, to=2048, out=tmp_path / "direct")
    assert (replaced.factor, replaced.native_length, replaced.rope_theta) == (8.0, 256, direct.rope_theta)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("replaced", "direct")]
    assert {key: configs[0][key] for key in configs[1]} == configs[1]
    assert not messages(replaced, "RPX052")


def test_a_native_yarn_keeps_its_original_length_and_is_verified(scaled):
    result = patch(scaled(YARN), method="yarn", factor=2.0, extend_scaling=True, verify=True)
    assert block_of(result) == {**YARN, "factor": 8.0} and result.target_length == 2048
    assert result.config_changes["max_position_embeddings"] == (1024, 2048)
    assert result.attention_scaling == pytest.approx(0.1 * math.log(8) + 1)


def test_the_old_name_of_the_type_is_read_and_written_back_canonical(scaled):
    source = scaled({"type": "yarn", "factor": 4, "original_max_position_embeddings": 256})
    block = block_of(patch(source, method="yarn", factor=2.0, extend_scaling=True, verify=True))
    assert block == {**YARN, "factor": 8.0} and isinstance(block["factor"], float)


def test_a_yarn_whose_window_was_never_raised_serves_its_factor(scaled):
    """As many model cards say to add it: the window is that of before."""
    source = scaled({**YARN, "rope_type": "yarn"}, window=256)
    result = patch(source, method="yarn", factor=2.0, extend_scaling=True, verify=True)
    assert (block_of(result)["factor"], result.target_length) == (8.0, 2048)


def test_explicit_values_are_kept_and_named_and_a_frozen_temperature_is_warned_of(scaled):
    source = scaled({**YARN, "attention_factor": 1.0, "beta_fast": 16, "truncate": False})
    result = patch(source, method="yarn", factor=2.0, extend_scaling=True, verify=True)
    kept = {"attention_factor": 1.0, "beta_fast": 16.0, "truncate": False}
    assert block_of(result) == {**YARN, "factor": 8.0, **kept} and result.attention_scaling == 1.0
    ((note),) = messages(result, "RPX050")
    assert all(f"{key} {value:g}" in note for key, value in {"attention_factor": 1.0, "beta_fast": 16}.items())
    assert messages(result, "RPX051")[0].startswith("warn: attention_factor 1 stays while the factor grows")
    assert not messages(patch(source, method="ntk-by-parts", factor=2.0, extend_scaling=True), "RPX051")


def test_a_pair_of_mscale_is_kept_and_follows_the_factor_by_itself(scaled):
    source = scaled({**YARN, "mscale": 0.707, "mscale_all_dim": 0.707})
    result = patch(source, method="yarn", factor=2.0, extend_scaling=True, verify=True)
    assert block_of(result) == {**YARN, "factor": 8.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    assert result.attention_scaling == 1.0 and not messages(result, "RPX051")


def test_a_misspelt_key_is_named_and_never_renamed(scaled):
    source = scaled({**YARN, "attn_factor": 0.878})
    result = patch(source, method="yarn", factor=2.0, extend_scaling=True, verify=True)
    assert block_of(result) == {**YARN, "factor": 8.0}
    (note,) = messages(result, "RPX050")
    assert "attn_factor has no effect in transformers" in note and "attention_factor would have one" in note


def test_a_hand_made_yarn_without_its_original_length_is_flagged_not_guessed(scaled):
    source = scaled({"rope_type": "yarn", "factor": 4.0})
    for options in ({}, {"extend_scaling": True}, {"replace_scaling": True}):
        with pytest.raises(Refused, match="original_max_position_embeddings"):
            patch(source, method="yarn", factor=2.0, **options)


def test_what_it_was_before_is_for_the_user_to_say(scaled):
    source = scaled({"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(Refused, match="--replace-scaling --native-length L --to 2k") as refusal:
        patch(source, method="ntk", factor=2.0, native_length=1024)
    assert "--extend-scaling" not in str(refusal.value)
    result = patch(source, method="yarn", factor=4.0, replace_scaling=True, native_length=256, verify=True)
    assert block_of(result) == YARN


def test_the_band_edges_and_the_factor_of_llama3_are_never_replaced_by_defaults(scaled):
    source = scaled(LLAMA3)
    with pytest.raises(Refused, match=r"'llama3', factor 32\.0"):
        patch(source, method="llama3", factor=2.0)
    result = patch(source, method="llama3", factor=2.0, extend_scaling=True, verify=True)
    assert block_of(result) == {**LLAMA3, "factor": 64.0} and result.target_length == 2048
    assert "low_freq_factor 1.5, high_freq_factor 6.0" in messages(result, "RPX050")[0]
    assert (result.native_length, result.factor) == (1024, 2.0)  # it was trained up to its window
    assert not messages(result, "RPX007")  # what it starts from is stated


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"low_freq_factor": 2.0, "high_freq_factor": 2.0}, "high_freq_factor"),
        ({"low_freq_factor": ABSENT}, "low_freq_factor"),
        ({"factor": math.nan}, "factor"),
        ({"factor": -4.0}, "factor"),
        ({"factor": "4"}, "factor"),
        ({"factor": 0.25}, "factor"),
        ({"original_max_position_embeddings": 1024}, "original length"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"extend_scaling": True}])
def test_a_broken_llama3_block_is_refused_whatever_is_asked(scaled, change, reason, options):
    block = {key: value for key, value in (LLAMA3 | change).items() if value is not ABSENT}
    with pytest.raises(Refused, match=reason):
        patch(scaled(block), method="llama3", factor=2.0, **options)


@pytest.mark.parametrize("options", [{"extend_scaling": True}, {"replace_scaling": True}])
def test_the_original_length_alone_cannot_be_changed(scaled, options):
    with pytest.raises(Refused, match="length of pre-training, not the window: it is 256, --native-length says 512"):
        patch(scaled(LLAMA3), method="llama3", factor=2.0, native_length=512, **options)


def test_a_native_scaling_is_replaced_from_the_true_original_length(scaled):
    result = patch(scaled(LLAMA3), method="ntk", factor=8.0, replace_scaling=True, verify=True)
    assert (result.native_length, result.target_length, result.factor) == (256, 2048, 8.0)
    assert result.rope_theta == pytest.approx(10000 * 8 ** (16 / 14)) and block_of(result) is None
    assert messages(result, "RPX052")[0].startswith("warn: weights may have been trained with the scaling")


def test_a_native_linear_does_not_state_what_was_before_so_it_is_asked_for(scaled):
    source = scaled({"rope_type": "linear", "factor": 4.0})
    with pytest.raises(Refused, match="Say it with --native-length"):
        patch(source, method="yarn", factor=8.0, replace_scaling=True)
    result = patch(source, method="yarn", factor=8.0, replace_scaling=True, native_length=256)
    assert block_of(result) == {**YARN, "factor": 8.0}
    longer = patch(source, method="linear", factor=2.0, extend_scaling=True, verify=True)
    assert block_of(longer) == {"rope_type": "linear", "factor": 8.0} and longer.target_length == 2048


def test_a_native_dynamic_is_extended_from_its_window_which_stays(scaled):
    source = scaled({"type": "dynamic", "factor": 2.0}, window=256)
    result = patch(source, method="dynamic", factor=2.0, extend_scaling=True, verify=True)
    assert block_of(result) == {"rope_type": "dynamic", "factor": 4.0} and result.target_length == 1024
    assert "max_position_embeddings" not in result.config_changes


def test_longrope_is_extended_with_new_lists_only(scaled):
    block = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    source = scaled({**block, "original_max_position_embeddings": 256}, original_max_position_embeddings=256)
    with pytest.raises(Refused, match="--longrope-factors"):
        patch(source, method="longrope", factor=2.0, extend_scaling=True)
    result = patch(source, method="longrope", factor=2.0, extend_scaling=True, verify=True, **LISTS)
    assert block_of(result)["factor"] == 8.0 and block_of(result)["long_factor"] == [8.0] * 8


def test_keys_that_a_family_reads_beside_the_method_stay(scaled):
    source = scaled({**YARN, "llama_4_scaling_beta": 0.1})
    assert block_of(patch(source, method="yarn", factor=2.0, extend_scaling=True))["llama_4_scaling_beta"] == 0.1


def test_a_flag_that_does_not_fit_is_an_error(scaled, tmp_path):
    source, plain = scaled(YARN), bare_checkpoint(tmp_path / "plain")
    with pytest.raises(UsageError, match="keeps the method in force, yarn: found ntk"):
        patch(source, method="ntk", factor=2.0, extend_scaling=True)
    with pytest.raises(UsageError, match="keeps the settings in force: found --beta-fast"):
        patch(source, method="yarn", factor=2.0, extend_scaling=True, beta_fast=16.0)
    with pytest.raises(UsageError, match="give one of them"):
        patch(source, method="yarn", factor=2.0, extend_scaling=True, replace_scaling=True)
    for flag in ("extend_scaling", "replace_scaling"):
        with pytest.raises(UsageError, match="this checkpoint has none. Leave it out"):
            patch(plain, method="yarn", factor=2.0, **{flag: True})


def test_what_training_made_its_own_is_patched_like_any_model_and_its_stock_scaling_is_not(tmp_path):
    source = bare_checkpoint(tmp_path / "m")
    for method in ("ntk", "yarn"):
        patch(source, method=method, factor=4.0, out=tmp_path / method)
        record = json.loads((tmp_path / method / "ropext.json").read_text())
        tuned = {"kind": "finetune", "native_length": 1024, "training": {}}
        edit_json(tmp_path / method / "ropext.json", **{**record, **tuned})
    assert patch(tmp_path / "ntk", method="ntk", factor=2.0).target_length == 2048
    with pytest.raises(Refused, match="already scaled"):
        patch(tmp_path / "yarn", method="ntk", factor=2.0)
    longer = patch(tmp_path / "yarn", method="yarn", factor=2.0, extend_scaling=True)
    assert block_of(longer) == {**YARN, "factor": 8.0} and longer.native_length == 1024


JUNK = [None, True, 0, -1, 2.5, 1e308, 1e-320, 10**400, math.nan, math.inf, "", "4", [], [1.0] * 8, {}, {"a": {}}, 1024]
LONGROPE = {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
BLOCKS = [
    {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False},
    *(LLAMA3, LONGROPE, {"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
]
ROPE = {"method": "yarn", "inner": None, "factor": 4.0, "native_length": 256, "original_length": 256}
ROPE |= {"target_length": 1024, "theta_before": 1e4, "settings": {"beta_fast": 16.0}}


@pytest.mark.parametrize("scaling", ["extend_scaling", "replace_scaling", "neither"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["rope_type"])
def test_no_value_of_a_scaling_ends_in_anything_but_a_plan_or_a_short_refusal(scaled, block, scaling):
    source, options = scaled(block), {} if scaling == "neither" else {scaling: True}
    lists = LISTS if block["rope_type"] == "longrope" else {}
    for key in block:
        for value in JUNK:
            edit_json(source / "config.json", rope_scaling={**block, key: value})
            plan_or_refusal(source, method=block["rope_type"], **options, **lists)


@pytest.mark.parametrize("scaling", ["extend_scaling", "replace_scaling", "neither"])
@pytest.mark.parametrize("key", ROPE)
def test_no_value_in_a_record_ends_in_anything_but_a_plan_or_a_short_refusal(scaled, key, scaling):
    source, options = scaled(None), {} if scaling == "neither" else {scaling: True}
    for value in JUNK:
        record = {"schema": 1, "kind": "patch", "window": 1024, "native_length": 256, "source": {"model": "x"}}
        write_json(source / "ropext.json", {**record, "rope": {**ROPE, key: value}})
        plan_or_refusal(source, method="yarn", **options)


def plan_or_refusal(source, **request):
    try:
        result = patch(source, factor=2.0, **request)
    except RopextError as error:
        assert len(str(error).splitlines()) <= 2 and len(str(error)) < 600
    else:
        assert 0 < result.attention_scaling < math.inf and result.target_length > result.native_length
