"""What was measured, as frozen values with the names that `eval --json` prints.

Losses in nats per token, lengths and positions in tokens. A figure that was not measured is None; `status` is "ok" or
says why. Intervals are 95% percentile intervals that resample whole documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Interval = tuple[float, float]  # low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthScore:
    """One model at one context length."""

    length: int
    perplexity: float | None  # exp(nll); None too where that overflows
    nll: float | None  # mean loss of the scored tokens
    bits_per_byte: float | None  # their loss in bits, per byte of their UTF-8 text
    tokens: int  # scored; truncated: positions 1 .. length - 1 of each window
    documents: int
    windows: int  # 0 where the length was not measured
    ci95: Interval | None  # of the perplexity; None for fewer than two documents
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionScore:
    """Mean loss of the tokens scored at positions start .. end - 1 of the longest windows.

    Position 0 opens a window and is never predicted, so the first block scores one token a window less.
    """

    start: int
    end: int
    nll: float | None
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextScore:
    """Mean loss of one fixed set of tokens, the last ones of each window, when a context of `length` ends with them."""

    length: int  # tokens that the model sees, the scored ones included
    last_tokens: int  # scored in each window
    nll: float | None
    tokens: int
    ci95: Interval | None  # of the loss
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """One model on one task. Where there are rows by depth, there is one over all depths of the same length too."""

    task: str  # passkey_likelihood, ...; an lm-eval task by its own name
    metric: str  # acc, exact_match, ...
    length: int | None  # tokens of the prompt with room for the answer; None for a task that has no length
    depth: float | None  # where the answer lies, 0 (start) to 1 (end); None: over all depths
    score: float | None  # 0 to 1 for the tasks of ropext
    n: int
    ci95: Interval | None
    chance: float | None  # score of guessing; None where it is 0 or not known


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveLength:
    """The longest measured length of a task up to which every length scores at least the threshold; 0 for none."""

    task: str
    length: int
    threshold: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The rotary embedding that a model was scored with."""

    method: str
    factor: float | None
    theta: float
    attention_scaling: float | None  # on cos and sin
    wavelengths: tuple[float, ...]  # tokens of a whole turn of each pair, at the longest inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScores:
    """What one model scored."""

    model: str  # path or hub id
    label: str  # column heading: source, patched, tuned ...
    window: int | None  # tokens that its config serves
    native_length: int | None  # tokens that it was trained at
    weights_sha256: str | None
    rope: Rope | None
    notes: tuple[str, ...]  # what a reader of the figures should know, one line each
    results: tuple[LengthScore, ...]
    by_position: tuple[PositionScore, ...]
    by_context: tuple[ContextScore, ...]
    tasks: tuple[TaskScore, ...]
    effective_lengths: tuple[EffectiveLength, ...]
    passes: float | None  # tokens run through the model, in full passes over the longest windows; 0: scores were kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Two models on the same documents at one length."""

    label: str
    against: str
    length: int
    documents: int  # that both were scored on
    nll_difference: float | None  # loss of `label` less that of `against`; None with different tokenizers
    nll_ci95: Interval | None
    perplexity_ratio: float | None  # exp(nll_difference)
    perplexity_ratio_ci95: Interval | None
    bits_per_byte_difference: float | None
    bits_per_byte_ci95: Interval | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How the scores were made: figures with different protocols cannot be compared."""

    definition: str  # "truncated" or "sliding"
    stride: int | None  # tokens; None: consecutive windows
    window: int | None  # tokens of a window; None for a sliding one, where it is the length itself
    bos: bool  # whether each window starts with one BOS
    data: str  # name of the corpus
    data_hash: str  # over the digests of the scored documents
    dtype: str  # of the arithmetic
    device: str
    versions: Mapping[str, str]  # of ropext, torch and transformers
    tasks: Mapping[str, object]  # how tasks were made: samples, seed, threshold; empty without any


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Every model of one evaluation, each compared with the first."""

    models: tuple[ModelScores, ...]
    comparisons: tuple[Paired, ...]
    protocol: Protocol
    judged: str | None = None  # label of the model that the headline judges against the first; None: the last one

    @property
    def first_and_judged(self) -> tuple[ModelScores, ModelScores]:
        """The model that all are compared with, and the one that the headline is about; the same where it is alone."""
        found = [scores for scores in self.models if scores.label == self.judged]
        return self.models[0], found[0] if found else self.models[-1]
