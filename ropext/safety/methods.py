"""Rules about a method: what it does on top of another, how far it reaches, and what readers make of it.

Lengths are in tokens.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from ropext.carried import NO_EFFECT, Carried, carried
from ropext.errors import short
from ropext.lengths import format_length
from ropext.plan import RopePlan
from ropext.rope import Plain, unfinished_pair
from ropext.safety.rule import Case, rule

BEYOND = 1.25  # times the target: reaching so much further is more than was asked for


@rule("RPX004", "refuse", "Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.2: scaling as trained")
def already_scaled(case: Case) -> Iterator[tuple[str, str]]:
    """A factor is never put on top of a factor.

    A checkpoint that is scaled already, by ropext or by its makers, would get the product of both factors, or lose the
    scaling that it was trained with. Say which is meant. `--extend-scaling` keeps the method, its original length and
    its settings, and multiplies its factor by new window / window in force. `--replace-scaling` sets another method in
    its place, from the length that the model had before.
    """
    present = carried(case.checkpoint.config, case.facts, case.checkpoint.record)
    if present is None or case.plan.carried is not None:
        return
    target = case.plan.target_length
    if target <= present.window:
        target = math.floor(present.window * case.plan.factor)
    record = case.checkpoint.record or {}
    if record.get("kind") == "patch":
        found = f"already extended by {record['rope'].get('factor')}"
        anew = f"ropext patch {shlex.quote(record['source']['model'])} --method {case.plan.method}"
    else:
        start = f", from {present.original_length} tokens" if present.original_length else ""
        factor = (case.facts.scaling or {}).get("factor")
        found = f"already scaled ({short(present.method)}, factor {short(factor)}{start})"
        anew = f"ropext patch {_path(case)} --method {case.plan.method} --replace-scaling"
        anew += "" if present.original_length else " --native-length L"
    extended = _extending(case, present, target)
    yield (
        f"factors never multiply: this checkpoint was {found}",
        f"{extended}To start from before it: `{anew} --to {format_length(target)}`",
    )


def _path(case: Case) -> str:
    return shlex.quote(str(case.checkpoint.path))


def _extending(case: Case, present: Carried, target: int) -> str:
    """The command that multiplies the factor, where one does."""
    if (
        present.method == "abf"
        or present.factor is None
        or (present.original_length is None and present.method != "linear")
    ):
        return ""
    lists = " --longrope-factors FILE" if present.method == "longrope" else ""
    return (
        f"To multiply it by {target / present.window:g}: `ropext patch {_path(case)} --method {present.method} "
        f"--extend-scaling --to {format_length(target)}{lists}`. "
    )


@rule("RPX010", "note", "bloc97 2023, NTK-Aware Scaled RoPE; Liu et al. 2023, arXiv:2310.05209, section 3")
def reach(case: Case) -> Iterator[tuple[str, str]]:
    """How far a method reaches without training is not always its target.

    Pairs that never completed a turn within the native length must be divided by the whole factor to see no new angle.
    Static NTK divides them by less, the fastest of them least, so new angles come before the target: fine-tune at the
    target, or choose a larger factor. Dynamic NTK divides them by more, as a large theta or long list may: each pair
    that is divided by more than it must be costs quality at short lengths, and a smaller number does.
    """
    plan = case.plan
    pair = unfinished_pair(plan.theta_before, plan.rotary_dims, plan.native_length)
    if not pair or (plan.carried == "extend" and plan.original_length != plan.native_length):
        return
    plain = Plain().frequencies(plan.theta_before, plan.rotary_dims)
    divisions = [before / after for before, after in zip(plain, plan.long_frequencies, strict=True)][pair:]
    reached = int(plan.native_length * min(divisions) * (1 + 1e-9))
    name = {"ntk": "static NTK"}.get(plan.inner or plan.method, plan.method)
    if reached < plan.target_length:
        yield (
            f"{name} divides the first unfinished pair by {min(divisions):.2f}, so without training it "
            f"reaches about {reached} of {plan.target_length} tokens",
            f"Fine-tune at the target{_larger(plan, pair)}",
        )
    elif reached > BEYOND * plan.target_length or plan.method == "dynamic":
        yield (
            f"{name} divides the slowest pair by {divisions[-1]:.4g} at {plan.target_length} tokens, where "
            f"{plan.factor:.4g} would do: it reaches about {reached} tokens",
            _smaller(plan, pair),
        )


def _larger(plan: RopePlan, pair: int) -> str:
    """What reaches the target, in words that follow the other way to it."""
    if "ntk" in (plan.method, plan.inner):
        return f", or patch with factor {plan.factor ** ((plan.rotary_dims // 2 - 1) / pair):.3g}"
    return f", or patch with --theta {_theta_that_reaches(plan, pair):.6g}" if plan.method == "abf" else ""


def _smaller(plan: RopePlan, pair: int) -> str:
    if plan.method == "abf":
        return f"--theta {_theta_that_reaches(plan, pair):.6g} reaches the target"
    if plan.method == "dynamic":  # division of pair p at the target: (F (s - 1) + 1)^(2p / (d - 2))
        needed = (plan.factor ** ((plan.rotary_dims - 2) / (2 * pair)) - 1) / (plan.factor - 1)
        return f"A factor of {max(needed, 1.0):.3g} reaches {plan.target_length} tokens too: its table grows by itself"
    return "Use lists or a factor made for the target"


def _theta_that_reaches(plan: RopePlan, pair: int) -> float:
    return float(plan.theta_before * plan.factor ** (plan.rotary_dims / (2 * pair)))


@rule("RPX050", "note", "Peng et al. 2023, arXiv:2309.00071, section 3.4")
def settings_kept(case: Case) -> Iterator[tuple[str, str]]:
    """An extended scaling keeps the settings that its makers gave it.

    Band edges, temperatures and the original length of a scaling belong to the training that it went through, so
    `--extend-scaling` leaves them as they are and never puts defaults in their place. Keys that no reader reads go.
    """
    present = carried(case.checkpoint.config, case.facts, case.checkpoint.record)
    if case.plan.carried != "extend" or present is None:
        return
    kept = {key: value for key, value in present.settings.items() if not isinstance(value, tuple | list)}
    if kept:
        named = ", ".join(f"{key} {value}" for key, value in kept.items())
        yield f"settings of the scaling in force stay as they are: {named}", "Use --replace-scaling to set others"
    for key in present.no_effect:
        right = NO_EFFECT[key]
        yield (
            f"{key} has no effect in transformers and is left out",
            f"{right} would have one; it is never renamed, that changes the model" if right else "Nothing is lost",
        )


@rule("RPX051", "warn", "Peng et al. 2023, arXiv:2309.00071, section 3.4, eq. 22")
def frozen_temperature(case: Case) -> Iterator[tuple[str, str]]:
    """An attention factor that is written out does not follow a new factor.

    Readers compute YaRN's temperature from the factor unless the config states an attention_factor. One that was stated
    for the old factor stays what it was under `--extend-scaling`. Whether that is right only its makers can tell.
    """
    plan = case.plan
    if plan.carried == "extend" and plan.method in ("yarn", "longrope") and "attention_factor" in plan.settings:
        yield (
            f"attention_factor {plan.settings['attention_factor']:g} stays while the factor grows: it was stated for "
            "the old one",
            f"--replace-scaling with --method {plan.method} lets it follow the factor",
        )


@rule("RPX052", "warn", "Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.2")
def trained_scaling_replaced(case: Case) -> Iterator[tuple[str, str]]:
    """A scaling that the weights were trained with is part of the model.

    Weights that learned their positions under one table read worse under another, until they are trained again.
    `--replace-scaling` takes that scaling away; `--extend-scaling` keeps it.
    """
    if case.plan.carried == "replace" and (case.checkpoint.record or {}).get("kind") != "patch":
        yield (
            f"weights may have been trained with the scaling that is replaced: they meet {case.plan.method} for the "
            "first time",
            "Fine-tune the output, or use --extend-scaling",
        )


@rule("RPX053", "note", "transformers 4.43.0, release notes: Llama 3.1")
def oldest_reader(case: Case) -> Iterator[tuple[str, str]]:
    """llama3 is understood from transformers 4.43 on.

    Older readers refuse the block because it has more fields than type and factor. Taking fields away, or raising its
    original length to the window, makes them load another model: the original length is that of pre-training.
    """
    if "llama3" in (case.plan.method, case.plan.inner):
        yield "transformers understands llama3 from 4.43 on", "Use a newer reader, or --method ntk"


@rule("RPX054", "note", "llama.cpp, convert_hf_to_gguf.py")
def gguf(case: Case) -> Iterator[tuple[str, str]]:
    """Conversion to GGUF carries few methods whole.

    llama.cpp's converter reads linear and yarn (factor, original length, betas) and llama3. It has no dynamic NTK,
    longrope for some families only, and no attention_factor or truncate of yarn, which ntk-by-parts needs. A
    progressive patch is converted as its inner method at the final factor, whatever it was trained at.
    """
    plan = case.plan
    lost = [name for name in ("attention_factor", "truncate", "mscale", "mscale_all_dim") if name in plan.settings]
    if plan.method in ("dynamic", "longrope", "progressive", "ntk-by-parts"):
        yield f"conversion to GGUF may not carry {plan.method}", "Compare what the converter writes with config.json"
    elif lost:
        yield (
            f"conversion to GGUF may not carry {', '.join(lost)} of {plan.method}",
            "Compare what the converter writes with config.json",
        )
