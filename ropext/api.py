"""The public functions: what the command line calls, for use from Python.

Each returns a frozen result and raises the errors of `ropext.errors`. Lengths are in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ropext import workspace
from ropext.checkpoint import RECORD, Checkpoint, open_checkpoint
from ropext.demo import CHECKPOINT
from ropext.errors import Refused, RopextError, UsageError
from ropext.factors import read_factors
from ropext.facts import read_facts
from ropext.lengths import format_length
from ropext.plan import Request, RopePlan, requested_plan
from ropext.provenance import BUILT_IN, before_patch, patch_record
from ropext.results import CheckResult, EvalResult, FinetuneResult, PatchResult, RevertResult
from ropext.rope import Settings, canonical_name
from ropext.safety import Finding, judge_checkpoint, judge_patch, judge_source, reader_names
from ropext.write import WEIGHTS, Weights, check_destination, json_bytes, patched_files, write_patched

if TYPE_CHECKING:  # each command pays for the rooms that it uses
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

    from ropext.entrant import Entrant
    from ropext.inspection import Inspection
    from ropext.loaded import ModelPatchResult
    from ropext.schedule import Wish

SCORES = workspace.RUNS / "scores"  # kept losses, and hashes of weights
Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # label, windows done, windows in all


def patch(
    model: str | None = None,
    *,
    method: str,
    factor: float | None = None,
    to: int | None = None,
    out: Path | None = None,
    native_length: int | None = None,
    longrope_factors: Path | None = None,
    extend_scaling: bool = False,
    replace_scaling: bool = False,
    readers: Sequence[str] = (),
    weights: Weights = "clone",
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    **settings: Unpack[Settings],
) -> PatchResult:
    """Write an extended copy of a checkpoint: `method` at `factor`, or up to the length `to`.

    `settings` are those of the method (ropext.rope.Settings). What is scaled already is refused, unless
    `extend_scaling` keeps its method and multiplies its factor, or `replace_scaling` starts from before it.
    `readers` (llama.cpp, vllm) count beside transformers: what they cannot carry is then refused.
    Touches no weight and needs no torch unless `verify` asks stock transformers for the resulting rotary table.
    Raises UsageError for a request that cannot be understood, Refused for one that is unsafe; then nothing is written.
    """
    request = Request(
        method=canonical_name(method),
        factor=factor,
        to=to,
        native_length=native_length,
        settings=_with_lists(settings, longrope_factors),
        scaling=_scaling(extend_scaling, replace_scaling),
    )
    if weights not in WEIGHTS:
        raise UsageError(f"--weights is one of {', '.join(WEIGHTS)}: found {weights!r}")
    choice = workspace.for_patch() if model is None else workspace.named(model)
    source = open_checkpoint(choice.path)
    plan, findings = _allowed_plan(source, request, verify, reader_names(readers))
    destination = out or workspace.RUNS / f"{choice.name}-{plan.method}-{format_length(plan.target_length)}"
    if not dry_run:
        check_destination(destination, source.path, overwrite=overwrite)
    verified = (_verified(plan),) if verify else ()
    files = patched_files(source, plan.config, plan.native_length, plan.target_length)
    if not dry_run:
        record = patch_record(source, choice.model, plan, findings, files)
        write_patched(source, destination, {**files, RECORD: json_bytes(record)}, weights=weights, overwrite=overwrite)
    return PatchResult(
        source=choice.model,
        why=choice.why,
        out=str(destination),
        written=not dry_run,
        file_changes=tuple(files),
        findings=findings,
        verified=verified,
        rope_theta=plan.theta,
        **{name: getattr(plan, name) for name in PatchResult.OF_THE_PLAN},
    )


def _allowed_plan(
    source: Checkpoint, request: Request, verify: bool, readers: tuple[str, ...]
) -> tuple[RopePlan, tuple[Finding, ...]]:
    """The plan of a request and what the rules say of it. Raises Refused where one of them refuses."""
    stated = request.native_length is not None
    facts = read_facts(source, stock=verify)
    judge_source(source, facts, native_length_stated=stated).require()
    plan = requested_plan(source.config, facts, source.record, request)
    verdict = judge_patch(source, facts, plan, verified=verify, native_length_stated=stated, readers=readers)
    verdict.require()
    return plan, verdict.findings


def patch_model(
    model: PreTrainedModel,
    *,
    method: str,
    factor: float | None = None,
    to: int | None = None,
    native_length: int | None = None,
    longrope_factors: Path | None = None,
    extend_scaling: bool = False,
    replace_scaling: bool = False,
    **settings: Unpack[Settings],
) -> ModelPatchResult:
    """Do to a loaded model what `patch` does to its checkpoint, in memory: its config and rotary tables change.

    Raises UsageError and Refused as `patch` does; then the model stays as it was.
    """
    from ropext.loaded import patch_loaded

    request = Request(
        method=canonical_name(method),
        factor=factor,
        to=to,
        native_length=native_length,
        settings=_with_lists(settings, longrope_factors),
        scaling=_scaling(extend_scaling, replace_scaling),
    )
    return patch_loaded(model, request)


def _with_lists(settings: Settings, longrope_factors: Path | None) -> dict[str, Any]:
    return {**settings, **({} if longrope_factors is None else read_factors(longrope_factors))}


def _scaling(extend: bool, replace: bool) -> Literal["extend", "replace"] | None:
    if extend and replace:
        raise UsageError("--extend-scaling keeps a scaling and --replace-scaling drops it: give one of them")
    return "extend" if extend else "replace" if replace else None


def _verified(plan: RopePlan) -> str:
    from ropext.verify import verify

    return verify(plan)


def check(model: str | None = None) -> CheckResult:
    """Ask every rule about a checkpoint, whatever is wrong with it. Raises UsageError where there is none."""
    choice = workspace.for_eval() if model is None else workspace.named(model)
    _, verdict = judge_checkpoint(choice.path)
    return CheckResult(
        model=choice.model, findings=verdict.findings, verdict="refused" if verdict.refuses else "allowed"
    )


def show_checkpoint(model: str) -> Inspection:
    """The rotary table in force, every length, and the lineage of a checkpoint."""
    from ropext.inspection import inspect

    choice = workspace.named(model)
    return inspect(choice.path, choice.model, CHECKPOINT)


def revert(model: str, *, out: Path) -> RevertResult:
    """Write a patched checkpoint as it was before the patch: every file of its source, byte for byte.

    Raises Refused for what ropext did not patch, and for what was trained since.
    """
    choice = workspace.named(model)
    patched, files = before_patch(choice.path)
    write_patched(patched, out, files)
    return RevertResult(model=choice.model, out=str(out), files=tuple(files))


def finetune(
    model: str | None = None,
    *,
    schedule: Sequence[int] = (),
    recipe: Path | None = None,
    data: str | None = None,
    text_field: str = "text",
    chat: bool = False,
    pack: bool = False,
    pose: bool = False,
    short_data: str | None = None,
    short_share: float = 0.4,
    held_out: str | None = None,
    lora: int | None = None,
    lora_only: bool = False,
    gate: float | None = None,
    memory: int | None = None,
    tracker: str = "tensorboard",
    fresh_optimizer: bool = False,
    tokens_per_stage: int | None = None,
    steps_per_stage: int | None = None,
    batch_tokens: int | None = None,
    learning_rate: float | None = None,
    save_every: float = 600.0,
    keep: int = 2,
    seed: int = 0,
    out: Path | None = None,
    resume: bool = False,
    device: str | None = None,
    say: Say = print,
    progress: bool = True,
) -> FinetuneResult:
    """Train a patched checkpoint in growing stages; `out` gets the last stage's checkpoint, `out`.run the others.

    Stages are the lengths of `schedule`, or what a `recipe` (ropext.recipe) says of each.
    `chat` takes rows of messages and learns the answers, `pack` lets short documents share rows, `pose` skips positions
    in rows of the native length, `short_data` is mixed in as `short_share` of the rows. `held_out` names text to score
    before and after each stage; left out, some of `data` is kept back. With a `gate` (0.03 is 3%) a stage ends when
    that text's perplexity is no more than so much above the source's at short context, and its loss at the new length
    has stopped falling. `lora` is a rank, and trains norms and embeddings too unless `lora_only`; `out` is then the
    merged checkpoint, `out`.adapter the adapter.
    Where activations would take more than half of the free memory, or of `memory` bytes, they are computed twice.
    `learning_rate` defaults to what the published recipes use, scaled to the model's width; `save_every` is in seconds,
    `keep` bounds the saved states. Under torchrun or accelerate launch all processes share each step's batch.
    Raises Refused before the first step for a schedule, text or checkpoint that cannot work.
    """
    from ropext.extension import Extension
    from ropext.kept import weights_identity
    from ropext.material import Material
    from ropext.prepare import check_tracker
    from ropext.process import join_team
    from ropext.run import Run
    from ropext.schedule import plan_stages
    from ropext.training import Settings

    team = join_team(device)
    if team.rank:
        say = _silent
    choice = workspace.for_finetune() if model is None else workspace.named(model)
    say(f"model     {choice.model} ({choice.why})")
    source = open_checkpoint(choice.path)
    facts = read_facts(source)
    judge_source(source, facts).require()
    if facts.section is not None:
        raise Refused(f"fine-tuning a multimodal checkpoint is not built yet: {facts.model_type} has {facts.section}")
    if data is None and not workspace.is_built_in_lineage(source):
        raise UsageError("fine-tuning needs text: add --data with a text file, a folder, a .jsonl or a .parquet file")
    if lora_only and lora is None:
        raise UsageError("--lora-only says what --lora trains: add --lora with a rank, such as 8")
    wishes = _wishes(schedule, recipe, tokens_per_stage, steps_per_stage, batch_tokens)
    check_tracker(tracker)
    if keep < 1:
        raise UsageError(f"--keep is at least 1, or a stopped run has nothing to go on from: found {keep}")
    material = Material(
        data=data,
        text_field=text_field,
        chat=chat,
        packed=pack,
        skips=pose,
        short_data=short_data,
        short_share=short_share,
        held_out=held_out,
    )
    say(f"data      {material.name}")
    extension = Extension.of(source, facts)
    destination = out or workspace.RUNS / f"{choice.name}-tuned"
    check_destination(destination, source.path)
    run = Run(
        source=source,
        model=choice.model,
        extension=extension,
        material=material,
        stages=plan_stages(
            wishes,
            native_length=extension.native_length,
            window=extension.window,
            progressive=extension.progressive,
            skips=pose,
        ),
        settings=Settings(
            peak_rate=_rate(source, learning_rate),
            seed=seed,
            source=weights_identity(source, SCORES),
            save_every=save_every,
            keep=keep,
            gate=gate,
            memory=memory,
            tracker=tracker,
            fresh=fresh_optimizer,
            adapter=_adapter(lora, lora_only),
            progress=progress,
        ),
        out=destination,
        team=team,
        lora=lora,
        lora_only=lora_only,
    )
    return FinetuneResult(
        source=choice.model,
        out=str(destination),
        data=material.name,
        learning_rate=run.settings.peak_rate,
        stages=run.train(device=device, resume=resume, say=say),
        adapter=str(run.adapter) if lora else None,
        logs=str(run.folder / "logs"),
        written=team.rank == 0,
        native_length=max(facts.native_length, *(stage.length for stage in run.stages)),
    )


def _wishes(
    schedule: Sequence[int], recipe: Path | None, tokens: int | None, steps: int | None, batch_tokens: int | None
) -> list[Wish]:
    """What is asked of each stage: the same of all, or what a recipe says of each."""
    from ropext.schedule import Wish

    if bool(schedule) == (recipe is not None):
        raise UsageError("stages are those of --schedule or of --recipe: give one of them")
    if recipe is None:
        return [Wish(length=length, tokens=tokens, steps=steps, batch_tokens=batch_tokens) for length in schedule]
    from ropext.recipe import read_recipe

    return [
        Wish(
            length=stage.length,
            tokens=stage.tokens or (tokens if stage.steps is None else None),
            steps=stage.steps or (steps if stage.tokens is None else None),
            batch_tokens=stage.batch_tokens or batch_tokens,
            peak_rate=stage.learning_rate,
            factor=stage.factor,
        )
        for stage in read_recipe(recipe).stages
    ]


def _adapter(rank: int | None, lora_only: bool) -> str:
    return "none" if rank is None else f"rank {rank}{'' if lora_only else ' with norms and embeddings'}"


def _rate(source: Checkpoint, stated: float | None) -> float:
    from ropext.schedule import default_learning_rate

    width = source.config.get("hidden_size")
    if stated is None and isinstance(width, int):
        return default_learning_rate(width)
    if stated is None or not 0 < stated < math.inf:
        raise UsageError(f"--learning-rate is a number above 0: found {stated}")
    return stated


def evaluate(
    models: Sequence[str] = (),
    *,
    lengths: Sequence[int],
    data: str | None = None,
    text_field: str = "text",
    documents: int | None = None,
    tokens: int | None = None,
    stride: int | None = None,
    window: int | None = None,
    last_tokens: int | None = None,
    methods: Sequence[str] = (),
    factor: float | None = None,
    to: int | None = None,
    tasks: Sequence[str] = (),
    samples: int = 50,
    seed: int = 0,
    threshold: float | None = None,
    include_path: Path | None = None,
    max_regression: float | None = None,
    batch_size: int = 1,
    alone: bool = False,
    rescore: bool = False,
    out: Path | None = None,
    device: str | None = None,
    dtype: str = "float32",
    say: Say = print,
    progress: Progress | None = None,
) -> EvalResult:
    """Perplexity of models at every length, the loss by position in nats, and tasks (README: What is measured).

    One model is scored with its lineage unless `alone`; with `methods` it is compared with patches of itself at
    `factor` or up to the length `to`, made in memory and ranked. `documents` and `tokens` bound what is scored;
    `stride` (tokens) slides the windows; `window` cuts them longer than the longest length; `last_tokens` of each
    window are scored under each context length. `tasks` are those of ropext.retrieval or lm-eval, `samples` a length.
    `max_regression` (0.02 is 2%) is judged against the first model, up to its native length; the result tells.
    Losses are kept, so that the same question costs no run; `rescore` runs all the same.
    Under torchrun or accelerate launch all processes share the work, and the first one writes.
    """
    from ropext.compare import THRESHOLD, Comparison, Tasks, ranked
    from ropext.cut import Limits
    from ropext.gate import regression
    from ropext.process import join_team
    from ropext.report import write_report

    comparison = Comparison(
        lengths=tuple(lengths),
        data=data,
        text_field=text_field,
        stride=stride,
        window=window,
        last_tokens=last_tokens,
        limits=Limits(documents=documents, tokens=tokens),
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        tasks=Tasks(
            names=tuple(tasks),
            samples=samples,
            seed=seed,
            threshold=THRESHOLD if threshold is None else threshold,
            include_path=include_path,
        ),
        kept_in=SCORES,
        rescore=rescore,
    )
    team = join_team(device)
    first = team.rank == 0
    say = say if first else _silent
    if methods:
        choice, entrants = _patched_in_memory(models, methods, factor, to)
    elif factor is not None or to is not None:
        raise UsageError("--factor and --to say how far --methods extend: add --methods, such as ntk,yarn")
    else:
        choice, entrants = _entrants(models, alone)
    if max_regression is not None and (len(entrants) < 2 or methods):
        raise UsageError(
            "--max-regression compares a written checkpoint with its source: leave out --alone and --methods"
        )
    say(f"model     {choice}")
    say(f"data      {comparison.data_name}")
    claimed = _claimed(out, entrants[-1].checkpoint.path) if first else Path()
    destination = team.first(claimed)
    try:
        measurement = comparison.run(entrants, team=team, say=say, progress=progress if first else None)
        if methods:
            measurement = ranked(measurement)
        if first:
            write_report(destination, measurement)
    finally:
        if first:
            with suppress(OSError):  # a report is in it
                destination.rmdir()
    missed = None
    if max_regression is not None:
        judged = entrants[1:] if len(models) > 1 else entrants[-1:]
        missed = regression(measurement, max_regression, [entrant.label for entrant in judged])
    return EvalResult(
        measurement=measurement,
        out=str(destination),
        written=first,
        best=measurement.models[1].label if methods and measurement.comparisons else None,
        missed_gate=missed,
    )


def _silent(line: str) -> None:
    """What the other processes of a launch say."""


def _entrants(models: Sequence[str], alone: bool) -> tuple[str, list[Entrant]]:
    """What is scored, in words and as models: those named, or one with its lineage."""
    from ropext.entrant import Entrant, lineage_of

    if len(models) > 1:
        choices = [workspace.named(model) for model in models]
        names = [choice.name for choice in choices]
        labels = [name if names.count(name) == 1 else model for name, model in zip(names, models, strict=True)]
        if again := [label for label in labels if labels.count(label) > 1]:
            raise UsageError(f"each model is scored once: found {again[0]} {len(again)} times")
        return ", ".join(models), [
            Entrant.of(choice.path, label, CHECKPOINT) for choice, label in zip(choices, labels, strict=True)
        ]
    choice = workspace.named(models[0]) if models else workspace.for_eval()
    checkpoint = open_checkpoint(choice.path)
    line = lineage_of(checkpoint, CHECKPOINT)
    return f"{choice.model} ({choice.why})", line[-1:] if alone else line


def _patched_in_memory(
    models: Sequence[str], methods: Sequence[str], factor: float | None, to: int | None
) -> tuple[str, list[Entrant]]:
    """A checkpoint and each method's patch of it, in words and as models. Raises Refused where a patch of its files
    would be."""
    from ropext.entrant import Entrant

    if len(models) > 1:
        raise UsageError(f"--methods are compared on one model: found {len(models)}")
    choice = workspace.named(models[0]) if models else workspace.for_patch()
    source = Entrant.of(choice.path, "source", CHECKPOINT)
    if section := read_facts(source.checkpoint).section:
        raise Refused(f"multimodal models are patched on disk: {section} holds the positions. Use ropext patch")
    entrants = [source]
    for method in dict.fromkeys(canonical_name(method) for method in methods):
        plan, findings = _allowed_plan(source.checkpoint, Request(method=method, factor=factor, to=to), True, ())
        _verified(plan)
        entrants.append(source.patched(plan, findings))
    return f"{choice.model} ({choice.why})", entrants


def _claimed(out: Path | None, model: Path) -> Path:
    """A new empty folder for a report: `out`, or the first free one of ropext-runs/reports/NAME, NAME-2, ..."""
    name = "demo" if model == CHECKPOINT else model.resolve().name
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    for folder in [out] if out else (workspace.RUNS / "reports" / one for one in names):
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if out or not folder.is_dir():
                raise Refused(
                    f"an existing output is not overwritten: {folder} is there. Choose another --out"
                ) from error
        except OSError as error:
            raise RopextError(f"a report needs a folder to write: {folder} is none ({error.strerror})") from error
    raise AssertionError("there is always another name")


def eval_document(result: EvalResult) -> dict[str, Any]:
    """What `eval --json` prints and report.json holds."""
    from ropext.report import to_json

    return to_json(result.measurement)


def demo(*, say: Say = print, progress: Progress | None = None) -> tuple[PatchResult, FinetuneResult, EvalResult]:
    """The three commands on the built-in checkpoint: patch by ntk to four times its length, tune, measure."""
    patched = patch(BUILT_IN, method="ntk", factor=4.0)
    say(f"patched   {patched.out}: window {patched.native_length} -> {patched.target_length} tokens")
    tuned = finetune(patched.out, schedule=(2048, 4096, 8192), say=say)
    return patched, tuned, evaluate([tuned.out], lengths=(512, 2048, 8192), say=say, progress=progress)
