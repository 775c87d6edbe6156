"""Writes a recipe: as a plain dictionary, or as a TOML or JSON file that loads back to an equal recipe.

Unset keys (None) are left out, which is why every optional key's default is None.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nxd_trainer.recipe.keys import recipe_keys, section_types
from nxd_trainer.recipe.sections import Recipe


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Nested plain values (str, int, float, bool, list) that `recipe_from_dict` turns back to the recipe."""
    content: dict[str, Any] = {section: {} for section in section_types()}
    for key in recipe_keys().values():
        holder = getattr(recipe, key.section) if key.section else recipe
        value = getattr(holder, key.field)
        if value is None:
            continue
        target = content[key.section] if key.section else content
        target[key.field] = _plain(value)
    return content


def save_recipe(recipe: Recipe, file: str | Path) -> Path:
    """Write the recipe as `.toml` (with each key's meaning as a comment) or `.json`; makes its folder.

    Raises:
        ValueError: another suffix.
    """
    file = Path(file)
    if file.suffix == ".toml":
        text = _to_toml(recipe)
    elif file.suffix == ".json":
        text = json.dumps(recipe_to_dict(recipe), indent=2) + "\n"
    else:
        raise ValueError(f"recipe file {file} has suffix {file.suffix!r}; expected .toml or .json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return value.as_posix()
    return list(value) if isinstance(value, tuple) else value


def _to_toml(recipe: Recipe) -> str:
    content = recipe_to_dict(recipe)
    lines: list[str] = []
    for key in recipe_keys().values():
        if not key.section and key.field in content:  # TOML wants top-level keys before the first section
            lines.append(f"{key.field} = {_toml_value(content[key.field])}  # {key.description}")
    for section in section_types():
        lines += ["", f"[{section}]"]
        for field, value in content[section].items():
            description = recipe_keys()[f"{section}.{field}"].description
            lines.append(f"{field} = {_toml_value(value)}  # {description}")
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(part) for part in value) + "]"
    if isinstance(value, str):  # JSON's escapes are TOML's, except that TOML wants DEL escaped, too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
