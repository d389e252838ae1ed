"""The command line: parse, call one function of `ropext.api`, print, exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ropext.errors import GateNotMet, RopextError, UsageError
from ropext.lengths import parse_bytes, parse_length, parse_lengths, parse_percent, parse_schedule, parse_seconds
from ropext.rope import METHODS
from ropext.version import __version__

STOPPED = 130  # exit code after Ctrl-C

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Make the context of a RoPE checkpoint longer, train it there in growing stages, and measure gain and cost.",
)

MODEL_HELP = "Checkpoint directory; left out, it is taken from ropext-runs/ here, else the built-in one."
Model = Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=False)]
METHOD_HELP = "ntk (to prefer), linear, abf, dynamic, ntk-by-parts, yarn, longrope, llama3 or progressive."
NamedModel = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, or a hub id.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text: a .txt, .md or .py file, .jsonl, .parquet, a folder, or a hub data set id[:config[:split]]."
    ),
]
TextField = Annotated[str, typer.Option(help="Field of a row that holds the text.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def patch(
    model: Model = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    factor: Annotated[str | None, typer.Option(help="Target length / native length, above 1.")] = None,
    to: Annotated[str | None, typer.Option(help="Target length instead of a factor, such as 8k.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write; default below ropext-runs/.")] = None,
    native_length: Annotated[str | None, typer.Option(help="Length the model was trained at.")] = None,
    inner: Annotated[str | None, typer.Option(help="Method whose factor progressive raises; default ntk.")] = None,
    theta: Annotated[str | None, typer.Option(help="abf: the rope theta to set.")] = None,
    beta_fast: Annotated[str | None, typer.Option(help="yarn: pairs that turn more often stay; default 32.")] = None,
    beta_slow: Annotated[str | None, typer.Option(help="yarn: pairs that turn less are divided; default 1.")] = None,
    no_truncate: Annotated[bool, typer.Option("--no-truncate", help="yarn: band edges between pairs.")] = False,
    attention_factor: Annotated[str | None, typer.Option(help="yarn, longrope: factor on cos and sin.")] = None,
    mscale: Annotated[str | None, typer.Option(help="yarn: DeepSeek's temperature, with --mscale-all-dim.")] = None,
    mscale_all_dim: Annotated[str | None, typer.Option(help="yarn: what --mscale is divided by.")] = None,
    low_freq_factor: Annotated[str | None, typer.Option(help="llama3: band edge, default 1.")] = None,
    high_freq_factor: Annotated[str | None, typer.Option(help="llama3: band edge, default 4.")] = None,
    longrope_factors: Annotated[Path | None, typer.Option(help="longrope: JSON or CSV file of its lists.")] = None,
    extend_scaling: Annotated[
        bool, typer.Option("--extend-scaling", help="Multiply the factor in force; all else of it stays.")
    ] = False,
    replace_scaling: Annotated[
        bool, typer.Option("--replace-scaling", help="Another method in place of the one in force.")
    ] = False,
    readers: Annotated[str | None, typer.Option(help="Count llama.cpp or vllm too, such as llama.cpp,vllm.")] = None,
    weights: Annotated[str, typer.Option(help="clone (shares disk blocks if possible), copy, or link.")] = "clone",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that ropext wrote.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the difference, write nothing.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the check in stock transformers.")] = False,
    as_json: Json = False,
) -> None:
    """Write an extended checkpoint: ropext patch --method ntk --factor 4"""
    from ropext import api, show

    if method is None:
        raise UsageError(f"a method is needed: add --method ntk (recommended), or one of {', '.join(METHODS)}")
    result = api.patch(
        model,
        method=method,
        factor=_number("--factor", factor),
        to=_length(to),
        out=out,
        native_length=_length(native_length),
        longrope_factors=longrope_factors,
        extend_scaling=extend_scaling,
        replace_scaling=replace_scaling,
        inner=inner,
        theta=_number("--theta", theta),
        beta_fast=_number("--beta-fast", beta_fast),
        beta_slow=_number("--beta-slow", beta_slow),
        truncate=False if no_truncate else None,
        attention_factor=_number("--attention-factor", attention_factor),
        mscale=_number("--mscale", mscale),
        mscale_all_dim=_number("--mscale-all-dim", mscale_all_dim),
        low_freq_factor=_number("--low-freq-factor", low_freq_factor),
        high_freq_factor=_number("--high-freq-factor", high_freq_factor),
        readers=readers.split(",") if readers else (),
        weights=weights,  # type: ignore[arg-type]  # api.patch checks it
        overwrite=overwrite,
        dry_run=dry_run,
        verify=not no_verify,
    )
    show.json_document(asdict(result)) if as_json else show.patch(result)


@app.command()
def finetune(
    model: Model = None,
    schedule: Annotated[str | None, typer.Option(help="Growing stage lengths, such as 2k,4k,8k.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with length, tokens, rate of each stage.")] = None,
    data: Data = None,
    text_field: TextField = "text",
    chat: Annotated[bool, typer.Option("--chat", help="Rows of messages; only the answers are learnt.")] = False,
    pack: Annotated[bool, typer.Option("--pack", help="Short documents share rows, each seen by itself.")] = False,
    pose: Annotated[bool, typer.Option("--pose", help="Skip positions in rows of the native length.")] = False,
    short_data: Annotated[str | None, typer.Option(help="Text that keeps short-context skill, mixed in.")] = None,
    short_share: Annotated[str, typer.Option(help="Share of the rows that --short-data gets.")] = "40%",
    held_out: Annotated[str | None, typer.Option(help="Text to score; default the ends of some of --data.")] = None,
    lora: Annotated[int | None, typer.Option(help="Train LoRA of this rank, with norms and embeddings.")] = None,
    lora_only: Annotated[bool, typer.Option("--lora-only", help="With --lora: norms and embeddings stay.")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="A stage ends when held-out losses are as they should.")] = False,
    gate_tolerance: Annotated[str, typer.Option(help="Perplexity that --gate allows at short context.")] = "3%",
    memory: Annotated[str | None, typer.Option(help="What training may take, such as 24GB; default all free.")] = None,
    tracker: Annotated[str, typer.Option(help="Where logs go: a tracker that Accelerate knows.")] = "tensorboard",
    fresh_optimizer: Annotated[
        bool, typer.Option("--fresh-optimizer", help="Optimizer and rate begin anew with each stage.")
    ] = False,
    tokens_per_stage: Annotated[str | None, typer.Option(help="Tokens of each stage, such as 160k.")] = None,
    steps_per_stage: Annotated[int | None, typer.Option(help="Optimizer steps of each stage; default 20.")] = None,
    batch_tokens: Annotated[str | None, typer.Option(help="Tokens of a step; default the longest stage.")] = None,
    learning_rate: Annotated[str | None, typer.Option(help="Peak; default 2e-5 x 4096 / hidden size.")] = None,
    save_every: Annotated[str, typer.Option(help="Time between saved states, such as 10m or 90s.")] = "10m",
    keep: Annotated[int, typer.Option(help="Saved states that stay.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Directory to write; default NAME-tuned.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the stopped run of this output.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order of the text.")] = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train a patched checkpoint in growing stages: ropext finetune --schedule 2k,4k,8k"""
    from ropext import api, show

    if schedule is None and recipe is None:
        raise UsageError("a schedule is needed: add --schedule with growing lengths, such as 2k,4k,8k")
    result = api.finetune(
        model,
        schedule=() if schedule is None else parse_schedule(schedule),
        recipe=recipe,
        data=data,
        text_field=text_field,
        chat=chat,
        pack=pack,
        pose=pose,
        short_data=short_data,
        short_share=parse_percent(short_share),
        held_out=held_out,
        lora=lora,
        lora_only=lora_only,
        gate=parse_percent(gate_tolerance) if gate else None,
        memory=None if memory is None else parse_bytes(memory),
        tracker=tracker,
        fresh_optimizer=fresh_optimizer,
        tokens_per_stage=_length(tokens_per_stage),
        steps_per_stage=steps_per_stage,
        batch_tokens=_length(batch_tokens),
        learning_rate=_number("--learning-rate", learning_rate),
        save_every=parse_seconds(save_every),
        keep=keep,
        out=out,
        resume=resume,
        seed=seed,
        device=device,
        say=_say(as_json),
    )
    if result.written:
        show.json_document(asdict(result)) if as_json else show.finetune(result)


