"""Rules about a plan: may it be written over this checkpoint's config, and what does it not do?

Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from ropext.errors import short
from ropext.families import PROVEN
from ropext.safety.rule import Case, rule

LARGE_FACTOR = 64


@rule("RPX005", "refuse", "the model classes of transformers 5.24 and 4.57")
def unproven_type(case: Case) -> Iterator[tuple[str, str]]:
    """The rotary table of a model type is proved before anything is written.

    About 60 causal model types load rope keys and ignore them, others read them in their own way. For a type that
    ropext does not know, only stock transformers can prove that the written config gives the planned table.
    """
    if case.facts.model_type not in PROVEN and not case.verified:
        yield (
            f"the rotary table of a model type must be proved: {case.facts.model_type} is not one of "
            f"{', '.join(sorted(PROVEN))}",
            "Leave out --no-verify",
        )


@rule("RPX006", "refuse", "Wang et al. 2024, arXiv:2409.12191 (M-RoPE)")
def unknown_rope_keys(case: Case) -> Iterator[tuple[str, str]]:
    """Rope settings that a plan does not cover are never lost.

    Some models add settings of their own to plain rope. A patch that dropped them would change the model in ways that
    nobody asked for; those that are known to go with any table, such as the sections of M-RoPE that turn by image row
    and column, stay as they are.
    """
    unknown = case.facts.rope_extras
    if unknown and case.facts.scaling is None:
        yield (
            f"rope settings that a plan does not cover must not be lost: found {short(', '.join(unknown))}",
            "Such models are not built yet",
        )


@rule("RPX011", "warn", "transformers, auto_map and trust_remote_code")
def code_beside(case: Case) -> Iterator[tuple[str, str]]:
    """A table is proved for stock code, not for code that lies beside the weights.

    With trust_remote_code a reader runs the checkpoint's own modeling file instead of the stock class, and that file
    may read other rope keys, or none. ropext never runs it, so it cannot say what it does.
    """
    if case.checkpoint.config.get("auto_map"):
        yield (
            "a table is proved for stock transformers: this checkpoint brings its own code too (auto_map), "
            "which is not run here",
            "Load the output without trust_remote_code",
        )


@rule("RPX007", "note", "Yang et al. 2025, arXiv:2505.09388 (Qwen3), section 3.2")
def native_length_taken(case: Case) -> Iterator[tuple[str, str]]:
    """Which number was taken as the trained length.

    Every method works from the length that the model was trained at. A config states only its window, which may be
    longer (Qwen3: window 40960, trained at 32768), so the number taken is printed.
    """
    if not case.native_length_stated and case.plan.carried != "extend":  # that starts from its own original length
        yield (
            f"taking {case.plan.native_length} as the native length",
            "If it was trained shorter, say so with --native-length",
        )


@rule("RPX008", "warn", "Ding et al. 2024, arXiv:2402.13753")
def large_factor(case: Case) -> Iterator[tuple[str, str]]:
    """No published result reaches very far in one step.

    Beyond a factor of 64 no method was shown to keep the model usable; LongRoPE reached its 2 million tokens in two
    steps with training between them.
    """
    if case.plan.factor > LARGE_FACTOR:
        yield (
            f"a factor above {LARGE_FACTOR} is beyond what any method was shown to bear: found {case.plan.factor:g}",
            "Extend in steps, with training between them",
        )


@rule("RPX009", "warn", "Jiang et al. 2023, arXiv:2310.06825 (Mistral 7B), section 2")
def sliding_window(case: Case) -> Iterator[tuple[str, str]]:
    """Layers that look back less far than the window gain nothing from it.

    A sliding window bounds how far attention reaches, whatever the rotary embedding allows. Where every layer has one,
    as in Mistral 7B v0.1, text beyond it does not reach the next token, and an extension is an illusion.
    """
    facts, plan = case.facts, case.planned
    extended = plan is not None or facts.scaling is not None or case.checkpoint.record is not None
    target = facts.window if plan is None else plan.target_length
    if extended and facts.sliding_window is not None and facts.sliding_window < target:
        yield (
            f"attention must reach as far as the window: sliding_window is {facts.sliding_window}, the target "
            f"{target}. No rotary layer sees further, so nothing is gained beyond it",
            "It is left as it is; prefer a model without a sliding window",
        )
