"""What the commands print: results as lines, tables, or one JSON document.

Nothing here decides or measures. Lengths in tokens, times in seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ropext import api

LINE_EVERY = 60.0  # seconds between lines of progress where no bar can be drawn


def json_document(value: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def patch(result: api.PatchResult) -> None:
    """What was changed, found and verified."""
    inner = f" of {result.inner}" if result.inner else ""
    print(f"source    {result.source} ({result.why})")
    print(f"method    {result.method}{inner}, factor {result.factor:g}")
    print(f"window    {result.native_length} -> {result.target_length} tokens")
    print(f"theta     {result.theta_before:g} -> {result.rope_theta:g}, {result.rotary_dims} rotary dimensions")
    for key, (before, after) in result.config_changes.items():
        print(f"  {key}: {json.dumps(before)} -> {json.dumps(after)}")
    for finding in result.findings:
        print(f"{finding.severity:9} {finding.message}. {finding.fix} [{finding.code}]")
    print(f"verified  {', '.join(result.verified) or 'no'}")
    print(f"{'written' if result.written else 'dry run'}   {result.out}")


def finetune(result: api.FinetuneResult) -> None:
    """One line a stage, then where everything lies."""
    for stage in result.stages:
        work = f"{stage.steps} steps, {stage.seconds:.0f} s ({stage.tokens / stage.seconds:.0f} tokens/s)"
        losses = f"loss {stage.loss_first:.3f} -> {stage.loss_last:.3f}"
        print(f"stage     {stage.length} tokens, factor {stage.factor:g}: {losses}, {work}")
    print(f"logs      {result.logs}")
    print(f"written   {result.out} (native length now {result.native_length})")


def evaluation(result: api.EvalResult) -> None:
    """The table of perplexities, and where report and plot lie."""
    from rich.console import Console

    from ropext.report import table

    Console(highlight=False).print(table(result.models, result.protocol))
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
