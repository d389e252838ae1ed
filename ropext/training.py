"""What a run of training is, where it stands, and when a stage may end: values and arithmetic.

Losses in nats per token, rates per optimizer step, times in seconds, sizes in bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ropext.errors import Refused
from ropext.feed import Feed
from ropext.lengths import format_length
from ropext.schedule import Stage
from ropext.state import STATES_KEPT

STATE_FORMAT = 2
STILL_FALLING = 0.01  # of the loss at a new length, between two looks: the gate waits for less


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a run is, beside its stages and windows, and how it is watched."""

    peak_rate: float
    seed: int
    source: str  # identity of the checkpoint that training starts from: a hash
    save_every: float = 600.0  # seconds between saved states
    keep: int = STATES_KEPT  # saved states
    gate: float | None = None  # how much more than the source a stage may lose at short context: 0.03 is 3%
    adapter: str = "none"  # which LoRA is trained, in words
    memory: int | None = None  # bytes that training may take; None for all that is free
    fresh: bool = False  # optimizer state and rate curve begin anew with each stage
    tracker: str = "tensorboard"  # Accelerate's name of what logs are written for
    progress: bool = True  # a bar on stderr


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What one stage did; its fields are the keys of `finetune --json`."""

    length: int
    factor: float
    steps: int
    tokens: int
    loss_first: float  # nats per token in its first optimizer step
    loss_last: float  # and in its last
    held_out_before: Mapping[str, float]  # nats per token of text that is not trained on, by length
    held_out_after: Mapping[str, float]
    seconds: float  # in training steps, over all processes that took part
    peak_memory_bytes: int  # on a GPU this stage's peak; else the most the process ever held, earlier stages included


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A look at the held-out losses in the middle of a stage."""

    step: int  # optimizer steps done in the stage
    losses: Mapping[str, float]  # nats per token, by length


@dataclass(kw_only=True, slots=True)
class Place:
    """How far a run has come: kept in the manifest of each saved state."""

    stage: int = 0  # number of the stage in hand, from 0
    step: int = 0  # optimizer steps done in it
    loss_first: float = math.nan
    loss_last: float = math.nan
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    before: Mapping[str, float] = field(default_factory=dict)  # held-out losses when the stage began, by length
    checks: list[Check] = field(default_factory=list)  # of a gate
    results: list[StageResult] = field(default_factory=list)  # of the stages before it


def gate_missed(checks: Sequence[Check], length: int, source: Mapping[int, float], allowed: float) -> str | None:
    """Why a stage at `length` may not end yet, in words; None where it may.

    Its loss has stopped falling, and at every length of the source's losses it is no more than `allowed` above them: as
    Llama 3 goes to a new length only when short-context scores are back (Dubey et al. 2024, arXiv:2407.21783, 3.4.2).
    """
    last = checks[-1].losses
    for short, before in source.items():
        rise = math.expm1(last[str(short)] - before)
        if rise > allowed:
            return f"the held-out perplexity at {short} is {rise:+.1%} against the source's, above {allowed:.1%}"
    if len(checks) > 1 and (new := str(length)) in last:
        fell = 1 - last[new] / checks[-2].losses[new]
        if fell > STILL_FALLING:
            return (
                f"the held-out loss at {length} still falls, by {fell:.1%} in {checks[-1].step - checks[-2].step} steps"
            )
    return None


def fingerprint(feeds: Sequence[Feed], stages: Sequence[Stage], settings: Settings) -> dict[str, Any]:
    """What a resumed run must share with the run that was stopped, under the names that a person gives it."""
    text = hashlib.sha256("".join(feed.sha256 for feed in feeds).encode())
    return {
        "state format": STATE_FORMAT,
        "source checkpoint": settings.source,
        "schedule": ", ".join(
            f"{format_length(s.length)} at factor {s.factor!r}: {s.steps} steps of {s.batch}"
            + (f" at rate {s.peak_rate!r}" if s.peak_rate else "")
            for s in stages
        ),
        "seed": settings.seed,
        "learning rate": settings.peak_rate,
        "gate": settings.gate,
        "fresh optimizer": settings.fresh,
        "LoRA": settings.adapter,
        "training text": text.hexdigest(),
    }


def check_same(then: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{name} was {then.get(name)}, now {value}" for name, value in now.items() if then.get(name) != value]
    if changed:
        raise Refused(
            f"--resume continues a run as it was started: {'; '.join(changed)}; give what was given then, or start "
            "anew with another --out"
        )
