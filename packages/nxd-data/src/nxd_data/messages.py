"""Converts conversations in rows and requests to the format of chat templates.

A message is an object with `role` and `content`, which is a string, or parts if it has images: see `content_parts.py`.
Tool calls have their arguments as an object, not as the string that OpenAI's clients send.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import repr as short_repr
from typing import Any

from nxd_data.content_parts import ImageSource, parts_of, take_images, text_of

ROLES_OF_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys that say whether a message is learned: OpenAI's, and those of axolotl.
MARKS = ("weight", "train", "training")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # synonyms, the usual one first

_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")  # a lone surrogate, which JSON can escape


@dataclass(frozen=True)
class Conversation:
    """A conversation."""

    # messages in the format of chat templates, with `role`, `content` and optional `MARKS`
    messages: Sequence[Mapping[str, Any]]
    # JSON schemas of the tools for the template; None if there are none
    tools: Sequence[Mapping[str, Any]] | None = None
    first_answer: int = 0  # messages before this one are not learned
    images: Sequence[ImageSource] = ()  # the images of the messages' image parts, in order


def read_conversation(place: str, row: Mapping[str, Any]) -> Conversation:
    """Read the conversation in a row: `messages`, ShareGPT's `conversations`, or `prompt` and `completion`.

    A prompt and a completion are texts of the user and the assistant, or lists of messages; only the completion is
    learned. A column `tools` is allowed with any form, and a column `images` or `image`; see `take_images`.

    Raises:
        ValueError: the row has none of these forms; the message starts with `place`.
    """
    tools = tools_in(place, row)
    for column in ("messages", "conversations"):
        if row.get(column) is not None:
            messages, images = take_images(place, row, messages_of(place, column, row[column]))
            return Conversation(messages, tools, images=images)
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt, completion = _said(place, row, "prompt", "user"), _said(place, row, "completion", "assistant")
        messages, images = take_images(place, row, [*prompt, *completion])
        return Conversation(messages, tools, first_answer=len(prompt), images=images)
    raise ValueError(
        f"{place} is not a conversation; expected messages, conversations, or prompt and completion, "
        f"but it has {', '.join(map(str, row)) or 'no columns'}; for plain text set data.column instead of data.chat"
    )


def _said(place: str, row: Mapping[str, Any], column: str, role: str) -> Sequence[Mapping[str, Any]]:
    value = row[column]
    return [{"role": role, "content": value}] if isinstance(value, str) else messages_of(place, column, value)


def messages_of(place: str, column: str, value: object) -> list[Mapping[str, Any]]:
    """Read the messages in a column of a row, in the format of chat templates.

    Null values are dropped, also in calls: tables add them for keys that other rows have.

    Raises:
        ValueError: the column holds something else.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(f"{place}: {column}", value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: {column} is {_shown(value)}; expected a list of messages")
    messages = [_message(f"{place}: {column}[{index}]", message) for index, message in enumerate(value)]
    found: list[Mapping[str, Any]] = _without_nulls(place, messages)
    return found


def tools_in(place: str, row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Read the column `tools` of a row, a list of JSON schemas or its JSON text; None if there is none.

    Raises:
        ValueError: the column holds something else.
    """
    tools = row.get("tools")
    if isinstance(tools, str) and tools.lstrip().startswith("["):
        tools = _parsed(f"{place}: tools", tools)
    if isinstance(tools, list):
        tools = [_parsed(f"{place}: tools", tool) if isinstance(tool, str) else tool for tool in tools]
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        kind = type(tools[0] if isinstance(tools, list) else tools).__name__
        raise ValueError(f"{place}: tools is a {kind}; expected a list of JSON schemas")
    found: list[Mapping[str, Any]] = _without_nulls(place, tools)
    return found


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is the assistant's, and its marks do not turn it off."""
    return message["role"] == "assistant" and all(message.get(mark, 1) for mark in MARKS)


def plain_messages(place: str, messages: Sequence[object]) -> list[dict[str, Any]]:
    """Convert messages in OpenAI's format to that of chat templates; raises ValueError for other formats."""
    return [_message(f"{place}[{index}]", message) for index, message in enumerate(messages)]


def _message(place: str, given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is {_shown(given)}; expected an object with role and content")
    message = dict(given)
    if message.get("role") is None and message.get("from") is not None:
        speaker = message.pop("from")
        role = ROLES_OF_SHAREGPT.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise ValueError(f"{place} is from {speaker!r}; expected one of {', '.join(ROLES_OF_SHAREGPT)}")
        message |= {"role": role, "content": message.pop("value", None)}
    _check_role(place, message.get("role"))
    calls = message.get("tool_calls")
    message["content"] = _content(place, message.get("content"), required=calls is None)
    if calls is not None:
        if not isinstance(calls, list):
            raise ValueError(f"{place} has {_shown(calls)} as its tool_calls; expected a list")
        message["tool_calls"] = [_call(f"{place}: tool_calls[{index}]", call) for index, call in enumerate(calls)]
        if not calls:
            del message["tool_calls"]
            message["content"] = message["content"] or ""
    if message.get("function_call") is not None:
        raise ValueError(f"{place} has a function_call, which tool_calls have replaced; use tool_calls")
    for mark in MARKS:
        _check_mark(place, mark, message)
    return {key: value for key, value in message.items() if value is not None}


def _check_role(place: str, role: object) -> None:
    if not isinstance(role, str):
        raise ValueError(f"{place} has no role; expected role and content, or from and value")
    if not role.startswith(ROLES):
        meant = get_close_matches(role.strip().lower(), ROLES, 1, cutoff=0.8)
        if meant:
            raise ValueError(f"{place} has the role {role!r}; did you mean {meant[0]!r}?")


def _content(place: str, content: object, *, required: bool) -> str | list[dict[str, Any]] | None:
    """Return a string, from a string or parts, or parts if there are images among them."""
    if isinstance(content, list):
        parts = parts_of(place, content)
        text = "".join(part.get("text", "") for part in parts)
        _check_text(place, text)
        return parts if any(part["type"] == "image" for part in parts) else text
    if content is None and not required:
        return None
    if not isinstance(content, str):
        raise ValueError(f"{place} has {_shown(content)} as its content; expected text, or a list of parts")
    _check_text(place, content)
    return content


def _check_text(place: str, text: str) -> None:
    if half := _HALF_A_CHARACTER.search(text):
        raise ValueError(f"{place} has {half.group()!a} in its content, half of a character; fix the text")


def _call(place: str, call: object) -> dict[str, Any]:
    """Return a call whose arguments are an object."""
    if isinstance(call, str):
        call = _parsed(place, call)
    if not isinstance(call, dict):
        raise ValueError(f"{place} is {_shown(call)}; expected an object with function")
    function = call.get("function")
    if function is None:  # TRL's shorter form
        function = call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} has no function with a name; expected name and arguments")
    function = {**function, "arguments": _arguments(place, function.get("arguments"))}
    return function if call.get("function") is None else {**call, "function": function}


def _arguments(place: str, given: object) -> dict[str, Any]:
    arguments = given
    if isinstance(given, str):
        arguments = _parsed(f"{place}: arguments", given) if given.strip() else {}
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{place} has {short_repr(given)} as its arguments; expected an object, or its JSON text")
    return arguments


def _check_mark(place: str, mark: str, message: Mapping[str, Any]) -> None:
    value = message.get(mark)
    if value is None:
        return
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ValueError(f"{place} has {mark}={short_repr(value)}; expected 1 or true, or 0 or false to turn it off")
    if value and message["role"] != "assistant":
        raise ValueError(
            f"{place} has {mark}={short_repr(value)} and the role {message['role']!r}; only the assistant's messages "
            f"are learned, so leave {mark} out"
        )


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {short_repr(text)} ({error}); fix it") from error


def _without_nulls(place: str, value: Any) -> Any:
    try:
        return _stripped(value)
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply; fix it, or leave it out") from error


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items() if item is not None}
    return [_stripped(item) for item in value] if isinstance(value, list) else value


def _shown(value: object) -> str:
    return "empty" if value in ([], {}) else "nothing" if value is None else f"a {type(value).__name__}"


def forms_of_calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield messages with call arguments as objects, which most templates expect, and then as JSON strings."""
    yield list(messages)
    if any("tool_calls" in message for message in messages):
        with_text = [
            {**it, "tool_calls": [_with_text(call) for call in it["tool_calls"]]} if "tool_calls" in it else it
            for it in messages
        ]
        yield with_text
        yield [{"content": None, **it} for it in with_text]


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = function_of(call)
    written = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": written} if "function" in call else written


def function_of(it: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a call or a tool."""
    function = it.get("function", it)
    return function if isinstance(function, Mapping) else it


def spells_objects(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether a template writes arguments as Python objects, and so expects a string."""
    arguments = [function_of(call)["arguments"] for it in messages for call in it.get("tool_calls", ())]
    return any(isinstance(it, dict) and str(it) != json.dumps(it) and str(it) in text for it in arguments)


def with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose thought is under all keys that templates read."""
    found = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def thought_of(message: Mapping[str, Any]) -> str:
    """Return the thought of an answer, if it has one."""
    thought = message.get("reasoning_content") or thought_in_content(message)
    return thought.strip() if isinstance(thought, str) else ""


def thought_in_content(message: Mapping[str, Any]) -> str | None:
    """Return the thought at the start of an answer's content, between `<think>` and `</think>`."""
    thought, end, _ = text_of(message).partition("</think>")
    return thought.rpartition("<think>")[2] if end and message["role"] == "assistant" else None
