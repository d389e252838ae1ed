"""What the commands print: results as lines, tables, or one JSON document.

Nothing here decides or measures. Lengths in tokens, times in seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ropext.checkpoint import TOKENIZER_CONFIG
from ropext.results import CheckResult, EvalResult, FinetuneResult, PatchResult, RevertResult

if TYPE_CHECKING:
    from ropext.inspection import Inspection, Step, Table
    from ropext.safety import Finding

LINE_EVERY = 60.0  # seconds between lines of progress where no bar can be drawn


def json_document(value: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))  # in ASCII: right in any terminal's encoding


def patch(result: PatchResult) -> None:
    """What was changed, found and verified."""
    inner = f" of {result.inner}" if result.inner else ""
    print(f"source    {result.source} ({result.why})")
    print(f"method    {result.method}{inner}, factor {result.factor:g}")
    written = (result.config_changes.get("rope_scaling", (None, None))[1] or {}).get("factor", result.factor)
    if written != result.factor:
        print(f"          with the factor in force: {written:g}")
    print(f"window    {result.native_length} -> {result.target_length} tokens")
    print(f"theta     {result.theta_before:g} -> {result.rope_theta:g}, {result.rotary_dims} rotary dimensions")
    for key, (before, after) in result.config_changes.items():
        print(f"  {key}: {json.dumps(before)} -> {json.dumps(after)}")
    if TOKENIZER_CONFIG in result.file_changes:
        print(f"  {TOKENIZER_CONFIG}: model_max_length -> {result.target_length}")
    _findings(result.findings)
    print(f"verified  {', '.join(result.verified) or 'no'}")
    print(f"{'written' if result.written else 'dry run'}   {result.out}")


def check(result: CheckResult) -> None:
    """Every finding, the gravest first, and the verdict."""
    print(f"model     {result.model}")
    grave = ("refuse", "warn", "note")
    _findings(sorted(result.findings, key=lambda finding: grave.index(finding.severity)))
    print(f"verdict   {result.verdict}")


def _findings(findings: Iterable[Finding]) -> None:
    for finding in findings:
        print(f"{finding.severity:9} {finding.message}. {finding.fix} [{finding.code}]")


def inspection(result: Inspection) -> None:
    """The rotary embedding in force, every length, the frequency table and the lineage."""
    limits = [f"trained to {result.native_length}"]
    limits += [f"serves {result.target_length}"] if result.target_length != result.window else []
    limits += [f"tokenizer {result.tokenizer_length}"] if result.tokenizer_length else []
    limits += [f"sliding window {result.sliding_window}"] if result.sliding_window else []
    factor = f", factor {result.factor:g}" if result.factor else ""
    original = f" from {result.original_length} tokens" if result.original_length else ""
    print(f"model     {result.model} ({result.model_type})")
    print(f"method    {result.method}{factor}{original} (rope_type {result.rope_type})")
    print(f"theta     {result.rope_theta:g}, {result.rotary_dims} rotary dimensions")
    if result.attention_scaling is not None:
        print(f"attention cos and sin times {result.attention_scaling:g}")
    print(f"window    {result.window} tokens: {', '.join(limits)}")
    for table in result.tables:
        _frequencies(table)
    if result.not_computed:
        print(f"table     not computed: {result.not_computed}")
    for step in result.lineage:
        print(f"{step.label:9} {step.path}{_numbers(step)}")


def _frequencies(table: Table) -> None:
    """At most 16 of the pairs, evenly chosen, first and last among them; --json has all."""
    print(f"table     at {table.length} tokens: pair, wavelength in tokens, turns within the trained length")
    last = len(table.pairs) - 1
    for index in sorted({round(step * last / 15) for step in range(16)}):
        pair = table.pairs[index]
        print(f"  {index:4} {pair.wavelength:14.1f} {pair.turns:12.3f}")


def _numbers(step: Step) -> str:
    if step.window is None:
        return " (no longer there)"
    by = f", {step.method} factor {step.factor:g}" if step.method and step.factor else ""
    return f": window {step.window}, trained to {step.native_length}{by}"


def revert(result: RevertResult) -> None:
    """What is as it was again."""
    print(f"model     {result.model}")
    print(f"restored  {', '.join(result.files)}; everything else as it is there")
    print(f"written   {result.out}")


def finetune(result: FinetuneResult) -> None:
    """One line a stage, then where everything lies."""
    for stage in result.stages:
        work = f"{stage.steps} steps, {stage.seconds:.0f} s ({stage.tokens / stage.seconds:.0f} tokens/s)"
        losses = f"loss {stage.loss_first:.3f} -> {stage.loss_last:.3f}"
        print(f"stage     {stage.length} tokens, factor {stage.factor:g}: {losses}, {work}")
        print(f"          held-out loss {_losses(stage.held_out_before)} -> {_losses(stage.held_out_after)}")
    print(f"logs      {result.logs}")
    if result.adapter:
        print(f"adapter   {result.adapter} (its base is {result.source})")
    print(f"written   {result.out} (native length now {result.native_length})")


def _losses(losses: Mapping[str, float]) -> str:
    """By length: "2.310 at 2048, 2.402 at 4096"."""
    return ", ".join(f"{loss:.3f} at {length}" for length, loss in losses.items()) or "not measured"


def evaluation(result: EvalResult) -> None:
    """The table of perplexities, and where report and plot lie."""
    from rich.console import Console

    from ropext.report import table

    Console(highlight=False).print(table(result.measurement))
    if result.best:
        print(f"best      {result.best} at the longest length; `ropext patch --method {result.best}` writes it")
    print(f"report    {result.out}")


@contextmanager
def scoring_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar a model on stderr; where stderr is no terminal, a line a minute."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}
        shown_at = time.monotonic()

        def told(label: str, done: int, total: int) -> None:
            nonlocal shown_at
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done)
            if not console.is_terminal and time.monotonic() - shown_at >= LINE_EVERY:
                shown_at = time.monotonic()
                console.print(f"{label}: {done} of {total} windows", highlight=False)

        yield told
