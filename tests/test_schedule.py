"""Stages and the rate curve, against the numbers of the issue and of the papers."""

from __future__ import annotations

import pytest

from ropext.errors import Refused, UsageError
from ropext.schedule import Stage, default_learning_rate, plan_stages, rate_at

PATCHED = {"native_length": 2048, "window": 8192}  # a 2k checkpoint patched at factor 4


def test_a_fixed_patch_trains_every_stage_at_the_patched_factor():
    stages = plan_stages([2048, 4096, 8192], **PATCHED, progressive=False, steps_per_stage=5)
    assert stages == (
        Stage(length=2048, factor=4.0, steps=5, tokens=40960, batch=4),
        Stage(length=4096, factor=4.0, steps=5, tokens=40960, batch=2),
        Stage(length=8192, factor=4.0, steps=5, tokens=40960, batch=1),
    )


def test_a_progressive_patch_raises_the_factor_with_the_length_but_never_below_one():
    stages = plan_stages([1024, 2048, 3000, 8192], **PATCHED, progressive=True)
    assert [stage.factor for stage in stages] == [1.0, 1.0, 3000 / 2048, 4.0]


def test_tokens_per_stage_are_reached_with_as_few_whole_steps_as_will_do():
    stages = plan_stages([2048, 8192], **PATCHED, progressive=False, tokens_per_stage=20_000, batch_tokens=5000)
    assert [(s.batch, s.steps, s.tokens) for s in stages] == [(2, 5, 20480), (1, 3, 24576)]


def test_a_stage_beyond_the_window_is_refused_with_the_factor_it_needs():
    with pytest.raises(Refused, match=r"window of 8k: found 16k.*factor 8.*--factor 8"):
        plan_stages([4096, 16384], **PATCHED, progressive=False)


@pytest.mark.parametrize("progressive", [True, False])
def test_only_a_progressive_schedule_must_reach_the_target(progressive):
    if not progressive:
        assert plan_stages([4096], **PATCHED, progressive=False)[0].factor == 4.0
        return
    with pytest.raises(Refused, match=r"ends at the patch's target of 8k: found 4k"):
        plan_stages([2048, 4096], **PATCHED, progressive=True)


def test_steps_and_tokens_together_contradict_each_other():
    with pytest.raises(UsageError, match="found both"):
        plan_stages([8192], **PATCHED, progressive=False, steps_per_stage=1, tokens_per_stage=1)


@pytest.mark.parametrize("option", ["steps_per_stage", "tokens_per_stage", "batch_tokens"])
def test_an_amount_of_zero_is_no_amount(option):
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is a whole number above 0: found 0"):
        plan_stages([8192], **PATCHED, progressive=False, **{option: 0})


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
