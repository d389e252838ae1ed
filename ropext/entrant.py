"""A model to score: a checkpoint as it lies there, or a patch of it that is made in memory.

Lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropext.checkpoint import Checkpoint, open_checkpoint
from ropext.facts import read_facts
from ropext.figures import Rope
from ropext.inspection import inspect
from ropext.plan import RopePlan
from ropext.provenance import lineage
from ropext.safety import Finding, judge_scored


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """One model to score."""

    checkpoint: Checkpoint
    label: str
    window: int
    native_length: int
    config: Mapping[str, Any]  # that it is scored with: that of its files, or a planned one
    rope: Rope
    trained_on: frozenset[str] = frozenset()  # sha256 of documents
    findings: tuple[Finding, ...] = ()  # what the rules say of it

    @classmethod
    def of(cls, path: Path, label: str, built_in_path: Path) -> Entrant:
        """Read from the checkpoint at `path`. Raises Refused where it has no rotary embedding or is damaged."""
        checkpoint = open_checkpoint(path)
        facts = read_facts(checkpoint)
        verdict = judge_scored(checkpoint, facts)
        verdict.require()
        shown = inspect(path, str(path), built_in_path)
        table = shown.tables[-1].pairs if shown.tables else ()
        return cls(
            checkpoint=checkpoint,
            label=label,
            window=shown.target_length,
            native_length=facts.native_length,
            config=checkpoint.config,
            rope=Rope(
                method=shown.method,
                factor=shown.factor,
                theta=shown.rope_theta,
                attention_scaling=shown.attention_scaling,
                wavelengths=tuple(pair.wavelength for pair in table),
            ),
            trained_on=frozenset((checkpoint.record or {}).get("training", {}).get("documents", [])),
            findings=verdict.findings,
        )

    def patched(self, plan: RopePlan, findings: tuple[Finding, ...]) -> Entrant:
        """The same weights under a plan."""
        return replace(
            self,
            label=plan.method,
            window=plan.target_length,
            config=plan.config,
            rope=Rope(
                method=plan.method,
                factor=plan.factor,
                theta=plan.theta,
                attention_scaling=plan.attention_scaling,
                wavelengths=tuple(2 * math.pi / frequency for frequency in plan.long_frequencies),
            ),
            findings=findings,
        )


def lineage_of(checkpoint: Checkpoint, built_in_path: Path) -> list[Entrant]:
    """A checkpoint and what it came from, in the order source, patched, tuned; a label stands once."""
    steps = lineage(checkpoint, built_in_path)
    labels = [label for label, _ in steps]
    return [
        Entrant.of(path, label if labels.count(label) == 1 else f"{label} {number}", built_in_path)
        for number, (label, path) in enumerate(steps)
    ]
