"""Reads one value of a recipe: what a file's parser or a command line gave becomes a value of the key's type.

Known types are int, float, bool, str, Path, Literal, `T | None`, `tuple[T, ...]` and `tuple[T, T]`. A wrong
value raises ValueError saying what is allowed; which key it was is added by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from nxd_trainer.recipe.options import Bounds


def parse_value(value_type: Any, bounds: Bounds, value: object) -> object:
    """The value as the key's type.

    Args:
        value_type: the annotation of the dataclass field.
        bounds: the range of its numbers.
        value: from a file (already typed) or a command line (text).

    Raises:
        ValueError: the value is not allowed; the message ends with what is.
    """
    try:
        return _parse(value_type, bounds, value)
    except ValueError:
        raise ValueError(f"{_show(value)} is not allowed; expected {allowed_values(value_type, bounds)}") from None


def allowed_values(value_type: Any, bounds: Bounds) -> str:
    """What a key may hold, in words: "an integer at least 1", "one of latest, never, required"."""
    limits = f" {bounds}" if str(bounds) else ""
    origin, arguments = get_origin(value_type), get_args(value_type)
    if origin is UnionType:
        return f"{allowed_values(_without_none(value_type), bounds)}, or none"
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list of values, each {allowed_values(arguments[0], bounds)}"
    if origin is tuple:
        return f"a list of {len(arguments)} values, each {allowed_values(arguments[0], bounds)}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return words[value_type] + limits


def type_name(value_type: Any) -> str:
    """A key's type as a help text shows it: "int", "path", "float,float", "cosine|linear|constant"."""
    origin, arguments = get_origin(value_type), get_args(value_type)
    if origin is UnionType:
        return type_name(_without_none(value_type))
    if origin is Literal:
        return "|".join(arguments)
    if origin is tuple:
        return ",".join("..." if part is Ellipsis else type_name(part) for part in arguments)
    return {int: "int", float: "float", bool: "true|false", str: "text", Path: "path"}[value_type]


def _parse(value_type: Any, bounds: Bounds, value: object) -> object:
    origin = get_origin(value_type)
    if origin is UnionType:
        return _parse_optional(value_type, bounds, value)
    if origin is Literal:
        return _parse_choice(get_args(value_type), value)
    if origin is tuple:
        return _parse_tuple(get_args(value_type), bounds, value)
    parsed = _PARSERS[value_type](value)
    if isinstance(parsed, (int, float)) and not isinstance(parsed, bool) and not bounds.admit(parsed):
        raise ValueError
    return parsed


def _parse_optional(value_type: Any, bounds: Bounds, value: object) -> object:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null", "")):
        return None
    return _parse(_without_none(value_type), bounds, value)


def _parse_choice(choices: tuple[str, ...], value: object) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError
    return value


def _parse_tuple(element_types: tuple[Any, ...], bounds: Bounds, value: object) -> tuple[object, ...]:
    if isinstance(value, str):  # the command line's form: 0.9,0.95
        value = [part.strip() for part in value.strip("[]()").split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError
    if element_types[-1] is not Ellipsis and len(value) != len(element_types):
        raise ValueError
    return tuple(_parse(element_types[0], bounds, element) for element in value)


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    return int(value)


def _parse_float(value: object) -> float:
    # YAML 1.1 reads 1e-3 as a text (it wants 1.0e-3), so a text with a number in it is a number.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ValueError


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _parse_path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    return Path(_parse_text(value)).expanduser()


_PARSERS: dict[Any, Callable[[object], object]] = {
    int: _parse_int,
    float: _parse_float,
    bool: _parse_bool,
    str: _parse_text,
    Path: _parse_path,
}


def _without_none(value_type: Any) -> Any:
    (inner,) = (part for part in get_args(value_type) if part is not NoneType)
    return inner


def _show(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value)
