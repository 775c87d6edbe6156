"""Requests and responses of OpenAI's completions interface: the supported part, and its JSON form."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

from nxd_trace.generation import SamplingSettings
from nxd_trace.serving.errors import RequestError
from nxd_trace.serving.text import StopText

# Fields that change what is written, in a way that this server does not know. At these values they change nothing.
_ONLY_AT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (0,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
_MAX_STOPS = 4
_MAX_STOP_CHARACTERS = 1000
_MAX_PARTS = 256  # texts, lists and objects, beside the prompts
_CHARACTERS_PER_TOKEN = 32  # a prompt with more than this for each token that the model takes does not fit

# The parts of a body that cost memory: texts (also one without an end), lists, objects; and what stands between them.
_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[^"\[{]++', re.DOTALL)


@dataclass(frozen=True)
class CompletionRequest:
    """A request that has been checked.

    Attributes:
        prompts: token ids of each.
        settings: of the first prompt; prompt `i` draws with `seed + i`.
        stream: send each piece as it comes.
        stop: texts to stop at.
    """

    prompts: list[list[int]]
    settings: SamplingSettings
    stream: bool
    stop: tuple[StopText, ...]


@dataclass(frozen=True)
class ServedModel:
    """What a request is checked against.

    Attributes:
        name: of the one model.
        encode: from text to token ids.
        vocab_size: one more than the largest id.
        end_token: to stop after.
        max_length: of a prompt and its completion, in tokens.
        max_prompts: in one request.
    """

    name: str
    encode: Callable[[str], Sequence[int]]
    vocab_size: int
    end_token: int
    max_length: int
    max_prompts: int


def read_request(data: bytes, model: ServedModel, random_seed: int) -> CompletionRequest:
    """Check the body of a request. Takes memory and time in proportion to it, and no event loop.

    Args:
        data: the body.
        model: that it is for.
        random_seed: where the request has none.

    Raises:
        RequestError: 404 for another model, 400 for everything else.
    """
    body = _json_object(data, model)
    if body.get("model", model.name) != model.name:
        raise RequestError(
            404, f"there is no model {short_repr(body['model'])}; this server has {model.name!r}", "model"
        )
    for name, allowed in _ONLY_AT.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise RequestError(400, f"{name}={short_repr(body[name])} is not supported; leave it out", name)
    stream = body.get("stream")
    if not isinstance(stream, bool | None):
        raise RequestError(400, f"stream={short_repr(stream)} must be true or false", "stream")
    try:
        settings = SamplingSettings(
            max_new_tokens=_number(body, "max_tokens", int, 16),
            temperature=_number(body, "temperature", float, 1.0),
            top_k=_number(body, "top_k", int, 0),
            top_p=_number(body, "top_p", float, 1.0),
            stop_tokens=(model.end_token,),
            seed=_number(body, "seed", int, random_seed) % 2**63,
        )
    except ValueError as error:
        raise RequestError(400, str(error)) from error
    prompts = _prompts(body.get("prompt"), model)
    return CompletionRequest(prompts, settings, bool(stream), _stop_texts(body.get("stop")))


def _json_object(data: bytes, model: ServedModel) -> dict[str, Any]:
    """The parsed body, whose parts are counted first: parsed they may take thirty times its memory."""
    max_numbers = model.max_prompts * model.max_length + _MAX_PARTS
    max_parts = 2 * model.max_prompts + _MAX_PARTS
    parts = numbers = 0
    for match in _PARTS.finditer(data):
        between = match[0][0] not in b'"[{'
        parts += not between
        numbers += match[0].count(b",") if between else 0
        if parts > max_parts:
            raise RequestError(400, f"the body has more than {max_parts} texts, lists and objects; send fewer")
        if numbers > max_numbers:
            raise RequestError(400, f"the body has more than {max_numbers} values; send fewer or shorter prompts")
    try:
        body = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(400, f"the body is a JSON {type(body).__name__}; expected an object")
    return body


def _number(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise RequestError(400, f"{name}={short_repr(value)} must be of type {kind.__name__}", name)
    return value


def _prompts(prompt: Any, model: ServedModel) -> list[list[int]]:
    """A text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(400, "prompt must be a text, a list of texts, or token ids", "prompt")
    if len(prompt) > model.max_prompts:
        raise RequestError(400, f"the request has {len(prompt)} prompts; send {model.max_prompts} or fewer", "prompt")
    return [_tokens(part, model) for part in prompt]


def _tokens(prompt: Any, model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        prompt = _encoded(prompt, model)
    if not isinstance(prompt, list):
        raise RequestError(400, "prompt must be a text, a list of texts, or token ids", "prompt")
    if len(prompt) > model.max_length:
        raise RequestError(
            400, f"a prompt has {len(prompt)} tokens, more than the model's max_length={model.max_length}", "prompt"
        )
    if not all(map(_is_id, prompt)):
        raise RequestError(400, "prompt must be a text, a list of texts, or token ids", "prompt")
    outside = [token for token in prompt if not 0 <= token < model.vocab_size]
    if not prompt:
        raise RequestError(400, "the prompt is empty; give at least one token", "prompt")
    if outside:
        raise RequestError(
            400, f"token id {short_repr(outside[0])} is outside the vocabulary 0..{model.vocab_size - 1}", "prompt"
        )
    return prompt


def _encoded(text: str, model: ServedModel) -> list[int]:
    if len(text) > _CHARACTERS_PER_TOKEN * model.max_length:
        raise RequestError(
            400,
            f"a prompt has {len(text)} characters, too many for the model's max_length={model.max_length} tokens",
            "prompt",
        )
    try:
        return [int(token) for token in model.encode(text)]
    except Exception as error:  # a tokenizer may raise anything for a text that it cannot encode
        raise RequestError(400, f"the prompt has no tokens: {error}", "prompt") from error


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stop_texts(stop: Any) -> tuple[StopText, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if (
        not isinstance(stops, list)
        or len(stops) > _MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= _MAX_STOP_CHARACTERS for text in stops)
    ):
        raise RequestError(
            400,
            f"stop must be a text or up to {_MAX_STOPS} texts, none empty or longer than "
            f"{_MAX_STOP_CHARACTERS} characters",
            "stop",
        )
    return tuple(map(StopText, stops))


def completion_body(
    request_id: str, created: int, model: str, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None
) -> dict[str, Any]:
    """A response, or one event of a stream (without usage)."""
    body = {"id": request_id, "object": "text_completion", "created": created, "model": model, "choices": list(choices)}
    return body if usage is None else body | {"usage": usage}


def choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    """The text generated after one prompt, or the next piece of it."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens taken and given."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
