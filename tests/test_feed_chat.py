"""Conversations: which tokens of a row are answers, and the rows that are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ropext.chat import Conversation, read_conversations, tokenize_conversations
from ropext.errors import RopextError
from ropext.feed import UNSCORED
from ropext.packing import pack
from tests.tiny import make_checkpoint

PLAIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}{{ eos_token }}{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '...' }}")
TALK = [("system", "Be brief."), ("user", "Ünï?"), ("assistant", "Yes 🙂"), ("user", "No?"), ("assistant", "No.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def tokenizer(folder):
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(folder)
    found.chat_template = PLAIN
    return found


def talk(*messages, name="a.jsonl:1"):
    return Conversation(name=name, messages=messages)


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def row(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_and_the_end_that_the_model_has_to_give_are_scored_and_nothing_else(tokenizer, template):
    tokenizer.chat_template = template
    corpus = tokenize_conversations(tokenizer, [talk(*TALK), talk(*TALK[1:3])])
    first, second = np.split(corpus.tokens, corpus.ends[:-1])
    assert tokenizer.decode(first) == ("<s>[system]Be brief.[user]Ünï?[assistant]Yes 🙂</s>[user]No?[assistant]No.</s>")
    marks = np.split(corpus.answers, corpus.ends[:-1])
    assert tokenizer.decode(first[marks[0]]) == "Yes 🙂</s>No.</s>"
    assert tokenizer.decode(second[marks[1]]) == "Yes 🙂</s>"
    assert corpus.bos is None and (corpus.tokens == 0).sum() == 2, "the template's own BOS, once a row"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_packed_conversations_have_labels_on_their_answers(tokenizer, template):
    tokenizer.chat_template = template
    feed = pack(tokenize_conversations(tokenizer, [talk(*TALK), talk(*TALK[1:3])]), 140)
    batch = feed.batch(seed=0, stage=0, step=0, size=1)
    assert feed.supply == 1 and feed.scored == batch.scored == 2 * len("Yes XXXX") + 2 * 1 + len("No.") + 1
    labels = batch.labels[batch.labels != UNSCORED]
    assert tokenizer.decode(labels) == "Yes 🙂</s>No.</s>Yes 🙂</s>"
    assert np.array_equal(labels, batch.ids[batch.labels != UNSCORED])


def test_a_conversation_cut_before_its_answer_is_skipped_and_counted(tokenizer):
    tokenizer.chat_template = PLAIN
    corpus = tokenize_conversations(tokenizer, [talk(("user", "x" * 50), ("assistant", "y")), talk(*TALK[1:3])])
    feed = pack(corpus, 32)
    assert (feed.documents, feed.skipped) == (1, 1)
    ids = feed.batch(seed=0, stage=0, step=0, size=1).ids[0]
    assert tokenizer.decode(ids[:32]).startswith("<s>[user]Ünï?[assistant]Yes")


def test_a_template_that_writes_an_earlier_answer_otherwise_is_refused_unless_marked(tokenizer):
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(RopextError, match=r"a.jsonl:1 does not fit \(the template writes message 3 otherwise; mark"):
        tokenize_conversations(tokenizer, [talk(*TALK)])
    assert tokenize_conversations(tokenizer, [talk(*TALK[1:3])]).answers.any()
    tokenizer.chat_template = MARKED.replace("{{ m.content }}{{ eos", "{{ m.content if loop.last else '...' }}{{ eos")
    corpus = tokenize_conversations(tokenizer, [talk(*TALK)])
    assert tokenizer.decode(corpus.tokens[corpus.answers]) == "...</s>No.</s>"


def test_a_prompt_for_an_answer_that_the_answer_itself_does_not_have_is_refused(tokenizer):
    tokenizer.chat_template = PLAIN.replace("[assistant]{% endif %}", "[assistant]<think>{% endif %}")
    with pytest.raises(RopextError, match="writes message 2 otherwise"):
        tokenize_conversations(tokenizer, [talk(*TALK[1:3])])


def test_a_message_in_a_comment_does_not_count_as_marks(tokenizer):
    tokenizer.chat_template = "{# generation #}" + PLAIN
    assert tokenize_conversations(tokenizer, [talk(*TALK)]).answers.sum() == len("Yes XXXX") + len("No.") + 2


def test_a_row_that_the_template_refuses_is_named(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    )
    with pytest.raises(RopextError, match=r"a.jsonl:1 does not fit \(no system\)"):
        tokenize_conversations(tokenizer, [talk(*TALK)])


def test_a_conversation_that_begins_with_an_answer_is_refused(tokenizer):
    with pytest.raises(RopextError, match="a.jsonl:1 does not fit .*empty conversation"):
        tokenize_conversations(tokenizer, [talk(("assistant", "Hello"))])


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(RopextError, match="this one has none.*set its chat_template"):
        tokenize_conversations(tokenizer, [talk(*TALK)])


def test_no_conversation_at_all_is_an_error(tokenizer):
    with pytest.raises(RopextError, match="at least one conversation"):
        tokenize_conversations(tokenizer, [])


def test_a_long_conversation_is_tokenized_without_a_warning(tokenizer, caplog, capfd):
    tokenize_conversations(tokenizer, [talk(("user", "long " * 500), ("assistant", "y"))])
    assert "longer than" not in caplog.text + "".join(capfd.readouterr())


# Rows


def test_rows_are_read_with_their_numbers_and_empty_lines_passed_over(tmp_path):
    path = write(tmp_path / "a.jsonl", row(*TALK), "\n", row(*TALK[1:3]) | {"id": 7})
    found = list(read_conversations(path))
    assert found == [talk(*TALK, name=f"{path}:1"), talk(*TALK[1:3], name=f"{path}:3")]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("{\n", "a list of messages in 'messages'"),
        ("[]\n", "a list of messages in 'messages'"),
        ({"text": "a"}, "a list of messages in 'messages'"),
        ({"messages": "a"}, "a list of messages in 'messages'"),
        ({"messages": ["a"]}, "found 'a'"),
        ({"messages": [{"role": "user", "content": None}]}, "found {'role': 'user', 'content': None}"),
        (row(("user", "a"), ("bot", "b")), "found 'bot'"),
        ({"messages": [{"content": "a"}]}, "found None"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, r"found \['user'\]"),
        (row(("user", "a")), "an answer of the assistant to learn: .*found none"),
        (row(), "found none"),
        (row(("user", "\ud83d"), ("assistant", "b")), "half a surrogate pair"),
    ],
)
def test_a_row_that_is_no_conversation_is_named_with_what_it_holds(tmp_path, bad, told):
    path = write(tmp_path / "a.jsonl", row(*TALK), bad)
    rows = read_conversations(path)
    next(rows)
    with pytest.raises(RopextError, match=told) as error:
        next(rows)
    assert f"{path}:2" in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(RopextError, match="--data must be readable"):
        list(read_conversations(tmp_path / "none.jsonl"))


def test_a_conversation_is_known_by_its_messages_alone():
    base = talk(*TALK).sha256
    assert base == talk(*TALK, name="b.jsonl:9").sha256
    assert len({base, talk(*TALK[:3]).sha256, talk(("user", TALK[0][1]), *TALK[1:]).sha256}) == 3
