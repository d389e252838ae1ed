"""Runs tasks by name in lm-eval's evaluator, on a model that is loaded already, and reads their scores.

Lengths are in the model's tokens. Intervals are 95%: Wilson's for the tasks made here, from lm-eval's standard error
for the others.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.errors import RopextError, UsageError, first_line
from ropext.figures import EffectiveLength, Interval, TaskScore
from ropext.process import ALONE, Team
from ropext.retrieval.documents import CHOICES
from ropext.retrieval.harness import BOOTSTRAPS, as_lm, silence
from ropext.retrieval.puzzles import PUZZLES

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "ropext_"  # of our tasks' names in lm-eval
VARIANTS = {"likelihood": ("acc", 1 / CHOICES), "generation": ("exact_match", None)}  # metric and chance of each
_OWN = Path(__file__).with_name("tasks")
_LEAVES = {f"{PREFIX}{task}_{variant}": variant for task in PUZZLES for variant in VARIANTS}
_FEWSHOT_SEED = 1234  # lm-eval's own default, so that few-shot prompts are those of published scores
_Z = 1.959964  # 97.5% of a normal distribution lie below


def task_names() -> tuple[str, ...]:
    """The tasks made here: `passkey` stands for its two variants, `retrieval` for all tasks."""
    return (*PUZZLES, *(leaf.removeprefix(PREFIX) for leaf in _LEAVES), "retrieval")


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    *,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    include_path: str | Path | None = None,
    batch_size: int = 1,
    team: Team = ALONE,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[TaskScore, ...]:
    """Scores of the named tasks: ours by length and depth and by length, one row a metric of any other lm-eval task.

    A name is one of task_names(), with or without `ropext_`, or that of a task, group or tag of lm-eval or of the YAML
    files below `include_path`. Ours are made from the seed, `samples` of each length. `progress` is told (documents
    done, documents in all). The processes of a team share the documents, and each returns all scores.
    Raises UsageError for an unknown name or a length too short for a task, RopextError for a task that cannot be run.
    """
    from lm_eval import evaluator

    metadata = {"tokenizer": tokenizer, "max_seq_lengths": list(lengths), "samples": samples, "seed": seed}
    with silence():
        loaded = _load(names, include_path, metadata)
        total, done, size = sum(_documents(found) for found in loaded.values()), 0, 0

        def told(asked: int, of: int) -> None:
            if progress:
                progress(done + size * asked // of, total)

        lm = as_lm(model, tokenizer, batch_size=batch_size, team=team, told=told)
        scores: list[TaskScore] = []
        for name, found in loaded.items():
            size = _documents(found)
            with _naming(f"cannot run the task {name}"):  # on rank 0 alone lm-eval gives results
                results: Any = evaluator.evaluate(lm, found, bootstrap_iters=BOOTSTRAPS)
                scores += team.first(_scores(results) if team.rank == 0 else [])
            told(1, 1)
            done += size
    return tuple(scores)


def effective_lengths(scores: Sequence[TaskScore], threshold: float) -> tuple[EffectiveLength, ...]:
    """For each task with lengths the longest one up to which every measured length scores at least the threshold."""
    by_task = defaultdict[str, dict[int, float]](dict)
    for row in scores:
        if row.length is not None and row.depth is None:
            by_task[row.task][row.length] = -math.inf if row.score is None else row.score
    found = []
    for task, measured in by_task.items():
        longest = 0
        for length, score in sorted(measured.items()):
            if score < threshold:
                break
            longest = length
        found.append(EffectiveLength(task=task, length=longest, threshold=threshold))
    return tuple(found)


def check_tasks(names: Sequence[str], include_path: str | Path | None) -> None:
    """Raises UsageError where some name is no task, before anything is run."""
    _manager(names, include_path, {})


def no_task_score(name: str) -> TaskScore:
    """A task that failed."""
    return TaskScore(
        task=name.removeprefix(PREFIX),
        metric="failed",
        length=None,
        depth=None,
        score=None,
        n=0,
        ci95=None,
        chance=None,
    )


def _load(
    names: Sequence[str], include_path: str | Path | None, metadata: dict[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """What lm-eval loads for each name, ours one task at a time, and no task twice."""
    if not names or not metadata["max_seq_lengths"] or metadata["samples"] < 1:
        raise UsageError("scoring tasks takes a task, a length and a sample at least: found none of one of them")
    asked, manager = _manager(names, include_path, metadata)
    loaded: dict[str, Mapping[str, Any]] = {}
    for name in asked:
        hint = "most of its own tasks need a network or their data set in the cache"
        with _naming(f"cannot load the task {name}, {hint}"):
            loaded[name] = manager.load(name)
        for task in loaded[name]["tasks"].values():
            (task.config.metadata or {}).pop("tokenizer", None)  # results hold a deep copy of the metadata
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(_FEWSHOT_SEED)
    return loaded


def _manager(
    names: Sequence[str], include_path: str | Path | None, metadata: dict[str, Any]
) -> tuple[list[str], TaskManager]:
    """The tasks of lm-eval that these names stand for, and what loads them."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise UsageError(f"an include path is a directory of lm-eval's YAML files: found {str(include_path)!r}")
    asked = list(dict.fromkeys(leaf for name in names for leaf in _expanded(name)))
    paths = [_OWN, *([include_path] if include_path is not None else [])]
    manager = TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    if not set(asked) <= set(manager.all_tasks):  # lm-eval's own are thousands of files to read
        manager = TaskManager(include_path=paths, metadata=metadata)
    for name in asked:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, {*task_names(), *manager.all_tasks})
            raise UsageError(
                f"a task is one of {', '.join(PUZZLES)}, retrieval, or of lm-eval: {name!r} is none"
                + (f"; near it are {', '.join(near)}" if near else "")
            )
    return asked, manager


