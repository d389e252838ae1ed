"""The command line: parse, call one function of `ropext.api`, print, exit code."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ropext import __version__, api
from ropext.errors import RopextError, UsageError
from ropext.lengths import parse_length

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Make the context of a RoPE checkpoint longer, train it there in growing stages, and measure gain and cost.",
)

MODEL_HELP = "Checkpoint directory; left out, it is taken from ropext-runs/ here, else the built-in one."
Model = Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def patch(
    model: Model = None,
    method: Annotated[str | None, typer.Option(help="linear, ntk (to prefer) or progressive.")] = None,
    factor: Annotated[float | None, typer.Option(help="Target length / native length, above 1.")] = None,
    to: Annotated[str | None, typer.Option(help="Target length instead of a factor, such as 8k.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write; default below ropext-runs/.")] = None,
    native_length: Annotated[str | None, typer.Option(help="Length the model was trained at.")] = None,
    inner: Annotated[str | None, typer.Option(help="Method whose factor progressive raises: ntk or linear.")] = None,
    weights: Annotated[str, typer.Option(help="clone (shares disk blocks if possible), copy, or link.")] = "clone",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that ropext wrote.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the difference, write nothing.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the check in stock transformers.")] = False,
    as_json: Json = False,
) -> None:
    """Write an extended checkpoint: ropext patch --method ntk --factor 4"""
    if method is None:
        raise UsageError("a method is needed: add --method ntk (recommended), linear or progressive")
    result = api.patch(
        model,
        method=method,
        factor=factor,
        to=_length(to),
        out=out,
        native_length=_length(native_length),
        inner=inner,
        weights=weights,  # type: ignore[arg-type]  # api.patch checks it
        overwrite=overwrite,
        dry_run=dry_run,
        verify=not no_verify,
    )
    _print_json(asdict(result)) if as_json else _print_patch(result)


def _length(text: str | None) -> int | None:
    return None if text is None else parse_length(text)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def _print_patch(result: api.PatchResult) -> None:
    print(f"source   {result.source} ({result.why})")
    inner = f" of {result.inner}" if result.inner else ""
    print(f"method   {result.method}{inner}, factor {result.factor:g}")
    print(f"window   {result.native_length} -> {result.target_length} tokens")
    print(f"theta    {result.theta_before:g} -> {result.rope_theta:g}, {result.rotary_dims} rotary dimensions")
    for key, (before, after) in result.config_changes.items():
        print(f"  {key}: {json.dumps(before)} -> {json.dumps(after)}")
    for finding in result.findings:
        print(f"{finding.severity:8} {finding.message}. {finding.fix} [{finding.code}]")
    print(f"verified {', '.join(result.verified) or 'no'}")
    print(f"{'written' if result.written else 'dry run'}  {result.out}")


def main() -> None:
    """Run the command line; every error of ropext and of the parser ends in one or two lines and its exit code."""
    debug = os.environ.get("ROPEXT_DEBUG") == "1"
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except RopextError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", 130)
    except Exception as error:
        message = getattr(error, "format_message", None)  # a usage error of the parser
        if message is None or debug:
            raise
        _fail(message(), getattr(error, "exit_code", 2))


def _fail(message: str, exit_code: int) -> None:
    print(f"ropext: {message}", file=sys.stderr)
    sys.exit(exit_code)
