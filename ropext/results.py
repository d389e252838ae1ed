"""What the public functions return: frozen, with the field names that `--json` prints. Lengths are in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ropext.figures import Measurement, ModelScores, Protocol
    from ropext.safety import Finding
    from ropext.training import StageResult


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchResult:
    """What a patch wrote, or would write. Field names are those of `patch --json`."""

    source: str
    why: str  # how the source was chosen
    out: str
    written: bool  # False for a dry run
    method: str
    inner: str | None
    factor: float
    native_length: int
    target_length: int
    rope_theta: float  # in force
    theta_before: float
    attention_scaling: float  # on cos and sin
    settings: Mapping[str, Any]  # explicit ones of the method
    rotary_dims: int
    config_changes: Mapping[str, tuple[Any, Any]]
    file_changes: tuple[str, ...]
    findings: tuple[Finding, ...]
    verified: tuple[str, ...]  # reader versions; empty without verification

    OF_THE_PLAN: ClassVar[tuple[str, ...]] = (
        *("method", "inner", "factor", "native_length", "target_length", "theta_before", "attention_scaling"),
        *("settings", "rotary_dims", "config_changes"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What every rule says of a checkpoint as it lies there. Field names are those of `check --json`."""

    model: str
    findings: tuple[Finding, ...]
    verdict: str  # "refused" where some finding refuses, else "allowed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RevertResult:
    """What a revert wrote."""

    model: str
    out: str
    files: tuple[str, ...]  # with their original bytes again


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneResult:
    """What a run of stages left. Field names are those of `finetune --json`."""

    source: str
    out: str
    data: str
    learning_rate: float  # the peak of the one curve over all stages
    stages: tuple[StageResult, ...]
    adapter: str | None  # directory of the adapter, with LoRA
    logs: str  # TensorBoard files
    written: bool  # False in every process of a launch but the first
    native_length: int  # of the result: the longest length it was trained at


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """What was measured, and where the report lies."""

    measurement: Measurement
    out: str
    written: bool  # False in every process of a launch but the first
    best: str | None  # of the methods that were compared, at the longest length that was measured
    missed_gate: str | None  # how max_regression is missed, in words; None where it is met or not asked for

    @property
    def models(self) -> tuple[ModelScores, ...]:
        """The scores of each model."""
        return self.measurement.models

    @property
    def protocol(self) -> Protocol:
        """How they were made."""
        return self.measurement.protocol

    @property
    def complete(self) -> bool:
        """Whether some length was measured and none failed."""
        figures = [figure for scores in self.models for figure in scores.results]
        measured = any(figure.nll is not None for figure in figures)
        failed = any(figure.windows and figure.nll is None for figure in figures)
        contexts = [figure for scores in self.models for figure in scores.by_context]
        tasks = [score for scores in self.models for score in scores.tasks]
        return (
            measured
            and not failed
            and not any(figure.status.startswith("failed") for figure in contexts)
            and not any(score.score is None for score in tasks)
        )
