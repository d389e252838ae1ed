"""Extends a model in memory by the plan and the rules of `ropext patch`: nothing is written.

Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.checkpoint import SCHEMA, Checkpoint, read_record
from ropext.errors import Refused
from ropext.facts import read_facts
from ropext.load import set_rotary
from ropext.plan import Request, RopePlan, requested_plan
from ropext.provenance import rope_record
from ropext.safety import Finding, judge_patch, judge_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORD_NAME = "ropext_record"  # attribute of a patched model: what ropext.json is to a directory

# Of ropext.json, what holds for a loaded model too: its config has another layout than the file that was written.
KEPT = ("schema", "kind", "window", "native_length", "rope", "source")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPatchResult:
    """What was changed in a model."""

    method: str
    factor: float
    native_length: int
    target_length: int
    rope_theta: float  # in force
    attention_scaling: float  # on cos and sin
    rotary_dims: int
    config_changes: Mapping[str, tuple[Any, Any]]
    findings: tuple[Finding, ...]
    verified: str  # reader version


def patch_loaded(model: PreTrainedModel, request: Request) -> ModelPatchResult:
    """Give a model the rope of a plan. Raises UsageError and Refused as a patch of its checkpoint would; then the model
    stays as it was."""
    from ropext.verify import verify

    checkpoint = _as_checkpoint(model)
    facts = read_facts(checkpoint)
    if facts.section is not None:
        raise Refused(f"multimodal models are patched on disk: {facts.section} holds the positions. Use ropext.patch")
    stated = request.native_length is not None
    judge_source(checkpoint, facts, native_length_stated=stated).require()
    plan = requested_plan(checkpoint.config, facts, checkpoint.record, request)
    verdict = judge_patch(checkpoint, facts, plan, verified=True, native_length_stated=stated)
    verdict.require()
    reader = verify(plan)
    set_rotary(model, plan.config)
    setattr(model, RECORD_NAME, _record(plan, model))
    return ModelPatchResult(
        method=plan.method,
        factor=plan.factor,
        native_length=plan.native_length,
        target_length=plan.target_length,
        rope_theta=plan.theta,
        attention_scaling=plan.attention_scaling,
        rotary_dims=plan.rotary_dims,
        config_changes=plan.config_changes,
        findings=verdict.findings,
        verified=reader,
    )


def _as_checkpoint(model: PreTrainedModel) -> Checkpoint:
    """What the rules look at, from the model's config; its ropext.json where it was loaded from a directory."""
    path = Path(model.name_or_path or "MODEL")
    record = getattr(model, RECORD_NAME, None)
    if record is not None:
        path = Path("MODEL")  # what was loaded is no longer what it is
    elif path.is_dir():
        record = {key: value for key, value in (read_record(path) or {}).items() if key in KEPT} or None
    config = model.config.to_dict()
    return Checkpoint(path=path, config=config, tokenizer_config={}, record=record, tensors={}, weight_files={})


def _record(plan: RopePlan, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": "patch",
        "window": plan.window,
        "native_length": plan.native_length,
        "rope": rope_record(plan),
        "source": {"model": model.name_or_path or "the model as it was loaded"},
    }
