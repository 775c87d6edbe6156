"""Conversations: their forms in rows, and their tokens by a tokenizer's chat template.

A template may mark what the assistant says (`{% generation %}`). Where it does not, an answer's tokens are found by the
prefix before it and the prefix that ends with it, each rendered alone; both must be prefixes of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nxd_trainer.data.tokenizer import digest_files, load_tokenizer_of_transformers

ROLES_OF_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
VOCABULARY_FILES = ("vocab.txt", "merges.txt")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation:
    """What was said.

    Attributes:
        messages: in the form of chat templates, with `role` and `content`.
        tools: JSON schemas of the tools that the template tells of; None without.
        first_answer: messages before this one are not learned.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    first_answer: int = 0


def read_conversation(place: str, row: Mapping[str, Any]) -> Conversation:
    """The conversation in a row: `messages`, ShareGPT's `conversations`, or `prompt` and `completion`.

    A prompt and a completion are texts of the user and the assistant, or lists of messages; of these only the
    completion is learned. A column `tools` goes with any form.

    Args:
        place: where the row stands, for messages.
        row: its values by column.

    Raises:
        ValueError: the row has none of the forms.
    """
    tools = row.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{place}: tools is a {type(tools).__name__}; expected a list of JSON schemas")
    if row.get("messages") is not None:
        return Conversation(messages_of(place, "messages", row["messages"]), tools)
    if row.get("conversations") is not None:
        return Conversation(messages_of(place, "conversations", row["conversations"]), tools)
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt, completion = _said(place, row, "prompt", "user"), _said(place, row, "completion", "assistant")
        return Conversation([*prompt, *completion], tools, first_answer=len(prompt))
    raise ValueError(
        f"{place} is no conversation; expected messages, conversations, or prompt and completion, "
        f"and it has {', '.join(map(str, row)) or 'no column'}; for plain text set data.column instead of data.chat"
    )


def _said(place: str, row: Mapping[str, Any], column: str, role: str) -> Sequence[Mapping[str, Any]]:
    value = row[column]
    return [{"role": role, "content": value}] if isinstance(value, str) else messages_of(place, column, value)