@app.command("eval")
def evaluate(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL ...]", help=MODEL_HELP)] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths to measure at, such as 512,8192.")] = None,
    data: Data = None,
    text_field: TextField = "text",
    documents: Annotated[int | None, typer.Option(help="Score at most so many documents.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Score at most so many tokens, such as 1m.")] = None,
    stride: Annotated[str | None, typer.Option(help="Slide the windows by so many tokens.")] = None,
    window: Annotated[str | None, typer.Option(help="Cut windows of this length, not of the longest asked.")] = None,
    last_tokens: Annotated[
        str | None, typer.Option(help="Score the last so many tokens, such as 512, under each context length.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Rank patches of one model made in memory, such as ntk,yarn; with --factor.")
    ] = None,
    factor: Annotated[str | None, typer.Option(help="How far --methods extend, above 1.")] = None,
    to: Annotated[str | None, typer.Option(help="Target length of --methods instead of a factor.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="passkey, needle, multikey, kv, tracking, retrieval (all five), or any of lm-eval."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Examples of a task at each length.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the tasks' texts.")] = 0,
    threshold: Annotated[str | None, typer.Option(help="Score of an effective length; default 0.85.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with lm-eval tasks of your own.")] = None,
    max_regression: Annotated[
        str | None, typer.Option(help="Exit code 4 if perplexity within the native length rises by more, such as 2%.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows in one forward pass.")] = 1,
    alone: Annotated[bool, typer.Option("--alone", help="Score one model without its lineage.")] = False,
    rescore: Annotated[bool, typer.Option("--rescore", help="Run the model though its scores are kept.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default below ropext-runs/reports.")] = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="Arithmetic: float32, bfloat16 or float16.")] = "float32",
    as_json: Json = False,
) -> None:
    """Measure perplexity by length, with the models it came from beside it: ropext eval --lengths 512,8192"""
    from ropext import api, show

    if lengths is None:
        raise UsageError("lengths are needed: add --lengths, such as 512,8192")
    with show.scoring_progress() as progress:
        result = api.evaluate(
            models or [],
            lengths=parse_lengths(lengths),
            data=data,
            text_field=text_field,
            documents=documents,
            tokens=_length(tokens),
            stride=_length(stride),
            window=_length(window),
            last_tokens=_length(last_tokens),
            methods=_names("--methods", methods),
            factor=_number("--factor", factor),
            to=_length(to),
            tasks=_names("--tasks", tasks),
            samples=samples,
            seed=seed,
            threshold=_number("--threshold", threshold),
            include_path=include_path,
            max_regression=None if max_regression is None else parse_percent(max_regression),
            batch_size=batch_size,
            alone=alone,
            rescore=rescore,
            out=out,
            device=device,
            dtype=dtype,
            say=_say(as_json),
            progress=progress,
        )
    if result.written:
        show.json_document(api.eval_document(result)) if as_json else show.evaluation(result)
    if result.missed_gate:
        raise GateNotMet(f"--max-regression {max_regression} is missed: {result.missed_gate}")
    raise typer.Exit(0 if result.complete else 1)


