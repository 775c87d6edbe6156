"""Requests of OpenAI's completions and chat completions: the supported fields, checked before anything is generated."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import repr as short_repr
from typing import Any

from nxd_trace.errors import RequestError
from nxd_trace.generation import SamplingSettings
from nxd_trace.serving.fields import flag, include_usage, json_object, limited, logit_bias, number, stop_texts, text
from nxd_trace.serving.prompts import ServedModel, decoded, is_token_id, read_conversation, read_prompts
from nxd_trace.serving.text import StopText, unseen_token

_SUPPORTED = {
    "model", "n", "stream", "stream_options", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "logprobs", "seed", "cache_salt",
}  # fmt: skip
_SUPPORTED_IN_COMPLETIONS = _SUPPORTED | {"prompt", "best_of", "echo"}
_SUPPORTED_IN_CHAT = _SUPPORTED | {
    "messages", "tools", "max_completion_tokens", "top_logprobs", "response_format", "chat_template_kwargs",
    "reasoning_effort",
}  # fmt: skip
# Fields of OpenAI's and vLLM's that change nothing of what is written.
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction", "priority", "request_id",
}  # fmt: skip
# Fields that change what is written in a way that this server does not support, except at these values.
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
_MAX_LOGPROBS = 20  # tokens, as of OpenAI's
_MAX_PARTS = 256  # texts, lists and objects, beside the prompts
_MAX_PARTS_OF_CHAT = 4096
_MAX_STOP_TOKENS = 64
_LONGEST_NAME = 64  # of a field, in an answer
_DEFAULT_TOKENS = 16  # of a completion; an answer of a chat may take all that is left


@dataclass(frozen=True)
class CompletionRequest:
    """A request that has been checked.

    Attributes:
        is_chat: whether it is answered as a chat completion.
        prompts: token ids of each.
        prompt_texts: to begin the texts with; empty without `echo`.
        settings: settings of each prompt; text `i` of all texts draws with `seed + i`.
        num_texts: to answer with, of each prompt.
        num_tried: texts to generate for each prompt, of which the likeliest are answered with.
        has_logprobs: whether the client asked for them.
        writes_nothing: the prompt is only scored: the token that is written after it is dropped.
        stream: send each piece as it comes.
        include_usage: end a stream by the counts of tokens.
        stop: texts to stop at.
        cache_salt: requests with different salts share no cache.
    """

    is_chat: bool
    prompts: list[list[int]]
    prompt_texts: list[str]
    settings: list[SamplingSettings]
    num_texts: int
    num_tried: int
    has_logprobs: bool
    writes_nothing: bool
    stream: bool
    include_usage: bool
    stop: tuple[StopText, ...]
    cache_salt: str


def read_completion(data: bytes, model: ServedModel, random_seed: int) -> CompletionRequest:
    """Check the body of a request to `/v1/completions`. Takes memory and time in proportion to it, and no event loop.

    Args:
        data: the body.
        model: the model that it is for.
        random_seed: seed for requests without one.

    Raises:
        RequestError: 404 for another model, 400 for everything else.
    """
    body = _body(data, model, _MAX_PARTS, _SUPPORTED_IN_COMPLETIONS, _ONLY_AT)
    prompts = read_prompts(body.get("prompt"), model)
    echo = flag(body, "echo")
    num_logprobs = limited(body, "logprobs", None, 0, _MAX_LOGPROBS)
    num_texts = limited(body, "n", 1, 1, model.max_prompts)
    num_tried = limited(body, "best_of", num_texts, 1, model.max_prompts)
    if num_tried < num_texts:
        raise RequestError(400, f"best_of={num_tried} is less than n={num_texts}; use at least n", "best_of")
    max_tokens = number(body, "max_tokens", int, _DEFAULT_TOKENS)
    scores_only = max_tokens == 0 and echo
    return _request(
        body,
        model,
        prompts,
        is_chat=False,
        prompt_texts=[decoded(prompt, model) for prompt in prompts] if echo else [],
        limits=[("max_tokens", 1 if scores_only else max_tokens)] * len(prompts),
        num_texts=num_texts,
        num_tried=num_tried,
        num_logprobs=num_logprobs,
        prompt_logprobs=echo and num_logprobs is not None,
        writes_nothing=scores_only,
        random_seed=random_seed,
    )


def read_chat(data: bytes, model: ServedModel, random_seed: int) -> CompletionRequest:
    """As `read_completion`, of a request to `/v1/chat/completions`."""
    body = _body(data, model, _MAX_PARTS_OF_CHAT, _SUPPORTED_IN_CHAT, _ONLY_AT_IN_CHAT)
    _check_response_format(body.get("response_format"))
    prompt = read_conversation(body, model)
    num_logprobs = limited(body, "top_logprobs", 0, 0, _MAX_LOGPROBS)
    has_logprobs = flag(body, "logprobs")
    if num_logprobs and not has_logprobs:
        raise RequestError(400, f"top_logprobs={num_logprobs} needs logprobs=true", "top_logprobs")
    num_texts = limited(body, "n", 1, 1, model.max_prompts)
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = number(body, name, int, max(1, model.max_length - len(prompt)))
    return _request(
        body,
        model,
        [prompt],
        is_chat=True,
        prompt_texts=[],
        limits=[(name, max_tokens)],
        num_texts=num_texts,
        num_tried=num_texts,
        num_logprobs=num_logprobs if has_logprobs else None,
        prompt_logprobs=False,
        writes_nothing=False,
        random_seed=random_seed,
    )


def _request(
    body: Mapping[str, Any],
    model: ServedModel,
    prompts: list[list[int]],
    *,
    is_chat: bool,
    prompt_texts: list[str],
    limits: Sequence[tuple[str, int]],
    num_texts: int,
    num_tried: int,
    num_logprobs: int | None,
    prompt_logprobs: bool,
    writes_nothing: bool,
    random_seed: int,
) -> CompletionRequest:
    """What both kinds of requests have in common. `limits`: of each prompt the field and its number of tokens."""
    if len(prompts) * num_tried > model.max_prompts:
        name = "best_of" if num_tried > num_texts else "n"
        raise RequestError(
            400, f"the request asks for {len(prompts) * num_tried} texts; ask for {model.max_prompts} or fewer", name
        )
    stream = flag(body, "stream")
    if stream and num_tried > num_texts:
        raise RequestError(
            400, f"best_of={num_tried} cannot be streamed, because the best text is known only at the end", "best_of"
        )
    top_k = number(body, "top_k", int, 0)
    ranked = num_logprobs is None and num_tried > num_texts
    stop = stop_texts(body.get("stop"))
    stop_tokens = {token for it in stop if (token := unseen_token(it.text, model.encode, model.decode)) is not None}
    sampling = {
        "temperature": number(body, "temperature", float, 1.0),
        "top_k": 0 if top_k == -1 else top_k,  # vLLM's clients say -1 for all tokens
        "top_p": number(body, "top_p", float, 1.0),
        "min_p": number(body, "min_p", float, 0.0),
        "repetition_penalty": number(body, "repetition_penalty", float, 1.0),
        "presence_penalty": number(body, "presence_penalty", float, 0.0),
        "frequency_penalty": number(body, "frequency_penalty", float, 0.0),
        "logit_bias": logit_bias(body.get("logit_bias"), model.vocab_size),
        "seed": number(body, "seed", int, random_seed) % 2**63,
        "stop_tokens": tuple({*_stop_tokens(body, model), *stop_tokens}),
        "min_new_tokens": number(body, "min_tokens", int, 0),
        "num_logprobs": 0 if ranked else num_logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    settings = []
    for prompt, (name, max_tokens) in zip(prompts, limits, strict=True):
        try:
            settings.append(SamplingSettings(max_new_tokens=max_tokens, **sampling))
        except ValueError as error:
            message = str(error).replace("max_new_tokens", name).replace("min_new_tokens", "min_tokens")
            raise RequestError(400, message, message.partition("=")[0]) from error
        if len(prompt) + max_tokens > model.max_length:
            raise RequestError(
                400,
                f"{len(prompt)} prompt tokens and {name}={max_tokens} are more than the max_length={model.max_length} "
                f"of this server; ask for {max(0, model.max_length - len(prompt))} or fewer",
                name,
                code="context_length_exceeded",
            )
    return CompletionRequest(
        is_chat=is_chat,
        prompts=prompts,
        prompt_texts=prompt_texts,
        settings=settings,
        num_texts=num_texts,
        num_tried=num_tried,
        has_logprobs=num_logprobs is not None,
        writes_nothing=writes_nothing,
        stream=stream,
        include_usage=include_usage(body.get("stream_options"), stream=stream),
        stop=stop,
        cache_salt=text(body, "cache_salt"),
    )


def _stop_tokens(body: Mapping[str, Any], model: ServedModel) -> tuple[int, ...]:
    """The tokens that end a text: the model's own, unless they are to be ignored, and those of the request."""
    further = body.get("stop_token_ids")
    if further is None:
        further = []
    is_list = isinstance(further, list) and len(further) <= _MAX_STOP_TOKENS and all(map(is_token_id, further))
    if not is_list or not all(0 <= token < model.vocab_size for token in further):
        raise RequestError(
            400,
            f"stop_token_ids={short_repr(further)} must be a list of up to {_MAX_STOP_TOKENS} token ids from 0 to "
            f"{model.vocab_size - 1}",
            "stop_token_ids",
        )
    return (*(() if flag(body, "ignore_eos") else model.end_tokens), *further)


def _body(
    data: bytes,
    model: ServedModel,
    most_parts: int,
    supported: Collection[str],
    only_at: Mapping[str, tuple[Any, ...]],
) -> Mapping[str, Any]:
    """The parsed body, for this model, and without fields that would be ignored although they ask for something."""
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
        near = [] if name in only_at else get_close_matches(name[:_LONGEST_NAME], supported, 1)
        meant = f"use {near[0]}, or remove it" if near else "remove it"
        raise RequestError(
            400, f"{short_repr(name)[1:-1]}={short_repr(value)} is not supported; {meant}", name[:_LONGEST_NAME]
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
