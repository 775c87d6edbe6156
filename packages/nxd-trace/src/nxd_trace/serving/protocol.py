"""Reads requests for completions and chat completions of OpenAI's API, and checks every field before generation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from reprlib import repr as short_repr
from typing import Any

from nxd_trace.errors import RequestError
from nxd_trace.generation import PromptInputs, SamplingSettings
from nxd_trace.serving.detokenizer import StopString, special_token
from nxd_trace.serving.fields import flag, include_usage, json_object, limited, logit_bias, number, stop_strings, text
from nxd_trace.serving.prompts import ServedModel, decode_prompt, is_token_id, read_conversation, read_prompts

_SUPPORTED = {
    "model", "n", "stream", "stream_options", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "logprobs", "seed", "cache_salt", "return_token_ids",
}  # fmt: skip
_SUPPORTED_IN_COMPLETIONS = _SUPPORTED | {"prompt", "best_of", "echo"}
_SUPPORTED_IN_CHAT = _SUPPORTED | {
    "messages", "tools", "max_completion_tokens", "top_logprobs", "response_format", "chat_template_kwargs",
    "reasoning_effort",
}  # fmt: skip
# Fields of OpenAI's and vLLM's APIs that do not affect the text.
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction", "priority", "request_id",
}  # fmt: skip
# Fields that affect the text in ways that this server does not support; these values are accepted.
_ONLY_AT: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
}
_ONLY_AT_IN_CHAT: dict[str, tuple[Any, ...]] = _ONLY_AT | {
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_MAX_LOGPROBS = 20  # as in OpenAI's API
_MAX_PARTS = 256  # strings, lists and objects, besides the prompts
_MAX_PARTS_OF_CHAT = 4096
_MAX_STOP_TOKENS = 64
_MAX_NAME_CHARACTERS = 64  # of a field's name in an error
_DEFAULT_MAX_TOKENS = 16  # of a completion; a chat completion may use all that the model's length allows


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request.

    Attributes:
        is_chat: whether it is a chat completion.
        prompts: token ids of each prompt.
        prompt_texts: texts of the prompts, for `echo`; otherwise empty.
        settings: sampling settings; text `i` of the request is sampled with `seed + i`.
        n: number of texts to return per prompt.
        best_of: number of texts to generate per prompt; the most likely ones are returned.
        has_logprobs: whether log-probabilities are returned.
        has_token_ids: whether token ids are returned.
        scores_only: whether the prompt is only scored, and the generated token is dropped.
        stream: whether to send chunks as they are generated.
        include_usage: whether a stream ends with the token counts.
        stop: stop strings.
        cache_salt: salt of the prefix cache; requests with different salts share no blocks.
        inputs: the features of the prompt's images, if it has any; then it is the only prompt.
    """

    is_chat: bool
    prompts: list[list[int]]
    prompt_texts: list[str]
    settings: SamplingSettings
    n: int
    best_of: int
    has_logprobs: bool
    has_token_ids: bool
    scores_only: bool
    stream: bool
    include_usage: bool
    stop: tuple[StopString, ...]
    cache_salt: str
    inputs: PromptInputs | None = None


def read_completion(data: bytes, model: ServedModel, random_seed: int) -> CompletionRequest:
    """Read the body of a request to `/v1/completions`. Its time and memory are proportional to the body's length."""
    body = _body(data, model, _MAX_PARTS, _SUPPORTED_IN_COMPLETIONS, _ONLY_AT)
    return _request(
        body,
        model,
        read_prompts(body.get("prompt"), model),
        random_seed,
        max_tokens=("max_tokens", number(body, "max_tokens", int, _DEFAULT_MAX_TOKENS)),
        num_logprobs=limited(body, "logprobs", None, 0, _MAX_LOGPROBS),
    )


def read_chat(data: bytes, model: ServedModel, random_seed: int) -> CompletionRequest:
    """Read the body of a request to `/v1/chat/completions`; otherwise like `read_completion`."""
    body = _body(data, model, _MAX_PARTS_OF_CHAT, _SUPPORTED_IN_CHAT, _ONLY_AT_IN_CHAT)
    _check_response_format(body.get("response_format"))
    prompt, inputs = read_conversation(body, model)
    num_logprobs = limited(body, "top_logprobs", 0, 0, _MAX_LOGPROBS)
    has_logprobs = flag(body, "logprobs")
    if num_logprobs and not has_logprobs:
        raise RequestError(400, f"top_logprobs={num_logprobs} needs logprobs=true", "top_logprobs")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = number(body, name, int, max(1, model.max_length - len(prompt)))
    request = _request(
        body,
        model,
        [prompt],
        random_seed,
        is_chat=True,
        max_tokens=(name, max_tokens),
        num_logprobs=num_logprobs if has_logprobs else None,
    )
    return replace(request, inputs=inputs)


