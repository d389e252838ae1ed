"""The frequencies of each method against plain loops, published numbers, and the properties that define them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropext.errors import Refused, UsageError
from ropext.rope import (
    METHODS,
    Abf,
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    NtkByParts,
    Plain,
    Progressive,
    Yarn,
    canonical_name,
    check_asked,
    frequencies_at,
    method_named,
    unfinished_pair,
)

few = settings(max_examples=30, deadline=None)  # the time that an example takes says nothing here
thetas = st.floats(min_value=100, max_value=1e8)
factors = st.floats(min_value=1.0001, max_value=1024)
dims = st.integers(min_value=2, max_value=128).map(lambda pairs: 2 * pairs)
natives = st.integers(min_value=16, max_value=2**20)
static = st.sampled_from(["linear", "ntk", "ntk-by-parts", "yarn", "llama3", "progressive"])
GROWING = ["ntk", "linear", "ntk-by-parts", "yarn", "llama3"]


def plain(theta, rotary_dims):
    """The definition of Su et al. 2021, computed another way than ropext does."""
    return [math.exp(-2 * pair / rotary_dims * math.log(theta)) for pair in range(rotary_dims // 2)]


@few
@given(theta=thetas, rotary_dims=dims)
def test_plain_frequencies_are_the_powers_of_theta(theta, rotary_dims):
    assert Plain().frequencies(theta, rotary_dims) == pytest.approx(plain(theta, rotary_dims), rel=1e-12)


@few
@given(theta=thetas, rotary_dims=dims, factor=factors)
def test_linear_divides_every_pair_by_exactly_the_factor(theta, rotary_dims, factor):
    found = Linear(factor=factor).frequencies(theta, rotary_dims)
    assert found == [frequency / factor for frequency in Plain().frequencies(theta, rotary_dims)]


@few
@given(theta=thetas, rotary_dims=dims, factor=factors)
def test_ntk_keeps_the_first_pair_and_divides_the_last_by_the_factor(theta, rotary_dims, factor):
    found = Ntk(factor=factor).frequencies(theta, rotary_dims)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(plain(theta, rotary_dims)[-1] / factor, rel=1e-9)


@few
@given(theta=thetas, rotary_dims=dims, factor=factors)
def test_ntk_slows_each_pair_more_than_the_one_before_and_never_beyond_the_factor(theta, rotary_dims, factor):
    unscaled = plain(theta, rotary_dims)
    ratios = [a / b for a, b in zip(unscaled, Ntk(factor=factor).frequencies(theta, rotary_dims), strict=True)]
    assert all(smaller < larger * (1 + 1e-12) for smaller, larger in zip(ratios, ratios[1:], strict=False))
    assert max(ratios) <= factor * (1 + 1e-9)


@few
@given(method=static, theta=thetas, rotary_dims=dims, factor=factors, native=natives)
def test_a_table_is_finite_positive_and_falls_from_pair_to_pair(method, theta, rotary_dims, factor, native):
    found = method_named(method, factor, native).frequencies(theta, rotary_dims)
    assert len(found) == rotary_dims // 2
    assert all(math.isfinite(frequency) and 0 < frequency <= 1 for frequency in found)
    assert all(slower < faster for faster, slower in zip(found, found[1:], strict=False))


@few
@given(method=static, theta=thetas, rotary_dims=dims, excess=st.floats(1e-12, 1e-6), native=natives)
def test_a_factor_near_one_changes_almost_nothing(method, theta, rotary_dims, excess, native):
    chosen = method_named(method, 1 + excess, native)
    assert chosen.frequencies(theta, rotary_dims) == pytest.approx(plain(theta, rotary_dims), rel=2 * excess + 1e-9)
    assert chosen.attention_scaling == pytest.approx(1.0, abs=excess)


@few
@given(method=st.sampled_from(["linear", "ntk"]), theta=thetas, rotary_dims=dims, factor=factors)
def test_the_config_form_says_what_the_frequencies_are(method, theta, rotary_dims, factor):
    chosen = method_named(method, factor, 256)
    form = chosen.config_form(theta, rotary_dims)
    divisor = form.scaling["factor"] if form.scaling else 1.0
    table = [frequency / divisor for frequency in plain(form.theta, rotary_dims)]
    assert chosen.frequencies(theta, rotary_dims) == pytest.approx(table, rel=1e-9)


@pytest.mark.parametrize(("factor", "theta"), [(2, 20221), (4, 40890), (8, 82685), (16, 167199)])
def test_the_static_ntk_base_equals_the_published_values(factor, theta):
    assert round(Ntk(factor=factor).theta(10000.0, 128)) == theta


@pytest.mark.parametrize("inner", GROWING)
def test_progressive_is_its_inner_method_at_the_final_factor_and_plain_before_it_grows(inner):
    method = Progressive(factor=4.0, native_length=256, inner=inner)
    final = method_named(inner, 4.0, 256)
    assert method.attention_scaling == final.attention_scaling
    assert method.frequencies(10000.0, 16) == final.frequencies(10000.0, 16)
    assert method.config_form(10000.0, 16) == final.config_form(10000.0, 16)
    assert method.at(2.0) == method_named(inner, 2.0, 256)
    assert method.at(1.0) == method.at(0.5) == Plain()


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("longrope", "abf")])
@pytest.mark.parametrize("factor", [1.0, 0.25, 0.0, -2.0, math.nan, math.inf, -math.inf])
def test_a_factor_that_does_not_lengthen_is_refused_by_every_method(name, factor):
    with pytest.raises(Refused, match="finite number above 1"):
        method_named(name, factor, 256)


def test_ntk_of_a_single_pair_is_refused_as_undefined():
    with pytest.raises(Refused, match="at least 4 rotary dimensions: this model has 2"):
        Ntk(factor=4.0).frequencies(10000.0, 2)


def test_ntk_refuses_a_base_that_float32_cannot_hold():
    with pytest.raises(Refused, match="within float32"):
        Ntk(factor=64.0).config_form(1e38, 4)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("LINEAR", "linear"), ("pi", "linear"), ("PI", "linear"), ("NTK", "ntk"), (" Ntk-Aware ", "ntk")),
        *(("YARN", "yarn"), ("su", "longrope"), ("Llama3", "llama3"), ("NTK-by-parts", "ntk-by-parts")),
    ],
)
def test_names_are_read_in_any_case_and_by_their_aliases(name, method):
    assert canonical_name(name) == method


@pytest.mark.parametrize("name", ["foo", "", "4"])
def test_an_unknown_method_is_answered_with_the_list(name):
    with pytest.raises(
        UsageError, match=r"there is no method .*: use one of linear, ntk, abf, dynamic, .*, progressive"
    ):
        canonical_name(name)


def test_an_inner_method_belongs_to_progressive_alone_and_is_one_that_grows():
    with pytest.raises(UsageError, match="--inner belongs to progressive: found it with ntk"):
        method_named("ntk", 4.0, 256, {"inner": "linear"})
    for inner, reason in (
        ("progressive", "it grows an inner method"),
        ("abf", "its theta is given, no factor sets it"),
        ("dynamic", "it grows by itself"),
        ("longrope", "its lists belong to one factor"),
    ):
        settings = {"abf": {"theta": 5e5}, "longrope": {"short_factor": (1.0,), "long_factor": (2.0,)}}.get(inner, {})
        with pytest.raises(UsageError, match=f"progressive grows the factor of ntk, .* not of {inner}, {reason}"):
            method_named("progressive", 4.0, 256, {"inner": inner, **settings})
    made = method_named("progressive", 4.0, 256, {"inner": "PI"})
    assert made == Progressive(factor=4.0, native_length=256, inner="linear")
    grown = method_named("progressive", 4.0, 256, {"inner": "yarn", "beta_fast": 16.0})
    assert grown.at(2.0) == Yarn(factor=2.0, native_length=256, beta_fast=16.0)


@pytest.mark.parametrize(
    ("name", "setting", "owner"),
    [
        ("linear", {"theta": 5e5}, "--theta belongs to abf"),
        ("llama3", {"beta_fast": 16.0}, "--beta-fast belongs to ntk-by-parts or yarn"),
        ("yarn", {"low_freq_factor": 1.0}, "--low-freq-factor belongs to llama3"),
        ("ntk", {"long_factor": (1.0,)}, "--longrope-factors belongs to longrope"),
        ("progressive", {"mscale": 1.0}, "--mscale belongs to yarn"),
    ],
)
def test_a_setting_of_another_method_is_an_error_that_names_its_owner(name, setting, owner):
    with pytest.raises(UsageError, match=owner):
        method_named(name, 4.0, 256, setting)


def test_a_setting_left_to_its_default_is_no_setting():
    assert method_named("ntk", 4.0, 256, {"theta": None, "inner": None}) == Ntk(factor=4.0)


def test_methods_that_need_a_setting_say_which():
    with pytest.raises(UsageError, match="--theta, for instance 500000"):
        method_named("abf", 4.0, 256)
    with pytest.raises(UsageError, match="--longrope-factors with a JSON or CSV file"):
        method_named("longrope", 4.0, 256)


def test_of_two_settings_that_shadow_each_other_one_is_asked_for():
    with pytest.raises(UsageError, match="work as a pair"):
        check_asked({"mscale": 1.0})
    with pytest.raises(UsageError, match="obey attention_factor"):
        check_asked({"mscale": 1.0, "mscale_all_dim": 0.7, "attention_factor": 1.0})


def test_abf_needs_a_theta_above_the_trained_one():
    assert Abf(theta=5e5).frequencies(1e4, 16) == pytest.approx(plain(5e5, 16))
    for theta in (1e4, 100.0):
        with pytest.raises(Refused, match="not above 10000"):
            Abf(theta=theta).config_form(1e4, 16)
    for theta in (math.nan, math.inf, -1.0, 0.0):
        with pytest.raises(Refused, match="theta must be a finite number above 0"):
            Abf(theta=theta)


def test_yarn_tells_its_temperature_in_the_order_of_precedence_of_stock_readers():
    def scaling(**settings):
        return Yarn(factor=4.0, native_length=256, **settings).attention_scaling

    assert scaling() == pytest.approx(1.13863, abs=1e-5)
    assert scaling(attention_factor=1.0) == 1.0 == scaling(mscale=0.707, mscale_all_dim=0.707)
    assert scaling(mscale=1.0, mscale_all_dim=0.5) == pytest.approx(1.1386294 / 1.0693147)
    assert scaling(mscale=1.0) == scaling(mscale=0.0, mscale_all_dim=1.0) == scaling()
    assert scaling(attention_factor=0.9, mscale=1.0, mscale_all_dim=0.5) == 0.9


def test_yarn_equals_the_hand_computed_values_of_the_right_and_of_the_wrong_original_length():
    """cases A4: original length 256 against the 1024 that readers assume where none is stated."""
    right = Yarn(factor=4.0, native_length=256).frequencies(1e4, 16)
    wrong = Yarn(factor=4.0, native_length=1024).frequencies(1e4, 16)
    assert right[1:4] == pytest.approx([0.2569, 0.0625, 0.0138], abs=6e-5)
    assert wrong[1:4] == pytest.approx([0.3162, 0.0813, 0.0198], abs=6e-5)


def test_ntk_by_parts_is_yarn_without_its_temperature():
    parts, yarn = (method(factor=4.0, native_length=256, beta_fast=16.0) for method in (NtkByParts, Yarn))
    assert parts.frequencies(1e4, 64) == yarn.frequencies(1e4, 64)
    assert parts.attention_scaling == 1.0
    assert parts.config_form(1e4, 64).scaling == {**yarn.config_form(1e4, 64).scaling, "attention_factor": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_no_setting_of_a_band_is_nan_infinite_or_negative(value):
    for name in ("beta_fast", "beta_slow", "attention_factor"):
        with pytest.raises(Refused, match=f"{name} must be a finite number above 0"):
            Yarn(factor=4.0, native_length=256, **{name: value})
    for name in ("low_freq_factor", "high_freq_factor"):
        with pytest.raises(Refused, match=f"{name} must be a finite number above 0"):
            Llama3(factor=4.0, native_length=256, **{name: value})


@pytest.mark.parametrize(("low", "high"), [(4.0, 1.0), (2.0, 2.0)])
def test_bands_in_the_wrong_order_are_refused(low, high):
    with pytest.raises(Refused, match=rf"high_freq_factor must be above .* found {high:g} and {low:g}"):
        Llama3(factor=4.0, native_length=256, low_freq_factor=low, high_freq_factor=high)
    with pytest.raises(Refused, match="beta_fast must be above beta_slow"):
        Yarn(factor=4.0, native_length=256, beta_fast=low / 4, beta_slow=high)


@few
@given(theta=thetas, rotary_dims=dims, factor=st.floats(1.01, 64), native=natives)
def test_dynamic_is_plain_up_to_its_native_length_and_overshoots_at_its_target(theta, rotary_dims, factor, native):
    method, unscaled = Dynamic(factor=factor, native_length=native), plain(theta, rotary_dims)
    assert method.frequencies(theta, rotary_dims) == pytest.approx(unscaled, rel=1e-9)
    target = round(native * factor)
    last = method.frequencies_at(target, theta, rotary_dims)[-1]
    assert last == pytest.approx(unscaled[-1] / (factor * target / native - (factor - 1)), rel=1e-9)


def test_longrope_switches_lists_one_token_past_the_native_length():
    lists = {"short_factor": (1.0,) * 4, "long_factor": (1.0, 2.0, 3.0, 4.0)}
    method = LongRope(factor=4.0, native_length=256, **lists)
    unscaled = plain(1e4, 8)
    assert frequencies_at(method, 256, 1e4, 8) == pytest.approx(unscaled)
    assert frequencies_at(method, 257, 1e4, 8) == pytest.approx(
        [w / n for w, n in zip(unscaled, (1, 2, 3, 4), strict=True)]
    )
    assert method.attention_scaling == pytest.approx(math.sqrt(1 + math.log(4) / math.log(256)))
    with pytest.raises(Refused, match="each of the 8 rotated pairs: short_factor has 4"):
        method.frequencies(1e4, 16)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_the_numbers_of_longrope_are_finite_and_positive(value):
    with pytest.raises(Refused, match="each number of long_factor must be a finite number above 0"):
        LongRope(factor=4.0, native_length=256, short_factor=(1.0,), long_factor=(value,))


@few
@given(theta=thetas, rotary_dims=dims, native=st.integers(min_value=1, max_value=2**20))
def test_the_unfinished_pair_is_the_first_that_turns_less_than_once(theta, rotary_dims, native):
    pair = unfinished_pair(theta, rotary_dims, native)
    turns = [native * frequency / (2 * math.pi) for frequency in plain(theta, rotary_dims)]
    finished = turns if pair is None else turns[:pair]
    assert all(turn > 1 - 1e-9 for turn in finished)
    assert pair is None or turns[pair] < 1 + 1e-9
