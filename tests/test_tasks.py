"""The documents of the retrieval tasks: their lengths, depths and choices, read back from the texts themselves."""

from __future__ import annotations

import random
import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ropext.demo import CHECKPOINT
from ropext.errors import UsageError
from ropext.retrieval.documents import ANSWER_TOKENS, CHOICES, DEPTHS, FROM_HAYSTACK, make_documents
from ropext.retrieval.puzzles import NOISE, PUZZLES
from tests.tiny import make_checkpoint

# How the line that holds the answer begins, from what the question asks for.
TOLD = {
    "passkey": lambda doc: f"The pass key is {doc['answer']}. Remember",
    "needle": lambda doc: f"One of the special magic numbers for {asked(doc)} is: {doc['answer']}.",
    "multikey": lambda doc: f"One of the special magic numbers for {asked(doc)} is: {doc['answer']}.",
    "kv": lambda doc: f'"{asked(doc)}": {doc["answer"]},',
    "tracking": lambda doc: f"= {doc['answer']}",
}


def asked(doc):
    """The key in the last line of the prompt."""
    return re.findall(r"(?:for|key|VAR) \"?(\w+)", doc["prompt"].splitlines()[-1])[-1]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def documents(task, tokenizer, length=900, samples=10, seed=0):
    return list(make_documents(task, tokenizer, length, samples=samples, seed=seed))


@pytest.mark.parametrize("task", PUZZLES)
@pytest.mark.parametrize("bos", ["adds", "has", "none"])
def test_prompt_and_answer_fill_the_length_up_to_one_line_whatever_the_bos(task, bos, tmp_path):
    bytewise = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path, bos=bos))
    for doc in documents(task, bytewise, length=3000, samples=5):
        used = len(doc["prompt"].encode()) + (bos == "adds") + ANSWER_TOKENS  # each byte is a token there
        line = max(len(line) + 1 for line in doc["prompt"].splitlines()[1:-1])
        assert 3000 - 1.5 * line < used <= 3000
        assert len(f" {doc['answer']}") <= ANSWER_TOKENS


@pytest.mark.parametrize("bos", ["adds", "has"])
def test_no_length_is_exceeded_by_as_little_as_the_bos(bos, tmp_path):
    bytewise = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path, bos=bos))
    unused = set()
    for length in range(1000, 1000 + len(NOISE) + 1):
        (doc,) = documents("passkey", bytewise, length=length, samples=1)
        unused.add(length - ANSWER_TOKENS - len(doc["prompt"].encode()) - (bos == "adds"))
    assert unused == set(range(len(NOISE) + 1))


@pytest.mark.parametrize("task", PUZZLES)
def test_the_answer_stands_once_at_its_depth(task, tokenizer):
    made = documents(task, tokenizer, length=2000)
    assert [doc["depth"] for doc in made] == [*DEPTHS, *DEPTHS]
    for doc in made:
        line = TOLD[task](doc)
        before, found, after = doc["prompt"].partition(line)
        assert found and line not in after
        assert len(before) / len(before + after) == pytest.approx(doc["depth"], abs=0.14)


@pytest.mark.parametrize("task", PUZZLES)
def test_choices_are_ten_numbers_of_five_digits_and_only_some_wrong_ones_stand_in_the_text(task, tokenizer):
    made = documents(task, tokenizer, samples=40)
    for doc in made:
        assert len(set(doc["choices"])) == CHOICES and doc["choices"][doc["label"]] == doc["answer"]
        assert all(re.fullmatch(r"[1-9]\d{4}", choice) for choice in doc["choices"])
        wrong = [choice for choice in doc["choices"] if choice != doc["answer"] and choice in doc["prompt"]]
        assert len(wrong) == {"passkey": 0, "needle": 3, "tracking": 3}.get(task, FROM_HAYSTACK)
    assert len({doc["label"] for doc in made}) > 5


def test_a_chain_is_followed_to_the_end_to_find_the_tracked_value(tokenizer):
    for doc in documents("tracking", tokenizer, samples=20):
        values = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", doc["prompt"]):  # in the order of the text
            values[name] = values.get(source, source)
        assert values[asked(doc)] == doc["answer"]
        assert f"VAR {asked(doc)} = {doc['answer']}" not in doc["prompt"]


@pytest.mark.parametrize("task", PUZZLES)
def test_documents_depend_on_seed_and_number_alone(task, tokenizer):
    random.seed(1)
    first = documents(task, tokenizer, samples=4)
    state = random.getstate()
    again = documents(task, tokenizer, samples=7)
    assert random.getstate() == state, "no global random state"
    assert again[:4] == first
    assert len({doc["answer"] for doc in again}) == 7
    assert documents(task, tokenizer, samples=4, seed=1)[0]["answer"] != first[0]["answer"]


@pytest.mark.parametrize("task", PUZZLES)
def test_a_length_too_short_is_refused_with_the_shortest_that_works(task, tokenizer):
    with pytest.raises(UsageError, match=rf"{task} takes at least (\d+) tokens .* length of 20") as refusal:
        documents(task, tokenizer, length=20)
    shortest = int(re.search(r"least (\d+)", str(refusal.value))[1])
    assert len(documents(task, tokenizer, length=shortest)) == 10
    with pytest.raises(UsageError):
        documents(task, tokenizer, length=shortest // 2)


def test_lines_of_very_unequal_length_in_tokens_fill_it_as_well():
    """A tokenizer that takes most lines for one token and digits apart: no line is like the mean of the first ones."""
    core = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("a", "isolated"), pre_tokenizers.Digits(True)])
    uneven = PreTrainedTokenizerFast(tokenizer_object=core)
    for doc in documents("needle", uneven, length=500):
        assert 500 - 60 < len(uneven(doc["prompt"])["input_ids"]) + ANSWER_TOKENS <= 500
