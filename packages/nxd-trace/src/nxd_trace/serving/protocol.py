"""Requests and responses of OpenAI's completions interface: the supported part, and its JSON form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_trace.generation import SamplingSettings
from nxd_trace.serving.errors import RequestError

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
    stop: tuple[str, ...]


def read_request(
    body: Any,
    *,
    model: str,
    encode: Callable[[str], Sequence[int]],
    vocab_size: int,
    end_token: int,
    max_prompts: int,
    random_seed: int,
) -> CompletionRequest:
    """Check the body of a request.

    Args:
        body: as JSON.
        model: the name of the one model.
        encode: from text to token ids.
        vocab_size: one more than the largest id.
        end_token: to stop after.
        max_prompts: in one request.
        random_seed: where the request has none.

    Raises:
        RequestError: 404 for another model, 400 for everything else.
    """
    if not isinstance(body, dict):
        raise RequestError(400, f"the body is a JSON {type(body).__name__}; expected an object")
    if body.get("model", model) != model:
        raise RequestError(404, f"there is no model {body['model']!r}; this server has {model!r}", "model")
    for name, allowed in _ONLY_AT.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise RequestError(400, f"{name}={body[name]!r} is not supported; leave it out", name)
    try:
        settings = SamplingSettings(
            max_new_tokens=_number(body, "max_tokens", int, 16),
            temperature=_number(body, "temperature", float, 1.0),
            top_k=_number(body, "top_k", int, 0),
            top_p=_number(body, "top_p", float, 1.0),
            stop_tokens=(end_token,),
            seed=_number(body, "seed", int, random_seed) % 2**63,
        )
    except ValueError as error:
        raise RequestError(400, str(error)) from error
    prompts = _prompts(body.get("prompt"), encode, vocab_size)
    if len(prompts) > max_prompts:
        raise RequestError(400, f"the request has {len(prompts)} prompts; send {max_prompts} or fewer", "prompt")
    return CompletionRequest(prompts, settings, bool(body.get("stream")), _stop_texts(body.get("stop")))


def _number(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise RequestError(400, f"{name}={value!r} must be of type {kind.__name__}", name)
    return value


def _prompts(prompt: Any, encode: Callable[[str], Sequence[int]], vocab_size: int) -> list[list[int]]:
    """A text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(400, "prompt must be a text, a list of texts, or token ids", "prompt")
    return [_tokens(part, encode, vocab_size) for part in prompt]


def _tokens(prompt: Any, encode: Callable[[str], Sequence[int]], vocab_size: int) -> list[int]:
    if isinstance(prompt, str):
        prompt = _encoded(prompt, encode)
    if not isinstance(prompt, list) or not all(map(_is_id, prompt)):
        raise RequestError(400, "prompt must be a text, a list of texts, or token ids", "prompt")
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if not prompt:
        raise RequestError(400, "the prompt is empty; give at least one token", "prompt")
    if outside:
        raise RequestError(400, f"token id {outside[0]} is outside the vocabulary 0..{vocab_size - 1}", "prompt")
    return prompt


def _encoded(text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    try:
        return [int(token) for token in encode(text)]
    except Exception as error:  # a tokenizer may raise anything for a text that it cannot encode
        raise RequestError(400, f"the prompt has no tokens: {error}", "prompt") from error


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stop_texts(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(it, str) and it for it in stops):
        raise RequestError(400, f"stop must be a text or up to {_MAX_STOPS} texts, none empty", "stop")
    return tuple(stops)


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
