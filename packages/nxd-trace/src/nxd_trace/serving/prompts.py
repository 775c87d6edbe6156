"""The prompts of a request: texts, token ids and conversations are checked and become lists of token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any, Protocol

from nxd_trace.errors import RequestError

_CHARACTERS_PER_TOKEN = 32  # a prompt with more characters per token of the model's maximum length does not fit
_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # as in OpenAI's API


class ChatEncoder(Protocol):
    """A chat template."""

    def encode_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Sequence[int]:
        """Return the tokens of a conversation, up to where the assistant's answer starts.

        Args:
            messages: the messages.
            tools: the tools that the assistant may call.
            variables: the client's other variables of the template, such as `enable_thinking`.

        Raises:
            ValueError: the template rejects the conversation.
            LookupError: the template does not read one of the variables, or clients may not set it.
        """


@dataclass(frozen=True)
class ServedModel:
    """The model that requests are checked against.

    Attributes:
        name: name of the model.
        encode: function from text to token ids.
        prefix: token ids that the text of a prompt begins with.
        decode: function from token ids to text.
        chat: the chat template, if there is one.
        vocab_size: size of the vocabulary.
        end_tokens: tokens that end a text.
        max_length: maximum length of a prompt and its completion, in tokens.
        max_prompts: maximum number of texts to generate for one request.
    """

    name: str
    encode: Callable[[str], Sequence[int]]
    prefix: list[int]
    decode: Callable[[Sequence[int]], str]
    chat: ChatEncoder | None
    vocab_size: int
    end_tokens: tuple[int, ...]
    max_length: int
    max_prompts: int


def read_prompts(prompt: Any, model: ServedModel) -> list[list[int]]:
    """Return the token ids of each prompt, given a text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and is_token_id(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(400, "prompt must be a string, a list of strings, or token ids", "prompt")
    if len(prompt) > model.max_prompts:
        raise RequestError(400, f"the request has {len(prompt)} prompts; send {model.max_prompts} or fewer", "prompt")
    return [_tokens(part, model) for part in prompt]


def _tokens(prompt: Any, model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        prompt = _encoded(prompt, model)
    is_list = isinstance(prompt, list)
    if is_list and len(prompt) > model.max_length:
        raise RequestError(
            400, f"a prompt has {len(prompt)} tokens, more than the model's max_length={model.max_length}", "prompt"
        )
    if not is_list or not all(map(is_token_id, prompt)):
        raise RequestError(400, "prompt must be a string, a list of strings, or token ids", "prompt")
    if not prompt:
        raise RequestError(400, "the prompt is empty; send at least one token", "prompt")
    outside = [token for token in prompt if not 0 <= token < model.vocab_size]
    if outside:
        raise RequestError(
            400, f"token id {short_repr(outside[0])} is outside the vocabulary 0..{model.vocab_size - 1}", "prompt"
        )
    return prompt


def _encoded(text: str, model: ServedModel) -> list[int]:
    _check_characters(len(text), "a prompt has", "prompt", model)
    try:
        ids = [int(token) for token in model.encode(text)]
    except Exception as error:  # a tokenizer may raise anything for text that it cannot encode
        raise RequestError(400, f"the prompt has no tokens: {error}", "prompt") from error
    has_prefix = ids[: len(model.prefix)] == model.prefix  # as in text made by a chat template
    return ids if has_prefix else model.prefix + ids


def decode_prompt(prompt: Sequence[int], model: ServedModel) -> str:
    """Return the text of a prompt, for `echo`."""
    try:
        return model.decode(prompt)
    except Exception as error:  # as for `encode`
        raise RequestError(400, f"the prompt has no text to echo: {error}", "echo") from error


def _check_characters(num_characters: int, what: str, field: str, model: ServedModel) -> None:
    if num_characters > _CHARACTERS_PER_TOKEN * model.max_length:
        raise RequestError(
            400,
            f"{what} {num_characters} characters, too many for the model's max_length={model.max_length} tokens",
            field,
        )


def is_token_id(value: Any) -> bool:
    """Whether the value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_conversation(body: Mapping[str, Any], model: ServedModel) -> list[int]:
    """Return the tokens of `messages` and `tools`, encoded by the chat template."""
    if model.chat is None:
        raise RequestError(
            400, f"the model {model.name!r} has no chat template, which messages need; use /v1/completions", "messages"
        )
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a list of at least one message", "messages")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RequestError(400, "tools must be a list of objects", "tools")
    offered = None if body.get("tool_choice") == "none" else tools or None
    plain = [_plain_message(index, message) for index, message in enumerate(messages)]
    variables = _template_variables(body)
    num_characters = sum(map(_num_characters, [*plain, *(offered or ()), variables]))
    _check_characters(num_characters, "messages and tools have", "messages", model)
    try:
        prompt = [int(token) for token in model.chat.encode_prompt(plain, offered, variables)]
    except LookupError as error:
        field = "chat_template_kwargs" if body.get("chat_template_kwargs") else "reasoning_effort"
        raise RequestError(400, str(error), field) from error
    except ValueError as error:
        raise RequestError(400, str(error), "messages") from error
    if not 0 < len(prompt) < model.max_length:
        raise RequestError(
            400,
            f"the messages have {len(prompt)} tokens; expected at least 1, and less than the "
            f"max_length={model.max_length} of this server",
            "messages",
            code="context_length_exceeded",
        )
    return prompt


def _template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `chat_template_kwargs` with `reasoning_effort`."""
    given, effort = body.get("chat_template_kwargs"), body.get("reasoning_effort")
    if not isinstance(given, dict | None):
        raise RequestError(400, f"chat_template_kwargs={short_repr(given)} must be an object", "chat_template_kwargs")
    variables = dict(given or {})
    if effort is None:
        return variables
    if effort not in _REASONING_EFFORTS:
        raise RequestError(
            400,
            f"reasoning_effort={short_repr(effort)} must be one of {', '.join(_REASONING_EFFORTS)}",
            "reasoning_effort",
        )
    if variables.setdefault("reasoning_effort", effort) != effort:
        other = short_repr(variables["reasoning_effort"])
        raise RequestError(
            400,
            f"reasoning_effort={effort!r} is {other} in chat_template_kwargs; remove one of them",
            "reasoning_effort",
        )
    return variables


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    """Return a message with a string as its content, which may be missing beside tool calls."""
    place = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(400, f"{place} must be an object with role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text_part(part)]
        if len(texts) < len(content):
            raise RequestError(400, f"{place} has content that is not text, which the model does not read", "messages")
        content = "".join(texts)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls") is not None):
        raise RequestError(400, f"{place} has {short_repr(content)} as its content; expected text", "messages")
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    rest = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    return {**rest, **calls, "content": content if calls else content or ""}


def _num_characters(value: Any) -> int:
    """Count the characters of all strings in a nested value, without recursion."""
    count, pending = 0, [value]
    while pending:
        value = pending.pop()
        count += len(value) if isinstance(value, str) else 0
        pending += [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return count


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