def messages_of(place: str, column: str, value: object) -> list[Mapping[str, Any]]:
    """The messages in a column of a row, in the form of chat templates.

    Raises:
        ValueError: it holds something else.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: {column} is {_shown(value)}; expected a list of messages")
    return [_message(f"{place}: {column}[{index}]", message) for index, message in enumerate(value)]


def _message(place: str, message: object) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{place} is {_shown(message)}; expected an object with role and content")
    if message.get("role") is None and message.get("from") is not None:
        speaker = message["from"]
        role = ROLES_OF_SHAREGPT.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise ValueError(f"{place} is from {speaker!r}; expected one of {', '.join(ROLES_OF_SHAREGPT)}")
        message = {"role": role, "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{place} has no role; expected role and content, or from and value")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{place} has {_shown(content)} as its content; expected text")
    return message


def _shown(value: object) -> str:
    return "empty" if value in ([], {}) else "nothing" if value is None else f"a {type(value).__name__}"


class EncodedRow(NamedTuple):
    """The samples in a row.

    Attributes:
        samples: of each its tokens, and which of them are learned: ids `[tokens]`, and `[tokens]` booleans.
        special_token: the first one that a text spells, which becomes that token; None where none does.
    """

    samples: list[tuple[NDArray[np.int64], NDArray[np.bool_]]]
    special_token: str | None = None


class RowEncoder(Protocol):
    """Turns a row into samples.

    Attributes:
        marks_answers: whether the answers are known without looking for them.
        fingerprint: another text whenever the same row would give other tokens.
    """

    marks_answers: bool
    fingerprint: str

    def encode_row(self, place: str, row: Mapping[str, Any]) -> EncodedRow:
        """The samples in a row; `place` says where it stands."""


class ChatTemplate:
    """A tokenizer with a chat template, which turns conversations into tokens.

    Args:
        path: the folder of a tokenizer as Hugging Face models ship it, or its tokenizer.json.

    Attributes:
        marks_answers: whether the template marks what the assistant says.
        fingerprint: another text whenever the same conversation would give other tokens.

    Raises:
        NoChatTemplateError: the tokenizer has no chat template.
        ValueError: there is no such tokenizer, or transformers is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self._folder = folder
        self._tokenizer = load_tokenizer_of_transformers(folder)
        if not self._tokenizer.chat_template:
            raise NoChatTemplateError(
                f"data.chat=true needs a chat template, and {folder} has none; set data.tokenizer to the tokenizer of "
                "a chat model"
            )
        self.marks_answers = self._marks_answers(None)
        self._special = re.compile("|".join(map(re.escape, self._tokenizer.all_special_tokens)) or "(?!)")
        files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
        known = [it for it in files if it.suffix in (".json", ".model", ".jinja") or it.name in VOCABULARY_FILES]
        self.fingerprint = digest_files(sorted(known))

    def encode_row(self, place: str, row: Mapping[str, Any]) -> EncodedRow:
        """The conversation in a row, as `encode` gives it.

        Raises:
            ValueError: as for `read_conversation` and `encode`.
        """
        conversation = read_conversation(place, row)
        texts = (message.get("content") or "" for message in conversation.messages)
        spelled = (found.group() for text in texts if (found := self._special.search(text)))
        return EncodedRow([self.encode(place, conversation)], next(spelled, None))

    def encode(self, place: str, conversation: Conversation) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The tokens of a conversation, and which of them the assistant says.

        Args:
            place: where it stands, for messages.
            conversation: of one turn or of several.

        Returns:
            Ids `[tokens]`, and `[tokens]` true where a token is learned.

        Raises:
            ValueError: the template refuses the conversation, or renders a turn in another way when more follows.
        """
        try:
            return self._encode(place, conversation)
        except _TurnsNotFoundError:
            raise
        except Exception as error:  # whatever templates raise, and tokenizers for half a character
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(f"{place}: the chat template of {self._folder} refuses it: {reason}") from error

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The tokens of a conversation that the assistant is to answer.

        Args:
            messages: in the form of chat templates, with `role` and `content`.
            tools: JSON schemas of the tools that the template tells of.

        Raises:
            ValueError: the template refuses the conversation.
        """
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, return_dict=True, add_generation_prompt=True
            )
        except Exception as error:  # whatever templates raise, and tokenizers for half a character
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(f"the chat template refuses the messages: {reason}") from error
        return [int(token) for token in rendered["input_ids"]]

    def _encode(self, place: str, conversation: Conversation) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        marked = self._tokenizer.is_fast and self._marks_answers(conversation.tools)
        rendered = self._tokenizer.apply_chat_template(
            list(conversation.messages), tools=conversation.tools, return_dict=True, return_assistant_tokens_mask=marked
        )
        ids = rendered["input_ids"]
        learned = np.zeros(len(ids), dtype=np.bool_)
        if marked:
            learned[:] = np.asarray(rendered["assistant_masks"], dtype=np.bool_)
            if conversation.first_answer:
                learned[: len(self._prefix(place, conversation, ids, conversation.first_answer, prompts=True))] = False
            return np.asarray(ids, dtype=np.int64), learned
        for turn, message in enumerate(conversation.messages):
            if message["role"] == "assistant" and turn >= conversation.first_answer:
                start = len(self._prefix(place, conversation, ids, turn, prompts=True))
                end = len(self._prefix(place, conversation, ids, turn + 1, prompts=False))
                learned[start:end] = True
        return np.asarray(ids, dtype=np.int64), learned

    def _prefix(
        self, place: str, conversation: Conversation, ids: list[int], num_turns: int, *, prompts: bool
    ) -> list[int]:
        """The first turns rendered alone, which the whole must begin with; `prompts`: and asked for an answer."""
        prefix: list[int] = []
        if num_turns:
            prefix = self._tokenizer.apply_chat_template(
                list(conversation.messages[:num_turns]),
                tools=conversation.tools,
                return_dict=True,
                add_generation_prompt=prompts,
            )["input_ids"]
        if not num_turns or ids[: len(prefix)] != prefix:
            turn = num_turns if prompts else num_turns - 1
            raise _TurnsNotFoundError(
                f"{place}: the chat template renders what comes {'before' if prompts else 'up to'} message {turn} in "
                "another way than in the whole conversation, so that the answer's tokens cannot be told; mark answers "
                "by {% generation %} in the template, or end the conversation there"
            )
        return prefix

    def _marks_answers(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        return _GENERATION.search(self._tokenizer.get_chat_template(None, tools)) is not None


class NoChatTemplateError(ValueError):
    """A tokenizer has no chat template."""


class _TurnsNotFoundError(ValueError):
    """The tokens of an answer cannot be told from the others."""
