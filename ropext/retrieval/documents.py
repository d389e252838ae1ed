"""The documents of the retrieval tasks as lm-eval takes them, each made to fill a length in the model's tokens.

lm-eval calls one function here for each task (tasks/*.yaml) with what `--metadata` and `--model_args` say. Lengths in
tokens: a prompt, its BOS and ANSWER_TOKENS for the answer are together as long as whole lines of filler allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from ropext.errors import UsageError
from ropext.load import load_tokenizer
from ropext.pack import bos_of, encode
from ropext.retrieval.puzzles import PUZZLES, Puzzle, number

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHOICES = 10  # of equal form, so that guessing scores 1 / CHOICES
FROM_HAYSTACK = 4  # of the wrong choices at most: to know what numbers stand in the text is not to know the answer
ANSWER_TOKENS = 8  # room for a space and five digits even where each byte is a token; max_gen_toks in tasks/*.yaml
_PROBE = 32  # lines of filler that a first guess is made from


def passkey(**metadata: Any) -> dict[str, datasets.Dataset]:
    return _dataset("passkey", **metadata)


def needle(**metadata: Any) -> dict[str, datasets.Dataset]:
    return _dataset("needle", **metadata)


def multikey(**metadata: Any) -> dict[str, datasets.Dataset]:
    return _dataset("multikey", **metadata)


def kv(**metadata: Any) -> dict[str, datasets.Dataset]:
    return _dataset("kv", **metadata)


def tracking(**metadata: Any) -> dict[str, datasets.Dataset]:
    return _dataset("tracking", **metadata)


def make_documents(
    task: str, tokenizer: PreTrainedTokenizerBase, length: int, *, samples: int, seed: int
) -> Iterator[dict[str, Any]]:
    """`samples` documents of one length, dealt out to the DEPTHS in turn; each depends on its own number alone.

    Raises UsageError for a length that does not hold the task even without filler.
    """
    count = _counter(tokenizer)

    def puzzles(length: int) -> Iterator[tuple[float, Random, Puzzle]]:
        for place in range(samples):
            depth = DEPTHS[place % len(DEPTHS)]
            random = Random(f"{seed} {task} {length} {depth} {place}")
            yield depth, random, PUZZLES[task](random, depth)

    shortest = length
    while (needed := max(count(found.prompt([])) for _, _, found in puzzles(shortest)) + ANSWER_TOKENS) > shortest:
        shortest = needed
    if shortest > length:
        raise UsageError(f"{task} takes at least {shortest} tokens with this tokenizer: found a length of {length}")
    for place, (depth, random, found) in enumerate(puzzles(length)):
        prompt = _filled(found, length - ANSWER_TOKENS, count)
        choices = _choices(found, prompt, random)
        yield {
            "prompt": prompt,
            "choices": choices,
            "label": choices.index(found.answer),
            "answer": found.answer,
            "length": length,
            "depth": depth,
            "number": place,
        }


def _dataset(
    task: str,
    *,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    pretrained: str | None = None,
    max_seq_lengths: Sequence[int] = (4096,),
    samples: int = 50,
    seed: int = 0,
    **_: Any,  # whatever else --model_args and the task's own metadata hold
) -> dict[str, datasets.Dataset]:
    """The documents of all lengths that hold the task, `samples` of each. A tokenizer is taken as it is or loaded from
    its name. Raises UsageError where no length holds it."""
    from datasets import Dataset

    tokenizer = tokenizer or pretrained
    if tokenizer is None:
        raise UsageError("a length is measured in a model's tokens: name it, --model_args pretrained=MODEL")
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    made: list[dict[str, Any]] = []
    too_short: list[UsageError] = []
    for length in dict.fromkeys(max_seq_lengths):
        try:
            made += make_documents(task, loaded, length, samples=samples, seed=seed)
        except UsageError as error:
            too_short.append(error)
    if not made:
        raise too_short[-1]
    return {"test": Dataset.from_list(made)}


def _counter(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    bos = bos_of(tokenizer)
    return lambda text: len(encode(tokenizer, text, bos)) + (bos is not None)


def _filled(found: Puzzle, room: int, count: Callable[[str], int]) -> str:
    """The prompt with as many lines of filler as `room` tokens hold, by interpolation between too few and too many."""
    lines = list(islice(found.filler, _PROBE))
    fewest = count(found.prompt([]))
    a_line = max(1.0, (count(found.prompt(lines)) - fewest) / _PROBE)
    fits, too_many, last, used = 0, None, 0, fewest
    while too_many is None or too_many - fits > 1:
        last = max(fits + 1, last + int((room - used) / a_line))
        if too_many is not None:
            last = min(last, too_many - 1)
        lines += islice(found.filler, max(0, last - len(lines)))
        used = count(found.prompt(lines[:last]))
        if used > room:
            too_many = last
        else:
            fits = last
    return found.prompt(lines[:fits])


def _choices(found: Puzzle, prompt: str, random: Random) -> list[str]:
    """The answer in a random place among wrong numbers, some of them out of the haystack."""
    told = sorted({value for value in found.others if value in prompt})
    wrong = random.sample(told, min(FROM_HAYSTACK, len(told)))
    while len(wrong) < CHOICES - 1:
        wrong.append(number(random, found.answer, *told, *wrong))
    wrong.insert(random.randrange(CHOICES), found.answer)
    return wrong
