"""Options: keys with a type, a range, a default and a meaning, read so that every mistake is reported at once.

Both the recipe of `nxd train` and the config of a script are read here. They have two levels: top-level keys ("output")
and keys of a section ("train.steps"). The recipe and the config check which values fit together.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

Value = TypeVar("Value")

_NAMES = {int: "int", float: "float", bool: "true|false", str: "text", Path: "path", Any: "any"}
_ADMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


class Bounds(TypedDict, total=False):
    """The range of a number, or of each number in a list."""

    at_least: float
    above: float
    at_most: float
    below: float


def option(default: Value, description: str, **bounds: Unpack[Bounds]) -> Value:
    """Declare a key as a field of a dataclass, with its default, help text and range.

    A key that may be unset (`T | None`) must default to None, because unset keys are not saved.
    """
    # A dataclass field is declared by assigning what `field` returns, which type checkers see as the default.
    field: Any = dataclasses.field(default=default, metadata={"description": description, "bounds": bounds})
    declared: Value = field
    return declared


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key: its name, its allowed values, and its meaning.

    Types are int, float, bool, str, Path, Literal, `T | None`, `bool | int | None`, `tuple[T, ...]`, `tuple[T, T]`,
    Any, and `Mapping[str, Any]`, a table whose own keys are not checked here.
    """

    section: str  # "train", or "" at the top level
    field: str  # "steps"
    value_type: Any
    bounds: Mapping[str, float]  # as in Bounds
    default: object
    description: str = ""

    @property
    def name(self) -> str:
        """The full name: "train.steps", or "output" at the top level."""
        return f"{self.section}.{self.field}" if self.section else self.field

    @property
    def type_name(self) -> str:
        """The type as help shows it: "int", "path", "float,float", "cosine|linear|constant"."""
        return _type_name(self.value_type)

    @property
    def is_table(self) -> bool:
        """Whether it holds a table, whose keys may be given one by one: "model.config.head_dim"."""
        return self.type_name == "table"

    def parse(self, value: object) -> object:
        """Convert a value to this key's type.

        Args:
            value: from a file or a call (already typed) or from a command line (text).

        Raises:
            ValueError: the value is not allowed; the message names the key and the allowed values.
        """
        try:
            return _parse(self.value_type, self.bounds, value)
        except (ValueError, OverflowError):
            shown = repr(value) if isinstance(value, str) else value
            expected = _in_words(self.value_type, self.bounds)
            raise ValueError(f"{self.name}={shown} is not allowed; expected {expected}") from None


def keys_of(section: str, cls: type[Any]) -> list[Key]:
    """Return the keys that a dataclass declares with `option`, in order."""
    hints = get_type_hints(cls)
    return [
        Key(section=section, field=field.name, value_type=hints[field.name], default=field.default, **field.metadata)
        for field in dataclasses.fields(cls)
        if field.metadata
    ]


class Schema:
    """All known keys.

    Attributes:
        keys: the keys by their full names.
        sections: the names of the sections.
    """

    def __init__(self, keys: Iterable[Key], *, keys_listed_by: str, section_form: str):
        """The texts end two kinds of mistakes: where all keys are listed, and how to write "{section}"."""
        self.keys = {key.name: key for key in keys}
        self.sections = list(dict.fromkeys(key.section for key in self.keys.values() if key.section))
        self._keys_listed_by = keys_listed_by
        self._section_form = section_form

    def flatten(self, content: Mapping[str, object], mistakes: list[str]) -> dict[str, object]:
        """Turn `{"train": {"steps": 1}}` into `{"train.steps": 1}`; invalid sections are added to `mistakes`."""
        given: dict[str, object] = {}
        for name, value in content.items():
            if name in self.sections:
                if isinstance(value, Mapping):
                    given |= {f"{name}.{field}": setting for field, setting in value.items()}
                elif value is not None:  # an empty section in YAML
                    form = self._section_form.format(section=name)
                    mistakes.append(f"{name}={value!r}: {name} is a section; {form}")
            elif isinstance(value, Mapping) and name not in self.keys:
                mistakes.append(self._unknown_section(str(name)))
            else:
                given[str(name)] = value
        return given

    def read(self, given: Mapping[str, object], mistakes: list[str]) -> dict[str, object]:
        """Return values by the keys' full names; unknown keys and wrong values are added to `mistakes`."""
        given = self._with_tables(given)
        mistakes += [self._unknown(name) for name in given if name not in self.keys]
        values: dict[str, object] = {}
        for name in given:
            if name in self.keys:
                try:
                    values[name] = self.keys[name].parse(given[name])
                except ValueError as error:
                    mistakes.append(str(error))
        return values

    def nest(self, values: Mapping[str, object]) -> dict[str, Any]:
        """Turn `{"train.steps": 1}` into `{"train": {"steps": 1}}`, with every section."""
        content: dict[str, Any] = {section: {} for section in self.sections}
        for name, value in values.items():
            section, field = self.keys[name].section, self.keys[name].field
            (content[section] if section else content)[field] = value
        return content

    def _with_tables(self, given: Mapping[str, object]) -> dict[str, object]:
        """Merge single keys of a table into that table."""
        tables = [key.name for key in self.keys.values() if key.is_table]
        put: dict[str, object] = {}
        for name, value in given.items():
            table = next((it for it in tables if name.startswith(f"{it}.")), None)
            if table is None:
                put[name] = value
            else:
                held = literal(put.get(table))
                put[table] = {**(held if isinstance(held, Mapping) else {}), name[len(table) + 1 :]: literal(value)}
        return put

    def _unknown(self, name: str) -> str:
        """Return the mistake line for a key that does not exist, with the nearest existing key."""
        section, _, field = name.rpartition(".")
        if section and section not in self.sections:
            return self._unknown_section(section)
        everywhere = {key.field: key.name for key in self.keys.values()}
        own = {key.field: key.name for key in self.keys.values() if key.section == section}
        if not section:
            own |= {name: name for name in self.sections}
        nearest = [
            candidates[match]
            for candidates, cutoff in ((everywhere, 1.0), (own, 0.6), (everywhere, 0.6))
            for match in difflib.get_close_matches(field, candidates, n=1, cutoff=cutoff)
        ]
        hint = f"did you mean {nearest[0]}?" if nearest else f"{self._keys_listed_by} lists all keys"
        return f"unknown key {name}; {hint}"

    def _unknown_section(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, self.sections, n=1, cutoff=0.6)
        hint = f"did you mean [{nearest[0]}]?" if nearest else "sections are " + ", ".join(self.sections)
        return f"unknown section [{name}]; {hint}"


