"""The extension that a checkpoint carries, and what each training stage makes of it.

Lengths are in tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ropext.carried import carried
from ropext.checkpoint import CONFIG, Checkpoint
from ropext.facts import Facts
from ropext.plan import Purpose, plan_at
from ropext.provenance import rope_record
from ropext.rope import Progressive


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRope:
    """The rope settings that one stage trains with and leaves in its checkpoint."""

    config: Mapping[str, Any]
    window: int
    record: Mapping[str, Any]  # the `rope` of ropext.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """How a checkpoint was extended: by a fixed factor, by one that grows with the stage, or not at all."""

    checkpoint: Checkpoint
    facts: Facts
    native_length: int  # before the extension
    progressive: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, facts: Facts) -> Extension:
        """Read from ropext.json; a checkpoint without one is taken as it is."""
        record = checkpoint.record
        if record is None or record["kind"] != "patch":
            return cls(checkpoint=checkpoint, facts=facts, native_length=facts.native_length, progressive=False)
        progressive = record["rope"]["method"] == "progressive"
        return cls(
            checkpoint=checkpoint, facts=facts, native_length=record["rope"]["native_length"], progressive=progressive
        )

    @property
    def window(self) -> int:
        """Tokens that the extension serves: more than dynamic NTK may write as max_position_embeddings."""
        present = carried(self.checkpoint.config, self.facts, self.checkpoint.record)
        return max(self.facts.window, present.window) if present and present.method == "dynamic" else self.facts.window

    @property
    def config_before(self) -> Mapping[str, Any]:
        """The config before the extension; of a checkpoint that is none, its own."""
        record = self.checkpoint.record
        if record is None or record["kind"] != "patch":
            return self.checkpoint.config
        original: dict[str, Any] = json.loads(record["original_files"][CONFIG])
        return original

    def at(self, length: int) -> StageRope:
        """Rope settings of a stage of this length: the checkpoint's own, or a progressive patch's at that length."""
        if not self.progressive:
            record = (self.checkpoint.record or {}).get("rope", {})
            return StageRope(config=self.checkpoint.config, window=self.facts.window, record=record)
        assert self.checkpoint.record is not None
        rope = self.checkpoint.record["rope"]
        window = max(length, self.native_length)
        settings = {name: value for name, value in rope.get("settings", {}).items() if name != "inner"}
        grown = Progressive(
            factor=rope["factor"], native_length=self.native_length, inner=rope["inner"], settings=settings
        )
        purpose = Purpose(
            method=rope["inner"],
            native_length=self.native_length,
            original_length=self.native_length,
            target_length=window,
            settings=settings,
        )
        plan = plan_at(
            self.checkpoint.config,
            replace(self.facts, theta=rope["theta_before"], scaling=None),
            grown.at(window / self.native_length),
            purpose,
        )
        return StageRope(config=plan.config, window=window, record=rope_record(plan))
