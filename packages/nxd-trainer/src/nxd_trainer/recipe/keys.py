"""The list of all keys of a recipe, derived from its dataclasses: for reading, for suggestions and for help.

Top-level keys have a plain name ("output"), all others are dotted ("train.steps").
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from nxd_trainer.recipe.options import Bounds
from nxd_trainer.recipe.sections import Recipe
from nxd_trainer.recipe.values import parse_value, type_name


@dataclass(frozen=True, kw_only=True)
class RecipeKey:
    """One key of the recipe."""

    name: str  # "train.steps", or "output" at the top level
    section: str  # "train", or "" at the top level
    field: str  # "steps"
    value_type: Any  # the field's annotation
    bounds: Bounds
    default: object
    description: str

    @property
    def type_name(self) -> str:
        """The type as help shows it."""
        return type_name(self.value_type)

    def parse(self, value: object) -> object:
        """The value as this key's type; ValueError names the key and says what is allowed."""
        try:
            return parse_value(self.value_type, self.bounds, value)
        except ValueError as error:
            raise ValueError(f"{self.name}={error}") from None


@cache
def section_types() -> dict[str, type[Any]]:
    """The dataclass of each section, by its name."""
    hints: dict[str, Any] = get_type_hints(Recipe)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


@cache
def recipe_keys() -> dict[str, RecipeKey]:
    """Every key of a recipe by its full name, in the order of the sections."""
    keys = [key for section, cls in section_types().items() for key in _keys_of(section, cls)]
    return {key.name: key for key in [*keys, *_keys_of("", Recipe)]}


def _keys_of(section: str, cls: type[Any]) -> list[RecipeKey]:
    hints = get_type_hints(cls)
    return [
        RecipeKey(
            name=f"{section}.{field.name}" if section else field.name,
            section=section,
            field=field.name,
            value_type=hints[field.name],
            bounds=field.metadata["bounds"],
            default=field.default,
            description=field.metadata["description"],
        )
        for field in dataclasses.fields(cls)
        if not is_dataclass(hints[field.name])
    ]


def unknown_key(name: str) -> str:
    """The mistake line for a key that does not exist, with the nearest one that does."""
    section, _, field = name.rpartition(".")
    own = {key.field: key.name for key in recipe_keys().values() if key.section == section}
    everywhere = {key.field: key.name for key in recipe_keys().values()}
    nearest = [
        candidates[match]
        for candidates, cutoff in ((everywhere, 1.0), (own, 0.6), (everywhere, 0.6))
        for match in difflib.get_close_matches(field, candidates, n=1, cutoff=cutoff)
    ]
    hint = f"; did you mean {nearest[0]}?" if nearest else "; `nxd train --help` lists all keys"
    return f"unknown key {name}{hint}"


def unknown_section(name: str) -> str:
    """The mistake line for a section that does not exist, with the nearest one that does."""
    nearest = difflib.get_close_matches(name, section_types(), n=1, cutoff=0.6)
    hint = f"did you mean [{nearest[0]}]?" if nearest else "sections are " + ", ".join(section_types())
    return f"unknown section [{name}]; {hint}"


def show_default(key: RecipeKey) -> str:
    """A key's default as it would be written in an override; "unset" for None."""
    default = key.default
    if default is None:
        return "unset"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(str(part) for part in default)
    return default.as_posix() if isinstance(default, Path) else str(default)


def render_recipe_help() -> str:
    """All keys with type, default and meaning, one section after another.

    Plain text of at most 110 columns, ready to be an argparse epilog under RawDescriptionHelpFormatter.
    """
    headings = {name: f"[{name}]  {(cls.__doc__ or '').splitlines()[0]}" for name, cls in section_types().items()}
    lines: list[str] = []
    section: str | None = None
    for key in recipe_keys().values():
        if key.section != section:
            section = key.section
            lines += ["", headings.get(section, "top level")]
        lines.append(f"  {key.name} ({key.type_name}, default {show_default(key)})")
        lines.append(f"      {key.description}")
    return "\n".join(lines[1:])