class OptionError(ValueError):
    """Invalid options. It carries every mistake found, so that a user can fix them all at once.

    Attributes:
        mistakes: a line for each mistake.
    """

    def __init__(self, origin: str, mistakes: Iterable[str]):
        self.mistakes = tuple(mistakes)
        if len(self.mistakes) == 1:
            message = f"{origin}: {self.mistakes[0]}"
        else:
            lines = "".join(f"\n  - {mistake}" for mistake in self.mistakes)
            message = f"{origin}: {len(self.mistakes)} mistakes{lines}"
        super().__init__(message)


def _parse(value_type: Any, bounds: Mapping[str, float], value: object) -> Any:  # noqa: PLR0911 (one line for each type)
    origin, parts = get_origin(value_type), get_args(value_type)
    if value_type is Any or (origin is Literal and isinstance(value, str) and value in parts):
        return value
    if origin in (Union, UnionType):  # the first for `Literal[...] | None`
        return None if is_none(value) else _parse_union(_without_none(parts), bounds, value)
    if origin is tuple:
        return _parse_tuple(parts, bounds, value)
    if origin is Mapping:
        return _parse_table(value)
    if value_type is bool:
        return _parse_bool(value)
    if value_type in (int, float):
        return _parse_number(value_type, bounds, value)
    if value_type is Path and isinstance(value, Path):
        return value
    if value_type not in (str, Path) or not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return Path(value).expanduser() if value_type is Path else value


def _parse_union(types: tuple[Any, ...], bounds: Mapping[str, float], value: object) -> Any:
    for value_type in types[:-1]:
        try:
            return _parse(value_type, bounds, value)
        except ValueError:
            pass
    return _parse(types[-1], bounds, value)


def _parse_tuple(element_types: tuple[Any, ...], bounds: Mapping[str, float], value: object) -> tuple[Any, ...]:
    if isinstance(value, str):  # the command line's form: 0.9,0.95
        value = [part.strip() for part in value.strip("[]()").split(",") if part.strip()]
    if not isinstance(value, list | tuple) or (... not in element_types and len(value) != len(element_types)):
        raise ValueError
    return tuple(_parse(element_types[0], bounds, element) for element in value)


def _parse_table(value: object) -> dict[str, Any]:
    table = literal(value)
    if not isinstance(table, Mapping) or not _can_be_written(table):
        raise ValueError
    return dict(table)


def _can_be_written(value: object) -> bool:
    """Whether TOML, YAML and JSON can all represent the value."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _can_be_written(it) for key, it in value.items())
    if isinstance(value, list):
        return all(map(_can_be_written, value))
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def is_none(value: object) -> bool:
    """Whether a value leaves an optional key unset: None, or what a command line writes for it."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null", ""))


def literal(value: object) -> object:
    """Return a value as a table holds it: text from a command line is parsed as JSON if possible."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _parse_bool(value: object) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower())
    if not isinstance(value, int) or value not in (0, 1):  # scripts have 0 and 1 from their command lines
        raise ValueError
    return bool(value)


def _parse_number(value_type: type[int] | type[float], bounds: Mapping[str, float], value: object) -> float:
    # YAML 1.1 reads 1e-3 as text (it expects 1.0e-3), so text that holds a number is accepted as a number.
    if isinstance(value, bool) or not isinstance(value, (value_type, int, str)):
        raise ValueError
    number = value_type(value)
    if not math.isfinite(number) or not all(_ADMITS[name](number, limit) for name, limit in bounds.items()):
        raise ValueError
    return number


def _in_words(value_type: Any, bounds: Mapping[str, float]) -> str:
    """Describe a key's allowed values: "an integer at least 1", "one of latest, never, required"."""
    origin, parts = get_origin(value_type), get_args(value_type)
    if origin in (Union, UnionType):  # the first for `Literal[...] | None`
        return f"{', '.join(_in_words(part, bounds) for part in _without_none(parts))}, or none"
    if origin is Literal:
        return "one of " + ", ".join(parts)
    if origin is tuple:
        number = "" if ... in parts else f"{len(parts)} "
        return f"a list of {number}values, each {_in_words(parts[0], bounds)}"
    if origin is Mapping:
        return "a table of keys"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path"}[value_type]
    limits = " and ".join(f"{name.replace('_', ' ')} {limit:g}" for name, limit in bounds.items())
    return f"{words} {limits}".rstrip()


def _type_name(value_type: Any) -> str:
    origin, parts = get_origin(value_type), get_args(value_type)
    if origin in (Union, UnionType):  # the first for `Literal[...] | None`
        return "|".join(map(_type_name, _without_none(parts)))
    if origin is Literal:
        return "|".join(parts)
    if origin is tuple:
        return ",".join("..." if part is ... else _type_name(part) for part in parts)
    if origin is Mapping:
        return "table"
    return _NAMES[value_type]


def _without_none(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part for part in parts if part is not NoneType)
