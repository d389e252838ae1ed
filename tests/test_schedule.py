"""Stages and the rate curve, against the numbers of the issue and of the papers."""

from __future__ import annotations

import pytest

from ropext.errors import Refused, UsageError
from ropext.schedule import Stage, Wish, default_learning_rate, plan_stages, rate_at

PATCHED = {"native_length": 2048, "window": 8192}  # a 2k checkpoint patched at factor 4


def wishes(*lengths: int, **amounts: int) -> list[Wish]:
    """The same of each stage."""
    return [Wish(length=length, **amounts) for length in lengths]


def test_a_fixed_patch_trains_every_stage_at_the_patched_factor():
    stages = plan_stages(wishes(2048, 4096, 8192, steps=5), **PATCHED, progressive=False)
    assert stages == (
        Stage(length=2048, factor=4.0, steps=5, tokens=40960, batch=4),
        Stage(length=4096, factor=4.0, steps=5, tokens=40960, batch=2),
        Stage(length=8192, factor=4.0, steps=5, tokens=40960, batch=1),
    )


def test_a_progressive_patch_raises_the_factor_with_the_length_but_never_below_one():
    stages = plan_stages(wishes(1024, 2048, 3000, 8192), **PATCHED, progressive=True)
    assert [stage.factor for stage in stages] == [1.0, 1.0, 3000 / 2048, 4.0]


def test_tokens_per_stage_are_reached_with_as_few_whole_steps_as_will_do():
    stages = plan_stages(wishes(2048, 8192, tokens=20_000, batch_tokens=5000), **PATCHED, progressive=False)
    assert [(s.batch, s.steps, s.tokens) for s in stages] == [(2, 5, 20480), (1, 3, 24576)]


def test_a_stage_beyond_the_window_is_refused_with_the_factor_it_needs():
    with pytest.raises(Refused, match=r"window of 8k: found 16k.*factor 8.*--factor 8"):
        plan_stages(wishes(4096, 16384), **PATCHED, progressive=False)


@pytest.mark.parametrize("progressive", [True, False])
def test_only_a_progressive_schedule_must_reach_the_target(progressive):
    if not progressive:
        assert plan_stages(wishes(4096), **PATCHED, progressive=False)[0].factor == 4.0
        return
    with pytest.raises(Refused, match=r"ends at the patch's target of 8k: found 4k"):
        plan_stages(wishes(2048, 4096), **PATCHED, progressive=True)


def test_steps_and_tokens_together_contradict_each_other():
    with pytest.raises(UsageError, match="found both"):
        plan_stages(wishes(8192, steps=1, tokens=1), **PATCHED, progressive=False)


@pytest.mark.parametrize(
    ("option", "named"),
    [("steps", "--steps-per-stage"), ("tokens", "--tokens-per-stage"), ("batch_tokens", "--batch-tokens")],
)
def test_an_amount_of_zero_is_no_amount(option, named):
    with pytest.raises(UsageError, match=f"{named} is a whole number above 0: found 0"):
        plan_stages(wishes(8192, **{option: 0}), **PATCHED, progressive=False)


def test_the_rate_warms_up_for_a_tenth_of_all_steps_and_then_falls_towards_zero():
    rates = [rate_at(step, 40, 1.0) for step in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    falls = [earlier - later for earlier, later in zip(rates[3:], rates[4:], strict=False)]
    assert falls == pytest.approx([1 / 37] * 36) and rates[-1] == pytest.approx(1 / 37)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_even_the_shortest_run_reaches_the_peak_and_wastes_no_step(steps):
    rates = [rate_at(step, steps, 1.0) for step in range(steps)]
    assert max(rates) == 1.0 and min(rates) > 0


def test_the_default_rate_is_that_of_the_papers_at_their_width_and_grows_as_the_width_shrinks():
    assert default_learning_rate(4096) == 2e-5
    assert default_learning_rate(128) == pytest.approx(6.4e-4)


def test_a_stage_has_amounts_a_rate_and_a_factor_of_its_own():
    asked = [
        Wish(length=2048, steps=3, batch_tokens=4096, peak_rate=1e-3, factor=2.0),
        Wish(length=8192, tokens=20_000, factor=4.0),
    ]
    assert plan_stages(asked, **PATCHED, progressive=True) == (
        Stage(length=2048, factor=2.0, steps=3, tokens=12288, batch=2, peak_rate=1e-3),
        Stage(length=8192, factor=4.0, steps=3, tokens=24576, batch=1),
    )


@pytest.mark.parametrize(
    ("factors", "progressive", "says"),
    [
        ((1.0, 4.0), True, "takes a factor from 2 to the patch's 4: found 1"),
        ((5.0, 4.0), True, "takes a factor from 2 to the patch's 4: found 5"),
        ((2.0, 4.0), False, "a fixed patch trains every stage at its factor, 4: found 2"),
    ],
)
def test_a_factor_that_a_stage_cannot_have_is_refused(factors, progressive, says):
    asked = [Wish(length=length, factor=factor) for length, factor in zip((4096, 8192), factors, strict=True)]
    with pytest.raises(Refused, match=says):
        plan_stages(asked, **PATCHED, progressive=progressive)


def test_stages_that_do_not_grow_are_wrong_usage():
    with pytest.raises(UsageError, match="each stage is longer than the one before: found 2048 after 4096"):
        plan_stages(wishes(4096, 2048), **PATCHED, progressive=False)