def _expanded(name: str) -> list[str]:
    """The tasks of lm-eval that a name stands for, where it is one of ours; else the name itself."""
    short = name.removeprefix(PREFIX)
    return [
        leaf for leaf in _LEAVES if short in ("retrieval", leaf.removeprefix(PREFIX), leaf[len(PREFIX) :].split("_")[0])
    ] or [name]


def _documents(found: Mapping[str, Any]) -> int:
    return sum(len(task.eval_docs) for task in found["tasks"].values())


@contextmanager
def _naming(failed: str) -> Iterator[None]:
    """Errors of lm-eval, of a task's code and of what it downloads as one RopextError of one line."""
    try:
        yield
    except RopextError:
        raise
    except Exception as error:  # a task may run any code, and HTTP clients have errors of their own
        raise RopextError(f"lm-eval {failed}: {first_line(error)[:200]}") from error


def _scores(results: Mapping[str, Any]) -> list[TaskScore]:
    """Rows of all tasks of one evaluation; a group with figures of its own stands for its tasks."""
    inside = {task for group in results.get("groups", ()) for task in results["group_subtasks"][group]}
    scores: list[TaskScore] = []
    for task, metrics in results["results"].items():
        if task in _LEAVES:
            scores += _own_scores(task, results["samples"][task])
        elif task not in inside:
            scores += _other_scores(task, metrics)
    return scores


def _own_scores(task: str, documents: Sequence[Mapping[str, Any]]) -> list[TaskScore]:
    """A row for each length, and below it one for each of its depths."""
    metric, chance = VARIANTS[_LEAVES[task]]
    values = defaultdict[tuple[int, float | None], list[float]](list)
    for one in documents:
        for depth in (None, one["doc"]["depth"]):
            values[one["doc"]["length"], depth].append(one[metric])
    places = sorted(values, key=lambda place: (place[0], -1 if place[1] is None else place[1]))
    return [
        TaskScore(
            task=task.removeprefix(PREFIX),
            metric=metric,
            length=length,
            depth=depth,
            score=sum(values[length, depth]) / len(values[length, depth]),
            n=len(values[length, depth]),
            ci95=_wilson(sum(values[length, depth]), len(values[length, depth])),
            chance=chance,
        )
        for length, depth in places
    ]


def _other_scores(task: str, metrics: Mapping[str, Any]) -> list[TaskScore]:
    """A row for each metric; one that a filter of the task gives is named with it, as in `exact_match,strict-match`."""
    scores = []
    for key, value in metrics.items():
        metric, _, kind = key.partition(",")
        if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        score = float(value) if math.isfinite(value) else None
        error = metrics.get(f"{metric}_stderr,{kind}")
        half = _Z * error if isinstance(error, int | float) and math.isfinite(error) else None
        scores.append(
            TaskScore(
                task=task,
                metric=metric if kind == "none" else key,
                length=None,
                depth=None,
                score=score,
                n=int(metrics["sample_len"]),
                ci95=None if score is None or half is None else (score - half, score + half),
                chance=None,
            )
        )
    return scores


def _wilson(right: float, n: int) -> Interval:
    """95% interval of a proportion (Wilson 1927), which stays between 0 and 1 and has a width at both."""
    share, z2 = right / n, _Z**2 / n
    middle, half = share + z2 / 2, _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))
