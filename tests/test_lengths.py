"""Lengths as people write them (tokens): suffixes, lists in any order, schedules that must grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropext.errors import UsageError
from ropext.lengths import (
    format_length,
    parse_bytes,
    parse_length,
    parse_lengths,
    parse_percent,
    parse_schedule,
)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("2k,4k,8k", (2048, 4096, 8192)),
        ("2K, 4k", (2048, 4096)),
        ("2048,4096", (2048, 4096)),
        ("512,2k,1m", (512, 2048, 1048576)),
        ("8k", (8192,)),
    ],
)
def test_a_growing_schedule_is_read_in_tokens(text, stages):
    assert parse_schedule(text) == stages
    assert parse_lengths(text) == stages


@pytest.mark.parametrize(
    ("text", "found"), [("4k,2k", "2k after 4k"), ("2k,2k", "2k after 2k"), ("2k,2048", "2k after")]
)
def test_a_schedule_that_does_not_grow_is_refused_with_both_stages(text, found):
    with pytest.raises(UsageError, match=found):
        parse_schedule(text)


def test_a_list_of_lengths_keeps_its_order_and_drops_repeats():
    assert parse_lengths("4k,2k") == (4096, 2048)
    assert parse_lengths("2k,2k,2048,512") == (2048, 512)


WRONG = [
    "2k,,4k",
    "2*1024",
    "0",
    "-1",
    "",
    ",",
    "2k,",
    "0k",
    "1.5k",
    "2kb",
    "2 k",
    "1e3",
    "2g",
    "²",
    "٣",
    "1_000",
    "nan",
]


@pytest.mark.parametrize("parse", [parse_schedule, parse_lengths])
@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_length_is_wrong_usage_and_quoted(parse, text):
    part = next(part for part in text.split(",") if part not in ("2k", "4k"))
    with pytest.raises(UsageError) as refusal:
        parse(text)
    assert repr(part) in str(refusal.value) and "2k" in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_a_number_too_long_to_be_a_length_is_wrong_usage():
    with pytest.raises(UsageError):
        parse_length("9" * 10_000)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(8192, "8k"), (1000, "1000"), (1048576, "1m"), (1536, "1536"), (1024, "1k"), (1025 * 1024, "1025k")],
)
def test_a_length_is_written_in_the_largest_unit_that_is_exact(tokens, text):
    assert format_length(tokens) == text


@given(st.integers(min_value=1, max_value=2**40))
def test_what_is_written_is_read_back(tokens):
    assert parse_length(format_length(tokens)) == tokens
    assert parse_length(f"{tokens}K") == tokens * 1024


@pytest.mark.parametrize(
    ("text", "found"), [("24GB", 24 * 10**9), ("512mb", 512 * 10**6), ("2GiB", 2 * 2**30), ("1.5 kB", 1500), ("77", 77)]
)
def test_an_amount_of_memory_is_read_with_its_unit(text, found):
    assert parse_bytes(text) == found


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 PB", "0", "nan", "1e3"])
def test_what_is_no_amount_of_memory_is_wrong_usage(text):
    with pytest.raises(UsageError, match="an amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "found"), [("2%", 0.02), ("0.5 %", 0.005), ("3", 0.03), ("0", 0.0)])
def test_a_percentage_is_read_with_or_without_its_sign(text, found):
    assert parse_percent(text) == pytest.approx(found)


@pytest.mark.parametrize("text", ["", "%", "-1%", "nan", "inf%", "2%%x"])
def test_what_is_no_percentage_is_wrong_usage(text):
    with pytest.raises(UsageError, match="a percentage"):
        parse_percent(text)
