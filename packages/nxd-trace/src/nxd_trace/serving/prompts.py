"""The prompts of a request: texts, token ids and conversations are checked and become lists of token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any, Protocol

from nxd_trace.errors import RequestError
from nxd_trace.generation import PromptInputs

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


class ImageEncoder(Protocol):
    """A chat template and what reads images."""

    def encode_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[tuple[str, str]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        longest: int,
    ) -> tuple[Sequence[int], PromptInputs]:
        """Return the tokens of a conversation, as `ChatEncoder` does, and the features of its images.

        Args:
            messages: the messages, whose content may be a list of parts: `{"type": "text", "text": ...}`, and
                `{"type": "image"}` for each image.
            images: where each image is in the request, for messages, and its URL; in order.
            tools: as for `ChatEncoder`.
            variables: as for `ChatEncoder`.
            longest: the most tokens that a prompt may have.

        Raises:
            ValueError: also if an image cannot be read, or is refused.
            LookupError: as `ChatEncoder`.
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
        images: reads conversations with images; None for a model of text alone.
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
    images: ImageEncoder | None = None


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


def read_conversation(body: Mapping[str, Any], model: ServedModel) -> tuple[list[int], PromptInputs | None]:
    """Return the tokens of `messages` and `tools`, encoded by the chat template, and the features of their images."""
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
    images: list[tuple[str, str]] = []
    plain = [_plain_message(index, message, images) for index, message in enumerate(messages)]
    if images and model.images is None:
        raise RequestError(
            400, f"the model {model.name!r} reads text alone; remove the image in {images[0][0]}", "messages"
        )
    variables = _template_variables(body)
    num_characters = sum(map(_num_characters, [*plain, *(offered or ()), variables]))
    _check_characters(num_characters, "messages and tools have", "messages", model)
    try:
        inputs = None
        if images and model.images is not None:
            tokens, inputs = model.images.encode_prompt(plain, images, offered, variables, longest=model.max_length - 1)
        else:
            tokens = model.chat.encode_prompt(plain, offered, variables)
        prompt = [int(token) for token in tokens]
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
    return prompt, inputs


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


def _plain_message(index: int, message: Any, images: list[tuple[str, str]]) -> dict[str, Any]:
    """Return a message with a string as its content, which may be missing beside tool calls.

    If there are images among the parts of its content, these stay parts; `images` gets their places and URLs.
    """
    place = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(400, f"{place} must be an object with role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [_plain_part(f"{place}.content[{number}]", part, images) for number, part in enumerate(content)]
        has_images = any(part["type"] == "image" for part in parts)
        content = parts if has_images else "".join(part["text"] for part in parts)
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls") is not None):
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


def _plain_part(place: str, part: Any, images: list[tuple[str, str]]) -> dict[str, str]:
    """Return a part of a content as chat templates take it, and add the place and URL of an image to `images`."""
    part = part if isinstance(part, dict) else {"type": part}
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind != "image_url":
        raise RequestError(
            400, f"{place} is of the type {short_repr(kind)}; expected text, or image_url for an image", "messages"
        )
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise RequestError(400, f"{place} has no image_url.url; give the image as a data URI", "messages")
    images.append((place, url))
    return {"type": "image"}
