"""The public functions: what the command line calls, for use from Python.

Each returns a frozen result and raises the errors of `ropext.errors`. Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext import workspace
from ropext.checkpoint import RECORD, open_checkpoint
from ropext.errors import UsageError
from ropext.facts import read_facts
from ropext.lengths import format_length
from ropext.plan import RopePlan, make_plan
from ropext.provenance import patch_record
from ropext.rope import canonical_name
from ropext.safety import Finding, judge_patch, judge_source
from ropext.write import WEIGHTS, Weights, check_destination, json_bytes, patched_files, write_patched


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
    rotary_dims: int
    config_changes: Mapping[str, tuple[Any, Any]]
    file_changes: tuple[str, ...]
    findings: tuple[Finding, ...]
    verified: tuple[str, ...]  # reader versions; empty without verification


def patch(
    model: str | None = None,
    *,
    method: str,
    factor: float | None = None,
    to: int | None = None,
    out: Path | None = None,
    native_length: int | None = None,
    inner: str | None = None,
    weights: Weights = "clone",
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = True,
) -> PatchResult:
    """Write an extended copy of a checkpoint: `method` at `factor`, or up to the length `to`.

    Touches no weight and needs no torch unless `verify` asks stock transformers for the resulting rotary table.
    Raises UsageError for a request that cannot be understood, Refused for one that is unsafe; then nothing is written.
    """
    name = canonical_name(method)
    if weights not in WEIGHTS:
        raise UsageError(f"--weights is one of {', '.join(WEIGHTS)}: found {weights!r}")
    choice = workspace.named(model) or workspace.for_patch()
    source = open_checkpoint(choice.path)
    facts = read_facts(source)
    stated = native_length is not None
    judge_source(source, facts, native_length_stated=stated).require()
    plan = make_plan(source.config, facts, method=name, factor=factor, to=to, native_length=native_length, inner=inner)
    verdict = judge_patch(source, facts, plan, verified=verify, native_length_stated=stated)
    verdict.require()
    destination = out or workspace.RUNS / f"{choice.name}-{name}-{format_length(plan.target_length)}"
    if not dry_run:
        check_destination(destination, source.path, overwrite=overwrite)
    verified = (_verified(plan),) if verify else ()
    files = patched_files(source, plan.config, plan.native_length, plan.target_length)
    if not dry_run:
        record = patch_record(source, choice.model, plan, verdict.findings, files)
        write_patched(source, destination, {**files, RECORD: json_bytes(record)}, weights=weights, overwrite=overwrite)
    return PatchResult(
        source=choice.model,
        why=choice.why,
        out=str(destination),
        written=not dry_run,
        method=plan.method,
        inner=plan.inner,
        factor=plan.factor,
        native_length=plan.native_length,
        target_length=plan.target_length,
        rope_theta=plan.theta,
        theta_before=plan.theta_before,
        rotary_dims=plan.rotary_dims,
        config_changes=plan.config_changes,
        file_changes=tuple(files),
        findings=verdict.findings,
        verified=verified,
    )


def _verified(plan: RopePlan) -> str:
    from ropext.verify import verify

    return verify(plan)
