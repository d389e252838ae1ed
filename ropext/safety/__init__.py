"""Rules over a checkpoint, its facts and a plan -> findings -> a verdict that allows or refuses.

A rule reads and reports; only `Verdict.require` raises. Each has a stable code, and a page that explains it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ropext.checkpoint import Checkpoint
from ropext.errors import UsageError
from ropext.facts import Facts
from ropext.plan import RopePlan
from ropext.safety import files, methods, planned, readers, servers, settings, windows
from ropext.safety.rule import Case, Finding, Rule, Severity, Verdict, judged
from ropext.safety.servers import reader_names

__all__ = [
    "RULES",
    "Case",
    "Finding",
    "Rule",
    "Severity",
    "Verdict",
    "explain",
    "judge_checkpoint",
    "judge_patch",
    "judge_scored",
    "judge_source",
    "reader_names",
    "rules_table",
]

# Asked where a checkpoint lies, whatever can be read of it.
FILES = (files.unreadable_files, files.single_beside_shards, files.pickles_beside, files.strays)
# Without these answered, no table is the right one.
SETTINGS = (
    settings.contradictions,
    settings.unusable_values,
    settings.list_lengths,
    settings.unknown_type,
    settings.llama3_bands,
    windows.original_length_missing,
)
# Asked of every checkpoint that is to be patched, trained or checked.
SOURCE = (
    windows.raw_window_edit,
    windows.rope_edited_after_patch,
    windows.disagreeing_windows,
    windows.tokenizer_against_window,
    *SETTINGS,
    windows.window_beyond_factor,
    files.beyond_learned_table,
    settings.misspelt_keys,
    readers.stored_table,
)
# Asked of a checkpoint that stays as it is; a patch cures or states these itself.
STANDING = (
    windows.window_short_of_factor,
    windows.beyond_trained_length,
    windows.tokenizer_caps,
    readers.new_layout_alone,
    readers.no_rotary_to_scale,
    readers.outside_the_text_config,
    readers.half_precision,
    readers.table_moves,
    readers.table_switches,
    planned.code_beside,
)
# Asked of a plan.
PLAN = (
    methods.already_scaled,
    planned.unproven_type,
    planned.unknown_rope_keys,
    planned.code_beside,
    planned.native_length_taken,
    planned.large_factor,
    planned.sliding_window,
    methods.reach,
    methods.settings_kept,
    methods.frozen_temperature,
    methods.trained_scaling_replaced,
    methods.oldest_reader,
    methods.gguf,
    servers.named_reader_cannot,
    servers.window_of_vllm,
    readers.table_moves,
    readers.table_switches,
)
RULES = tuple(
    sorted(
        {each.code: each for each in (*FILES, *SOURCE, *STANDING, *PLAN, files.unknown_positions)}.values(),
        key=lambda each: each.code,
    )
)


def judge_source(checkpoint: Checkpoint, facts: Facts, *, native_length_stated: bool = False) -> Verdict:
    """Is the window that this checkpoint claims one that it was trained for, or that a rope change serves?"""
    return judged(Case(checkpoint=checkpoint, known=facts, native_length_stated=native_length_stated), SOURCE)


def judge_scored(checkpoint: Checkpoint, facts: Facts) -> Verdict:
    """What is to be said of a checkpoint that is only measured: a wrong window is worth measuring, and named; settings
    that give no table are refused."""
    verdict = judge_source(checkpoint, facts)
    grave = {each.code for each in SETTINGS}
    return Verdict(
        findings=tuple(
            found if found.severity != "refuse" or found.code in grave else replace(found, severity="warn")
            for found in verdict.findings
        )
    )


def judge_patch(
    checkpoint: Checkpoint,
    facts: Facts,
    plan: RopePlan,
    *,
    verified: bool,
    native_length_stated: bool,
    readers: tuple[str, ...] = (),
) -> Verdict:
    """May this plan be written over this checkpoint's config? `readers` count beside transformers."""
    case = Case(
        checkpoint=checkpoint,
        known=facts,
        planned=plan,
        verified=verified,
        native_length_stated=native_length_stated,
        readers=readers,
    )
    return judged(case, SOURCE, PLAN)


def judge_checkpoint(path: Path) -> tuple[Case, Verdict]:
    """What can be read of a directory, and what every rule says of it as it lies there."""
    case = files.look_at(path)
    if not case.checkpoint.config:
        return case, judged(case, FILES)
    safe = judged(case, FILES, SOURCE)
    of_facts = (planned.sliding_window,) if case.known is not None else ()
    if case.known is None and not safe.refuses:  # else a refusal above says why
        of_facts = (files.unknown_positions,)
    return case, Verdict(findings=safe.findings + judged(case, STANDING, of_facts).findings)


def explain(code: str) -> str:
    """The page of a rule. Raises UsageError, with the list of codes, for one that there is not."""
    for each in RULES:
        if each.code == code.strip().upper():
            return f"{each.code} ({each.severity}): {each.title}.\n\n{each.page}\n\nSource: {each.source}."
    raise UsageError(f"there is no rule {code!r}: the codes are {', '.join(each.code for each in RULES)}")


def rules_table() -> str:
    """Every rule as a Markdown table, for the README."""
    rows = [f"| {each.code} | {each.severity} | {each.title} |" for each in RULES]
    return "\n".join(["| code | severity | rule |", "|---|---|---|", *rows])
