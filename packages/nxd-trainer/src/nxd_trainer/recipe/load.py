"""Makes a Recipe from a file and overrides. Every mistake is collected before anything is raised.

Formats are TOML, YAML and JSON, by suffix. What combinations of values make sense is in checks.py.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from nxd_trainer.recipe.checks import consistency_mistakes
from nxd_trainer.recipe.errors import RecipeError
from nxd_trainer.recipe.keys import recipe_keys, section_types, unknown_key, unknown_section
from nxd_trainer.recipe.sections import Recipe


def load_recipe(file: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, apply overrides on top, and check the whole.

    Args:
        file: `.toml`, `.yaml`, `.yml` or `.json`; None starts from the defaults.
        overrides: texts like `train.steps=100`, `optimizer.betas=0.9,0.99`, `data.path=none`,
            `output=runs/a`; the last one for a key wins.

    Raises:
        RecipeError: a ValueError with one line for each mistake.
    """
    content = {} if file is None else _read_file(Path(file))
    return recipe_from_dict(content, overrides, origin="recipe" if file is None else f"recipe {file}")


def recipe_from_dict(content: Mapping[str, object], overrides: Iterable[str] = (), *, origin: str = "recipe") -> Recipe:
    """Make a recipe from nested sections (`{"train": {"steps": 100}, "output": "runs/a"}`) and overrides.

    Args:
        content: sections and top-level keys; what is left out keeps its default.
        overrides: as for `load_recipe`.
        origin: what an error names as the place of its mistakes.

    Raises:
        RecipeError: a ValueError with one line for each mistake.
    """
    mistakes: list[str] = []
    given = _flatten(content, mistakes) | _split_overrides(overrides, mistakes)
    values: dict[str, object] = {}
    for name, value in given.items():
        try:
            values[name] = recipe_keys()[name].parse(value)
        except ValueError as error:
            mistakes.append(str(error))
    recipe = _assemble(values)
    wrong_keys = given.keys() - values.keys()
    for keys, mistake in consistency_mistakes(recipe):
        if wrong_keys.isdisjoint(keys):  # else it would complain about a default nobody chose
            mistakes.append(mistake)
    if mistakes:
        raise RecipeError(origin, mistakes)
    return recipe


def _read_file(file: Path) -> Mapping[str, object]:
    origin = f"recipe {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(origin, [f"cannot be read: {error}"]) from error
    try:
        if file.suffix == ".toml":
            content: object = tomllib.loads(text)
        elif file.suffix in (".yaml", ".yml"):
            content = yaml.safe_load(text)
        elif file.suffix == ".json":
            content = json.loads(text)
        else:
            raise RecipeError(origin, [f"has suffix {file.suffix!r}; expected .toml, .yaml, .yml or .json"])
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())  # YAML explains over several lines
        raise RecipeError(origin, [f"is not valid {file.suffix[1:].upper()}: {reason}"]) from error
    if content is None:  # an empty YAML file
        return {}
    if not isinstance(content, dict):
        raise RecipeError(origin, [f"holds a {type(content).__name__}; expected sections with keys"])
    return content


def _flatten(content: Mapping[str, object], mistakes: list[str]) -> dict[str, object]:
    """`{"train": {"steps": 1}}` as `{"train.steps": 1}`; unknown names go to `mistakes`."""
    given: dict[str, object] = {}
    for name, value in content.items():
        if name in section_types():
            if value is None:  # an empty section in YAML
                continue
            if not isinstance(value, dict):
                mistakes.append(f"{name}={value!r}: {name} is a section; write its keys under [{name}]")
                continue
            given |= {f"{name}.{field}": setting for field, setting in value.items()}
        elif isinstance(value, dict):
            mistakes.append(unknown_section(name))
        else:
            given[name] = value
    return _known(given, mistakes)


def _split_overrides(overrides: Iterable[str], mistakes: list[str]) -> dict[str, object]:
    given: dict[str, object] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals:
            mistakes.append(f"override {override!r} has no '='; write section.key=value")
        elif name in section_types():
            mistakes.append(f"override {override!r}: {name} is a section; write {name}.key=value")
        else:
            given[name] = text.strip()
    return _known(given, mistakes)


def _known(given: dict[str, object], mistakes: list[str]) -> dict[str, object]:
    for name in given:
        section, dot, _ = str(name).rpartition(".")
        if dot and section not in section_types():
            mistakes.append(unknown_section(section))
        elif name not in recipe_keys():
            mistakes.append(unknown_key(str(name)))
    return {name: value for name, value in given.items() if name in recipe_keys()}


def _assemble(values: Mapping[str, object]) -> Recipe:
    arguments: dict[str, Any] = {}
    for section, cls in section_types().items():
        fields = {
            key.field: values[key.name]
            for key in recipe_keys().values()
            if key.section == section and key.name in values
        }
        arguments[section] = cls(**fields)
    arguments |= {name: value for name, value in values.items() if not recipe_keys()[name].section}
    return Recipe(**arguments)
