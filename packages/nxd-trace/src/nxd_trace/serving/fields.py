"""Parses the JSON of a request and checks its fields; errors name the client's field."""

import json
import re
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any

from nxd_trace.errors import RequestError
from nxd_trace.serving.detokenizer import StopString

_MAX_STOPS = 4
_MAX_STOP_CHARACTERS = 1000
_MAX_BIASES = 300  # as in OpenAI's API

# The parts of a body that cost memory: strings (even unterminated), lists and objects; and the text between them.
_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[^"\[{]++', re.DOTALL)


def json_object(data: bytes, *, max_numbers: int, max_parts: int) -> dict[str, Any]:
    """Parse a body, after counting its strings, lists and objects (`max_parts`) and its other values (`max_numbers`).

    Parsed, they may take thirty times the memory of the body.
    """
    parts = numbers = 0
    for match in _PARTS.finditer(data):
        is_between = match[0][0] not in b'"[{'
        parts += not is_between
        numbers += match[0].count(b",") if is_between else 0
        if parts > max_parts:
            raise RequestError(400, f"the body has more than {max_parts} strings, lists and objects; send fewer")
        if numbers > max_numbers:
            raise RequestError(400, f"the body has more than {max_numbers} values; send fewer or shorter prompts")
    try:
        body = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(400, f"the body is a JSON {type(body).__name__}; expected an object")
    return body


def number(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a numeric field; the default if it is null or missing."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise RequestError(400, f"{name}={short_repr(value)} must be of type {kind.__name__}", name)
    return value


def limited(body: Mapping[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    """Return an integer field within these limits; the default if it is null or missing."""
    value = number(body, name, int, default)
    if value is not None and not least <= value <= most:
        raise RequestError(400, f"{name}={short_repr(value)} must be from {least} to {most}", name)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean field; False if it is null or missing."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise RequestError(400, f"{name}={short_repr(value)} must be true or false", name)
    return bool(value)


def text(body: Mapping[str, Any], name: str) -> str:
    """Return a string field; empty if it is null or missing."""
    value = body.get(name)
    if not isinstance(value, str | None):
        raise RequestError(400, f"{name}={short_repr(value)} must be a string", name)
    return value or ""


def include_usage(options: Any, *, stream: bool) -> bool:
    """Return `include_usage` of `stream_options`."""
    if options is None:
        return False
    if not stream or not isinstance(options, dict):
        raise RequestError(400, "stream_options must be an object, and needs stream=true", "stream_options")
    return flag(options, "include_usage")


def logit_bias(biases: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return pairs of a token and its bias; in JSON, token ids are strings."""
    if biases is None:
        return ()
    if not isinstance(biases, dict) or len(biases) > _MAX_BIASES:
        raise RequestError(400, f"logit_bias must be an object of up to {_MAX_BIASES} token ids", "logit_bias")
    pairs = []
    for token, bias in biases.items():
        is_token = token.isdecimal() and token.isascii() and len(token) < 12 and int(token) < vocab_size
        if not is_token or not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise RequestError(
                400,
                f"logit_bias has {short_repr(token)}: {short_repr(bias)}; expected a token id up to "
                f"{vocab_size - 1} and a number from -100 to 100",
                "logit_bias",
            )
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


def stop_strings(stop: Any) -> tuple[StopString, ...]:
    """Return the stop strings, given one or a list."""
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if (
        not isinstance(stops, list)
        or len(stops) > _MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= _MAX_STOP_CHARACTERS for text in stops)
    ):
        raise RequestError(
            400,
            f"stop must be a string or up to {_MAX_STOPS} strings, none empty or longer than "
            f"{_MAX_STOP_CHARACTERS} characters",
            "stop",
        )
    return tuple(map(StopString, stops))
