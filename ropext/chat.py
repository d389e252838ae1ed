"""Conversations: rows of messages, written out by the tokenizer's own chat template, with a loss on the answers only.

Shapes: N tokens of a conversation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.errors import RopextError, first_line, short
from ropext.pack import Corpus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

ANSWER = "assistant"
ROLES = ("system", "developer", "user", ANSWER, "tool")

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages that belong together, and the name they are reported under."""

    name: str
    messages: tuple[tuple[str, str], ...]  # role and content

    @property
    def sha256(self) -> str:
        """Identity of the messages, whatever they are called: hex digest."""
        return hashlib.sha256(json.dumps(self.messages).encode()).hexdigest()


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Conversations of a JSONL file, one a row, in its field `messages`. Raises RopextError that names the row."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _conversation(line, f"{path}:{number}")
    except OSError as error:
        raise RopextError(f"--data must be readable: {path} is not ({error})") from None


def _conversation(line: bytes, name: str) -> Conversation:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    found = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(found, list):
        raise _unfit(name, "is an object with a list of messages in 'messages'", "it is not")
    for message in found:
        if not (isinstance(message, dict) and isinstance(message.get("content"), str)):
            raise _unfit(name, "has messages with a role and a text as content", f"found {short(message)}")
        if message.get("role") not in ROLES:
            raise _unfit(name, f"has the roles {', '.join(ROLES)}", f"found {short(message.get('role'))}")
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            raise _unfit(name, "is text", "found half a surrogate pair, which no tokenizer takes") from None
    if not any(message["role"] == ANSWER for message in found):
        raise _unfit(name, f"has an answer of the {ANSWER} to learn", "found none")
    return Conversation(name=name, messages=tuple((message["role"], message["content"]) for message in found))


def tokenize_conversations(tokenizer: PreTrainedTokenizerBase, conversations: Iterable[Conversation]) -> Corpus:
    """All conversations as tokens, those of the answers marked; they are packed (ropext.packing), never cut in windows.

    Answers are where the template's `{% generation %}` marks are. Without them they are what each answer adds to the
    messages before it and the template's own prompt for an answer.

    Raises RopextError for a tokenizer without a template, and for a row that the template does not take, or whose
    prefixes it writes otherwise than it writes the whole (some leave earlier thoughts out).
    """
    import numpy as np

    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise RopextError(
            f"conversations are written out by the tokenizer's chat template: this one has none ({first_line(error)}); "
            "set its chat_template, or give the conversations as text"
        ) from None
    spell = _marked if _MARKS.search(template) and tokenizer.is_fast else _by_prefixes
    rows = [spell(tokenizer, conversation) for conversation in conversations]
    if not rows:
        raise RopextError("training needs at least one conversation: found none; check what --data names")
    return Corpus(
        tokens=np.concatenate([ids for ids, _ in rows]),
        ends=np.cumsum([len(ids) for ids, _ in rows], dtype=np.int64),
        bos=None,  # the template's own
        answers=np.concatenate([answers for _, answers in rows]),
    )


def _marked(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    import numpy as np

    found = _templated(tokenizer, conversation, return_assistant_tokens_mask=True)
    return np.asarray(found["input_ids"], np.int32), np.asarray(found["assistant_masks"], np.bool_)


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    import numpy as np

    ids = _templated(tokenizer, conversation)["input_ids"]
    answers = np.zeros(len(ids), np.bool_)
    for number, (role, _) in enumerate(conversation.messages):
        if role == ANSWER:
            before, after = (
                _templated(tokenizer, conversation, most=most, add_generation_prompt=prompt)["input_ids"]
                for most, prompt in ((number, True), (number + 1, False))
            )
            if not before == ids[: len(before)] == after[: len(before)] or after != ids[: len(after)]:
                raise _unfit(
                    conversation.name,
                    "is written so that what stands up to an answer begins the whole",
                    f"the template writes message {number + 1} otherwise; mark answers in it with {{% generation %}}",
                )
            answers[len(before) : len(after)] = True
    return np.asarray(ids, np.int32), answers


def _templated(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, most: int | None = None, **options: Any
) -> Any:
    """The first messages as ids."""
    from jinja2 import TemplateError

    messages = [{"role": role, "content": content} for role, content in conversation.messages[:most]]
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
        )
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        raise _unfit(conversation.name, "is one that the chat template takes", first_line(error)) from None


def _unfit(name: str, rule: str, found: str) -> RopextError:
    return RopextError(f"each row of conversations {rule}: {name} does not fit ({found})")