def _request(
    body: Mapping[str, Any],
    model: ServedModel,
    prompts: list[list[int]],
    random_seed: int,
    *,
    is_chat: bool = False,
    max_tokens: tuple[str, int],
    num_logprobs: int | None,
) -> CompletionRequest:
    """Read the fields of both endpoints. `max_tokens` is the field's name and value."""
    n = limited(body, "n", 1, 1, model.max_prompts)
    best_of = n if is_chat else limited(body, "best_of", n, 1, model.max_prompts)
    if best_of < n:
        raise RequestError(400, f"best_of={best_of} is less than n={n}; use at least n", "best_of")
    if len(prompts) * best_of > model.max_prompts:
        name = "best_of" if best_of > n else "n"
        raise RequestError(
            400, f"the request asks for {len(prompts) * best_of} texts; ask for {model.max_prompts} or fewer", name
        )
    stream = flag(body, "stream")
    if stream and best_of > n:
        raise RequestError(
            400, f"best_of={best_of} cannot be streamed, because the best text is known only at the end", "best_of"
        )
    echo = not is_chat and flag(body, "echo")
    field, num_tokens = max_tokens
    scores_only = echo and num_tokens == 0
    num_tokens += scores_only
    stop = stop_strings(body.get("stop"))
    settings = _sampling_settings(
        body,
        model,
        stop,
        random_seed,
        max_tokens=(field, num_tokens),
        num_logprobs=0 if num_logprobs is None and best_of > n else num_logprobs,  # texts are ranked by log-probability
        prompt_logprobs=echo and num_logprobs is not None,
    )
    longest = max(map(len, prompts))
    if longest + num_tokens > model.max_length:
        raise RequestError(
            400,
            f"{longest} prompt tokens and {field}={num_tokens} are more than the max_length={model.max_length} "
            f"of this server; ask for {max(0, model.max_length - longest)} or fewer",
            field,
            code="context_length_exceeded",
        )
    return CompletionRequest(
        is_chat=is_chat,
        prompts=prompts,
        prompt_texts=[decode_prompt(prompt, model) for prompt in prompts] if echo else [],
        settings=settings,
        n=n,
        best_of=best_of,
        has_logprobs=num_logprobs is not None,
        has_token_ids=flag(body, "return_token_ids"),
        scores_only=scores_only,
        stream=stream,
        include_usage=include_usage(body.get("stream_options"), stream=stream),
        stop=stop,
        cache_salt=text(body, "cache_salt"),
    )


def _sampling_settings(
    body: Mapping[str, Any],
    model: ServedModel,
    stop: Sequence[StopString],
    random_seed: int,
    *,
    max_tokens: tuple[str, int],
    num_logprobs: int | None,
    prompt_logprobs: bool,
) -> SamplingSettings:
    """Read how to choose tokens. `max_tokens` is the field's name and the number of tokens to generate."""
    field, num_tokens = max_tokens
    top_k = number(body, "top_k", int, 0)
    special = {special_token(it.text, model.encode, model.decode) for it in stop} - {None}
    sampling = {
        "max_new_tokens": num_tokens,
        "temperature": number(body, "temperature", float, 1.0),
        "top_k": 0 if top_k == -1 else top_k,  # in vLLM's API -1 means all tokens
        "top_p": number(body, "top_p", float, 1.0),
        "min_p": number(body, "min_p", float, 0.0),
        "repetition_penalty": number(body, "repetition_penalty", float, 1.0),
        "presence_penalty": number(body, "presence_penalty", float, 0.0),
        "frequency_penalty": number(body, "frequency_penalty", float, 0.0),
        "logit_bias": logit_bias(body.get("logit_bias"), model.vocab_size),
        "seed": number(body, "seed", int, random_seed) % 2**63,
        "stop_tokens": tuple({*_stop_tokens(body, model), *special}),
        "min_new_tokens": number(body, "min_tokens", int, 0),
        "num_logprobs": num_logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    try:
        return SamplingSettings(**sampling)
    except ValueError as error:
        message = str(error).replace("max_new_tokens", field).replace("min_new_tokens", "min_tokens")
        raise RequestError(400, message, message.partition("=")[0]) from error


def _stop_tokens(body: Mapping[str, Any], model: ServedModel) -> tuple[int, ...]:
    """Return the tokens that end a text: the request's, and the model's unless `ignore_eos` is set."""
    extra = body.get("stop_token_ids")
    if extra is None:
        extra = []
    is_list = isinstance(extra, list) and len(extra) <= _MAX_STOP_TOKENS and all(map(is_token_id, extra))
    if not is_list or not all(0 <= token < model.vocab_size for token in extra):
        raise RequestError(
            400,
            f"stop_token_ids={short_repr(extra)} must be a list of up to {_MAX_STOP_TOKENS} token ids from 0 to "
            f"{model.vocab_size - 1}",
            "stop_token_ids",
        )
    return (*(() if flag(body, "ignore_eos") else model.end_tokens), *extra)


def _body(
    data: bytes,
    model: ServedModel,
    most_parts: int,
    supported: Collection[str],
    only_at: Mapping[str, tuple[Any, ...]],
) -> Mapping[str, Any]:
    """Parse the body, and check that it is for this model and has no unsupported fields."""
    body = json_object(
        data,
        max_numbers=model.max_prompts * model.max_length + most_parts,
        max_parts=2 * model.max_prompts + most_parts,
    )
    if body.get("model", model.name) != model.name:
        raise RequestError(
            404,
            f"there is no model {short_repr(body['model'])}; this server has {model.name!r}",
            "model",
            code="model_not_found",
        )
    for name, value in body.items():
        if value is None or name in supported or name in _IGNORED or value in only_at.get(name, ()):
            continue
        near = [] if name in only_at else get_close_matches(name[:_MAX_NAME_CHARACTERS], supported, 1)
        meant = f"use {near[0]}, or remove it" if near else "remove it"
        raise RequestError(
            400, f"{short_repr(name)[1:-1]}={short_repr(value)} is not supported; {meant}", name[:_MAX_NAME_CHARACTERS]
        )
    return body


def _check_response_format(wanted: Any) -> None:
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind not in (None, "text"):
        raise RequestError(
            400,
            f"response_format={short_repr(kind)} is not supported: the output is not constrained to a format; remove "
            "it, and ask for JSON in a message",
            "response_format",
        )