@app.command()
def check(
    model: Model = None,
    explain: Annotated[str | None, typer.Option(help="Print the page of a rule, such as RPX001, and exit.")] = None,
    as_json: Json = False,
) -> None:
    """Ask every rule about a checkpoint; exit code 3 if it holds an unsafe edit: ropext check MODEL"""
    from ropext import api, safety, show

    if explain is not None:
        if model is not None or as_json:
            raise UsageError("--explain prints the page of a rule: leave out MODEL and --json")
        print(safety.explain(explain))
        return
    result = api.check(model)
    show.json_document(asdict(result)) if as_json else show.check(result)
    raise typer.Exit(3 if result.verdict == "refused" else 0)


@app.command("show")
def show_(model: NamedModel, as_json: Json = False) -> None:
    """Print the rotary embedding in force, every length, and the lineage: ropext show MODEL"""
    from ropext import api, show

    result = api.show_checkpoint(model)
    show.json_document(asdict(result)) if as_json else show.inspection(result)


@app.command()
def revert(
    model: NamedModel,
    out: Annotated[Path | None, typer.Option(help="Directory to write.")] = None,
) -> None:
    """Write a patched checkpoint as it was before, byte for byte: ropext revert MODEL --out DIR"""
    from ropext import api, show

    if out is None:
        raise UsageError("an output is needed: add --out with a directory that is not there yet")
    show.revert(api.revert(model, out=out))


@app.command()
def demo() -> None:
    """Patch, tune and measure the built-in checkpoint: about ten minutes on two cores, nothing is downloaded."""
    from ropext import api, show

    with show.scoring_progress() as progress:
        _, tuned, scores = api.demo(progress=progress)
    show.finetune(tuned)
    show.evaluation(scores)


def _say(as_json: bool) -> Callable[[str], None]:
    """Progress goes to stderr where stdout is for one JSON document."""
    return (lambda line: print(line, file=sys.stderr)) if as_json else print


def _length(text: str | None) -> int | None:
    return None if text is None else parse_length(text)


def _names(option: str, text: str | None) -> list[str]:
    """Names separated by commas; none where the option is not given."""
    names = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(names):
        raise UsageError(f"{option} takes names separated by commas: found {text!r}")
    return names


def _number(option: str, text: str | None) -> float | None:
    """The number given for an option; whether it makes sense is for the library to say."""
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UsageError(f"{option} is a number: found {text!r}") from None


def main() -> None:
    """Run the command line; every error of ropext and of the parser ends in one or two lines and its exit code."""
    debug = os.environ.get("ROPEXT_DEBUG") == "1"
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold what a terminal's encoding, or any, has no bytes for
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False) or 0
        if code == STOPPED:  # Typer's way to say that Ctrl-C was pressed
            raise KeyboardInterrupt
        sys.exit(code)
    except RopextError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", STOPPED)
    except Exception as error:
        message = getattr(error, "format_message", None)  # a usage error of the parser
        if message is None or debug:
            raise
        _fail(message(), getattr(error, "exit_code", 2))


def _fail(message: str, exit_code: int) -> None:
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(f"ropext: {message}", file=sys.stderr)
    elif exit_code == 1:  # the other kinds happen in each process of a launch alike, and are said once
        print(f"ropext (process {rank}): {message}", file=sys.stderr)
    sys.exit(exit_code)
