"""Rules about the files of a checkpoint, and opening one whatever is wrong with it. Sizes are in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ropext.checkpoint import (
    CONFIG,
    INDEX,
    PICKLES,
    SINGLE,
    Checkpoint,
    read_json,
    read_record,
    read_tokenizer_config,
    read_weights,
    require_directory,
    unreadable,
)
from ropext.errors import Refused, RopextError, short
from ropext.facts import read_facts
from ropext.safety.rule import Case, rule
from ropext.safety.views import learned_tables, windows

_T = TypeVar("_T")


def look_at(path: Path) -> Case:
    """The case of a directory with all that can be read of it; what cannot is kept as problems, not raised.

    Raises UsageError where there is no directory.
    """
    require_directory(path)
    problems: list[str] = []

    def tried(read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except Refused as refusal:
            problems.append(str(refusal))
        except OSError as error:
            raise unreadable(path, error) from error
        return None

    stray = (path / SINGLE).exists() and (path / INDEX).exists()  # RPX038 says so
    config = tried(lambda: read_json(path / CONFIG))
    tokenizer_config = tried(lambda: read_tokenizer_config(path))
    record = tried(lambda: read_record(path))
    tensors, weight_files = (None if stray else tried(lambda: read_weights(path))) or ({}, {})
    checkpoint = Checkpoint(
        path=path,
        config=config or {},
        tokenizer_config=tokenizer_config or {},
        record=record,
        tensors=tensors,
        weight_files=weight_files,
    )
    case = Case(checkpoint=checkpoint, problems=tuple(problems))
    if not config:
        return case
    try:
        return Case(checkpoint=checkpoint, problems=case.problems, known=read_facts(checkpoint))
    except RopextError as error:
        return Case(checkpoint=checkpoint, problems=case.problems, unknown=str(error))


@rule("RPX020", "refuse", "safetensors and transformers file formats")
def unreadable_files(case: Case) -> Iterator[tuple[str, str]]:
    """The files of a checkpoint are whole, readable and belong together.

    A cut download, a shard of another model, an index that names files elsewhere, JSON that says a key twice: each
    loads in some reader or other and is not the model that it seems to be. Pickled weights are not read at all, since a
    pickle can run code.
    """
    for problem in case.problems:
        message, _, fix = problem.rpartition(". ")
        yield (message, fix) if message else (problem, "Get the file again from where it came from")


@rule("RPX021", "warn", "ropext/facts.py")
def unknown_positions(case: Case) -> Iterator[tuple[str, str]]:
    """`ropext patch` would refuse a checkpoint whose positions it cannot tell.

    Either the model has no rotary embedding, or something that its table is computed from is missing, odd or of a kind
    that ropext does not handle. The rules that need those facts were not asked.
    """
    if case.unknown is not None:
        message, _, fix = case.unknown.rpartition(". ")
        yield (message, fix) if message else (case.unknown, "It cannot be extended as it is")


@rule("RPX036", "note", "Python, pickle: never unpickle what you do not trust")
def pickles_beside(case: Case) -> Iterator[tuple[str, str]]:
    """Pickled weights beside safetensors are neither read nor changed.

    A pickle runs code when it is loaded. It is copied as it is, and after training it still holds the old weights,
    which a reader that prefers it would load.
    """
    if case.checkpoint.weight_files:
        found = sorted(file.name for pattern in PICKLES for file in case.checkpoint.path.glob(pattern))
        if found:
            yield (
                f"pickled weights are never read: {found[0]} lies beside the safetensors",
                "Remove it if it is not used",
            )


@rule("RPX038", "refuse", "transformers, from_pretrained: model.safetensors is taken before the index")
def single_beside_shards(case: Case) -> Iterator[tuple[str, str]]:
    """A model is one weight file or shards, not both.

    transformers takes model.safetensors where there is one and never looks at the shards beside it, other readers go by
    the index. One of the two is usually left from an earlier save, and which model is loaded depends on the reader.
    """
    if all((case.checkpoint.path / name).exists() for name in (SINGLE, INDEX)):
        yield f"a model is one file or shards: {SINGLE} and {INDEX} are both there", "Remove the one that is stale"


@rule("RPX043", "note", "transformers, from_pretrained: only files of the index are read")
def strays(case: Case) -> Iterator[tuple[str, str]]:
    """Weight files that do not belong to the model.

    Files that the index does not name are left from another save or serve another reader (consolidated.safetensors).
    They are copied as they are: a patch does not reach the config of such a reader, and training does not change them.
    """
    files = sorted(path.name for path in case.checkpoint.path.glob("*.safetensors"))
    others = [name for name in files if name not in case.checkpoint.weight_files]
    if others and case.checkpoint.weight_files:
        yield (
            f"{short(others[0])} is no file of the model that transformers reads",
            "Remove it if nothing else reads it",
        )


@rule("RPX039", "refuse", "Radford et al. 2019 (GPT-2); Zhang et al. 2022, arXiv:2205.01068 (OPT)")
def beyond_learned_table(case: Case) -> Iterator[tuple[str, str]]:
    """A window of learned positions is no longer than their table.

    Models with learned positions have one trained row for each. A window above the number of rows was raised by hand:
    the rows beyond are missing, and readers fail or fill them at random. Such a context cannot be extended by a config.
    """
    tables = learned_tables(case.checkpoint.tensors)
    for key, window in windows(case.checkpoint.config)[:1]:
        for name, rows in tables.items():
            if window > rows:
                yield (
                    f"a window needs a learned row for each position: {key} is {window}, {name} has {rows} rows",
                    (f"Set {key} back to {rows}"),
                )
