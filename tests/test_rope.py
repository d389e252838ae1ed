"""The frequencies of each method against plain loops, published numbers, and the properties that define them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropext.errors import Refused, UsageError
from ropext.rope import Linear, Ntk, Plain, Progressive, canonical_name, method_named, unfinished_pair

few = settings(max_examples=30, deadline=None)  # the time that an example takes says nothing here
thetas = st.floats(min_value=100, max_value=1e8)
factors = st.floats(min_value=1.0001, max_value=1024)
dims = st.integers(min_value=2, max_value=128).map(lambda pairs: 2 * pairs)
methods = st.sampled_from(["linear", "ntk", "progressive"])


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
@given(method=methods, theta=thetas, rotary_dims=dims, factor=factors)
def test_a_table_is_finite_positive_and_falls_from_pair_to_pair(method, theta, rotary_dims, factor):
    found = method_named(method, factor).frequencies(theta, rotary_dims)
    assert len(found) == rotary_dims // 2
    assert all(math.isfinite(frequency) and 0 < frequency <= 1 for frequency in found)
    assert all(slower < faster for faster, slower in zip(found, found[1:], strict=False))


@few
@given(method=methods, theta=thetas, rotary_dims=dims, excess=st.floats(min_value=1e-12, max_value=1e-6))
def test_a_factor_near_one_changes_almost_nothing(method, theta, rotary_dims, excess):
    found = method_named(method, 1 + excess).frequencies(theta, rotary_dims)
    assert found == pytest.approx(plain(theta, rotary_dims), rel=2 * excess + 1e-9)


@few
@given(method=methods, theta=thetas, rotary_dims=dims, factor=factors)
def test_the_config_form_says_what_the_frequencies_are(method, theta, rotary_dims, factor):
    chosen = method_named(method, factor)
    form = chosen.config_form(theta, rotary_dims)
    divisor = form.scaling["factor"] if form.scaling else 1.0
    table = [frequency / divisor for frequency in plain(form.theta, rotary_dims)]
    assert chosen.frequencies(theta, rotary_dims) == pytest.approx(table, rel=1e-9)


@pytest.mark.parametrize(("factor", "theta"), [(2, 20221), (4, 40890), (8, 82685), (16, 167199)])
def test_the_static_ntk_base_equals_the_published_values(factor, theta):
    assert round(Ntk(factor=factor).theta(10000.0, 128)) == theta


@pytest.mark.parametrize("inner", ["ntk", "linear"])
def test_progressive_is_its_inner_method_at_the_final_factor_and_plain_before_it_grows(inner):
    method = Progressive(factor=4.0, inner=inner)
    final = method_named(inner, 4.0)
    assert method.frequencies(10000.0, 16) == final.frequencies(10000.0, 16)
    assert method.config_form(10000.0, 16) == final.config_form(10000.0, 16)
    assert method.at(2.0) == method_named(inner, 2.0)
    assert method.at(1.0) == method.at(0.5) == Plain()


@pytest.mark.parametrize("method", [Linear, Ntk, Progressive])
@pytest.mark.parametrize("factor", [1.0, 0.25, 0.0, -2.0, math.nan, math.inf, -math.inf])
def test_a_factor_that_does_not_lengthen_is_refused_by_every_method(method, factor):
    with pytest.raises(Refused, match="finite number above 1"):
        method(factor=factor)


def test_ntk_of_a_single_pair_is_refused_as_undefined():
    with pytest.raises(Refused, match="at least 4 rotary dimensions: this model has 2"):
        Ntk(factor=4.0).frequencies(10000.0, 2)


def test_ntk_refuses_a_base_that_float32_cannot_hold():
    with pytest.raises(Refused, match="within float32"):
        Ntk(factor=64.0).config_form(1e38, 4)


@pytest.mark.parametrize(
    ("name", "method"),
    [("LINEAR", "linear"), ("pi", "linear"), ("PI", "linear"), ("NTK", "ntk"), (" Ntk-Aware ", "ntk"), ("ntk", "ntk")],
)
def test_names_are_read_in_any_case_and_by_their_aliases(name, method):
    assert canonical_name(name) == method


@pytest.mark.parametrize(("name", "shown"), [("YARN", "yarn"), ("su", "longrope"), ("dynamic", "dynamic")])
def test_a_method_that_is_not_built_is_named_with_those_that_are(name, shown):
    with pytest.raises(UsageError, match=f"{shown} is not built yet: use one of linear, ntk, progressive"):
        canonical_name(name)


@pytest.mark.parametrize("name", ["foo", "", "4"])
def test_an_unknown_method_is_answered_with_the_list(name):
    with pytest.raises(UsageError, match=r"there is no method .*: use one of linear, ntk, progressive"):
        canonical_name(name)


def test_an_inner_method_belongs_to_progressive_alone_and_is_one_that_grows():
    with pytest.raises(UsageError, match="belongs to progressive"):
        method_named("ntk", 4.0, "linear")
    with pytest.raises(UsageError, match="ntk or linear"):
        method_named("progressive", 4.0, "progressive")
    assert method_named("progressive", 4.0, "PI") == Progressive(factor=4.0, inner="linear")


@few
@given(theta=thetas, rotary_dims=dims, native=st.integers(min_value=1, max_value=2**20))
def test_the_unfinished_pair_is_the_first_that_turns_less_than_once(theta, rotary_dims, native):
    pair = unfinished_pair(theta, rotary_dims, native)
    turns = [native * frequency / (2 * math.pi) for frequency in plain(theta, rotary_dims)]
    finished = turns if pair is None else turns[:pair]
    assert all(turn > 1 - 1e-9 for turn in finished)
    assert pair is None or turns[pair] < 1 + 1e-9
