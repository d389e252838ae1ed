"""Rules of readers that count only where they are named: llama.cpp and vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ropext.errors import UsageError
from ropext.plan import RopePlan
from ropext.safety.rule import Case, rule

READERS = ("llama.cpp", "vllm")
# What a reader cannot be told of, by reader: methods, and explicit settings of the others.
_METHODS: Mapping[str, Mapping[str, str]] = {
    "llama.cpp": {
        "dynamic": "a GGUF holds no dynamic table",
        "longrope": "its converter takes these lists for some families only",
        "ntk-by-parts": "a GGUF holds no attention factor of its own for yarn",
    },
    "vllm": {
        "dynamic": "it computes that table once, for its whole window, so short inputs differ",
        "longrope": "it takes the long list for every input once its window is beyond the original length",
        "ntk-by-parts": "it does not read attention_factor",
    },
}
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "llama.cpp": ("attention_factor", "truncate", "mscale", "mscale_all_dim"),
    "vllm": ("attention_factor", "mscale", "mscale_all_dim"),
}


def reader_names(names: Iterable[str]) -> tuple[str, ...]:
    """Readers by name, in any case. Raises UsageError for one that ropext knows nothing of."""
    found = tuple(name.strip().lower() for name in names)
    for name in found:
        if name not in READERS:
            raise UsageError(f"--readers takes {' and '.join(READERS)}: found {name!r}; transformers always counts")
    return found


@rule("RPX055", "refuse", "llama.cpp, convert_hf_to_gguf.py; vLLM, rotary_embedding")
def named_reader_cannot(case: Case) -> Iterator[tuple[str, str]]:
    """A reader that is named can carry the plan.

    llama.cpp and vLLM read fewer methods than transformers does, and both load a config that they cannot follow without
    a word. Where one is named with --readers, a plan that it would compute otherwise is refused.
    """
    for reader in case.readers:
        if why := _lost(reader, case.plan):
            yield (
                f"a named reader must be able to carry the plan: {reader} cannot carry {why}",
                f"Use --method ntk, or leave {reader} out of --readers",
            )


@rule("RPX056", "note", "vLLM, _get_and_verify_max_len")
def window_of_vllm(case: Case) -> Iterator[tuple[str, str]]:
    """vLLM multiplies the window of a linear scaling by its factor once more.

    It takes max_position_embeddings, which already is the target, times the factor; so it serves lengths that the
    table was not made for, unless it is told where to stop.
    """
    if "vllm" in case.readers and "linear" in (case.plan.method, case.plan.inner):
        target = case.plan.target_length
        yield (
            f"vLLM takes the window of a linear scaling for {target * case.plan.factor:g} tokens, not {target}",
            f"Launch it with --max-model-len {target}",
        )


def _lost(reader: str, plan: RopePlan) -> str | None:
    method = plan.inner or plan.method
    if method in _METHODS[reader]:
        return f"{method}, {_METHODS[reader][method]}"
    settings = [name for name in _SETTINGS[reader] if name in plan.settings]
    return f"{', '.join(settings)} of {method}" if settings else None
