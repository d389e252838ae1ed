"""Texts that hide an answer: a long haystack, an asked value in it at a chosen depth, a question at the end.

After RULER (Hsieh et al. 2024, arXiv:2404.06654), the passkey of Mohtashami and Jaggi (2023, arXiv:2305.16300) and the
key-value lookup of Liu et al. (2023, arXiv:2307.03172), made from a seed with no file and no network. Two deliberate
deviations: every answer is a number of five digits, so that all tasks score alike, and the prose of `needle` is made
of stock sentences, where RULER takes essays that would have to be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from random import Random

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
OTHER_NEEDLES = 3  # distractors in `needle`: with the asked one RULER's four keys
OTHER_CHAINS, HOPS = 3, 2  # in `tracking`: chains besides the asked one, and assignments after each first one
# fmt: off
_WHO = ("The baker", "A sailor", "The doctor", "My neighbour", "The old teacher", "A young farmer", "The captain",
        "Her brother", "The gardener", "A stranger", "The musician", "His cousin")
_DID = ("carried", "painted", "found", "sold", "mended", "borrowed", "described", "forgot", "counted", "wrapped",
        "watched", "kept")
_WHAT = ("the wooden box", "a red lantern", "the broken clock", "two loaves of bread", "an old map", "the blue coat",
         "a basket of apples", "the silver spoon", "a letter", "the garden gate", "a small boat", "the heavy curtain")
_WHERE = ("near the river", "in the morning", "behind the church", "before the rain came", "at the market",
          "on the long road home", "under the bridge", "after supper", "by the harbour", "in the quiet house",
          "at the edge of the forest", "on a cold evening")
# fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class Puzzle:
    """One question about one haystack, of any length: the haystack is as long as its filler lines are many."""

    intro: str
    filler: Iterator[str]  # lines without end
    needles: Sequence[tuple[float, str]]  # place in the haystack, 0 (start) to 1 (end), and line
    question: str  # ends where the answer begins
    answer: str
    others: list[str]  # values that a haystack may hold besides the answer

    def prompt(self, filler: Sequence[str]) -> str:
        """The whole text with these lines of filler around the needles; needles of one place stay in their order."""
        lines, done = [self.intro], 0
        for place, needle in sorted(self.needles, key=lambda found: found[0]):
            until = round(place * len(filler))
            lines += [*filler[done:until], needle]
            done = until
        return "\n".join([*lines, *filler[done:], self.question])


def number(random: Random, *taken: str) -> str:
    """Five digits, unlike the taken ones."""
    while (drawn := str(random.randrange(10000, 100000))) in taken:
        pass
    return drawn


def passkey(random: Random, depth: float) -> Puzzle:
    """One number in repeated noise."""
    key = number(random)
    return Puzzle(
        intro="There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
        "I will quiz you about the important information there.",
        filler=repeat(NOISE),
        needles=[(depth, f"The pass key is {key}. Remember it. {key} is the pass key.")],
        question="What is the pass key? The pass key is",
        answer=key,
        others=[],
    )


def needle(random: Random, depth: float) -> Puzzle:
    """Four keyed numbers in prose, one of them asked for (RULER's multi-key 1)."""
    key, value = _name(random), number(random)
    others = [number(random, value) for _ in range(OTHER_NEEDLES)]
    needles = [(random.random(), _magic(_name(random, key), other)) for other in others]
    return _keyed(key, value, filler=_prose(random), needles=[*needles, (depth, _magic(key, value))], others=others)


def multikey(random: Random, depth: float) -> Puzzle:
    """A haystack of nothing but keyed numbers, one of them asked for (RULER's multi-key 2)."""
    key, value, others = _name(random), number(random), list[str]()

    def filler() -> Iterator[str]:
        while True:
            others.append(number(random, value))
            yield _magic(_name(random, key), others[-1])

    return _keyed(key, value, filler=filler(), needles=[(depth, _magic(key, value))], others=others)


def kv(random: Random, depth: float) -> Puzzle:
    """A JSON object of random keys, one of them asked for."""
    key, value, others = _hexadecimal(random), number(random), list[str]()

    def filler() -> Iterator[str]:
        while True:
            others.append(number(random, value))
            yield f'"{_hexadecimal(random, key)}": {others[-1]},'

    return Puzzle(
        intro="Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{",
        filler=filler(),
        needles=[(depth, f'"{key}": {value},')],
        question=f'}}\n\nCorresponding value of the key "{key}":',
        answer=value,
        others=others,
    )


def tracking(random: Random, depth: float) -> Puzzle:
    """Chains of variables that take each other's value; the last one of a chain is asked for.

    The number stands at `depth`, and what is assigned after it lies between there and the end.
    """
    chains: list[tuple[str, str, list[tuple[float, str]]]] = []  # last name, value, needles
    names: list[str] = []
    for first in [depth, *(random.random() for _ in range(OTHER_CHAINS))]:
        value = source = number(random, *(chain[1] for chain in chains))
        needles = []
        for place in [first, *sorted(random.uniform(first, 1) for _ in range(HOPS))]:
            names.append(_name(random, *names))
            needles.append((place, f"VAR {names[-1]} = {source}"))
            source = f"VAR {names[-1]}"
        chains.append((names[-1], value, needles))
    (asked, answer, _), *rest = chains
    return Puzzle(
        intro="Memorize and track the chain(s) of variable assignment hidden in the following text.",
        filler=repeat(NOISE),
        needles=[needle for chain in chains for needle in chain[2]],
        question=f"Question: What is the value of VAR {asked} in the text above?\nAnswer: VAR {asked} =",
        answer=answer,
        others=[chain[1] for chain in rest],
    )


PUZZLES: dict[str, Callable[[Random, float], Puzzle]] = {
    "passkey": passkey,
    "needle": needle,
    "multikey": multikey,
    "kv": kv,
    "tracking": tracking,
}


def _keyed(
    key: str, value: str, *, filler: Iterator[str], needles: Sequence[tuple[float, str]], others: list[str]
) -> Puzzle:
    return Puzzle(
        intro="Some special magic numbers are hidden within the following text. Make sure to memorize them. "
        "I will quiz you about the numbers afterwards.",
        filler=filler,
        needles=needles,
        question=f"What is the special magic number for {key}? The special magic number for {key} is:",
        answer=value,
        others=others,
    )


def _magic(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def _prose(random: Random) -> Iterator[str]:
    while True:
        yield " ".join(f"{' '.join(map(random.choice, (_WHO, _DID, _WHAT, _WHERE)))}." for _ in range(2))


def _name(random: Random, *taken: str) -> str:
    """A word of no language, one of 614125, such as `velito`."""
    while (drawn := "".join(random.choice("bdfghjklmnprstvwz") + random.choice("aeiou") for _ in range(3))) in taken:
        pass
    return drawn


def _hexadecimal(random: Random, *taken: str) -> str:
    while (drawn := f"{random.getrandbits(32):08x}") in taken:
        pass
    return drawn
