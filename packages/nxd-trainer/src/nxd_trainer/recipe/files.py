"""Reads and writes recipes (TOML, YAML or JSON files, overrides, plain dictionaries), and lists their keys.

All mistakes are collected before an error is raised. `checks.py` checks combinations of values.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from nxd_engine.options import Key, Schema, is_none, keys_of

from nxd_trainer.recipe.checks import RecipeError
from nxd_trainer.recipe.rules import SIZES, consistency_mistakes
from nxd_trainer.recipe.sections import Recipe

RUN_RECIPE_FILE = "recipe.toml"  # the recipe of a run, in its output folder
IMPORTED_KEYS = frozenset({"model.factory", "optimizer.factory", "pipeline.layer_class"})
_LENGTHS = ("train.steps", "train.epochs")


def load_recipe(file: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, apply overrides on top, and check the result.

    A file may be untrusted, so it cannot choose what is imported: keys that name Python objects must also be
    among the overrides.

    Args:
        file: `.toml`, `.yaml`, `.yml` or `.json`; None starts from the defaults.
        overrides: strings like `train.steps=100`, `optimizer.betas=0.9,0.99`, `data.path=none`,
            `model.config.head_dim=64`, `output=runs/a`; the last one for a key wins.

    Raises:
        RecipeError: a ValueError with one line for each mistake.
    """
    overrides = list(overrides)
    content = {} if file is None else _read_file(Path(file))
    named = _schema().flatten(content, []).keys() & IMPORTED_KEYS - {
        text.partition("=")[0].strip() for text in overrides
    }
    if named:
        raise RecipeError(
            f"recipe {file}",
            [
                f"{key} names code, which a file alone cannot run; if you trust it, repeat {key} on the command line"
                for key in sorted(named)
            ],
        )
    return recipe_from_dict(content, overrides, origin="recipe" if file is None else f"recipe {file}")


def given_keys(file: Path) -> frozenset[str]:
    """Return the keys that a recipe file sets, such as "train.steps".

    Raises:
        RecipeError: the file cannot be read.
    """
    return frozenset(flat_recipe(_read_file(file)))


def flat_recipe(content: Mapping[str, object]) -> dict[str, object]:
    """Return the values of nested sections, as an older version may have saved them, by keys such as "train.steps"."""
    return _with_new_names(_schema().flatten(content, []))


def recipe_from_dict(content: Mapping[str, object], overrides: Iterable[str] = (), *, origin: str = "recipe") -> Recipe:
    """Make a recipe from nested sections (`{"train": {"steps": 100}, "output": "runs/a"}`) and overrides.

    An override of `train.steps` or `train.epochs` replaces the length in `content`, whichever of the two it has.

    Args:
        content: sections and top-level keys; missing keys keep their defaults.
        overrides: as for `load_recipe`.
        origin: the source of the recipe, as error messages name it.

    Raises:
        RecipeError: a ValueError with one line for each mistake.
    """
    mistakes: list[str] = []
    given = _overridden(
        _with_new_names(_schema().flatten(content, mistakes)),
        _with_new_names(_split_overrides(overrides, mistakes)),
        mistakes,
    )
    values = _schema().read(given, mistakes)
    arguments = _schema().nest(values)
    recipe = Recipe(**arguments | {name: cls(**arguments[name]) for name, cls in _section_types().items()})
    wrong_keys = given.keys() - values.keys()
    # A rule that reads a wrong key would report a default that the user did not choose.
    mistakes += [it.text for it in consistency_mistakes(recipe) if wrong_keys.isdisjoint(it.keys)]
    if mistakes:
        raise RecipeError(origin, mistakes)
    return recipe


def _with_new_names(given: Mapping[str, object]) -> dict[str, object]:
    """Return keys as they are called today: `parallel.zero1` was a switch for the first stage."""
    renamed = dict(given)
    if "parallel.zero1" in renamed:
        given_value = renamed.pop("parallel.zero1")
        is_on = {"true": 1, "1": 1, "false": 0, "0": 0}.get(str(given_value).strip().lower())
        renamed.setdefault("parallel.zero_stage", given_value if is_on is None else is_on)  # wrong ones are reported
    return renamed


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to nested plain values (str, int, float, bool, list, dict), which `recipe_from_dict` reads.

    Keys without effect are omitted: unset ones (None), `train.steps` if `train.epochs` is set, and the sizes of our
    Llama if the model has its own.
    """
    unused = set() if recipe.train.epochs is None else {"train.steps"}
    unused |= set() if recipe.model.has_these_sizes else {f"model.{size.name}" for size in SIZES}
    values: dict[str, object] = {}
    for key in recipe_keys().values():
        value = getattr(getattr(recipe, key.section) if key.section else recipe, key.field)
        if value is not None and key.name not in unused:
            value = value.as_posix() if isinstance(value, Path) else value
            values[key.name] = list(value) if isinstance(value, tuple) else value
    return _schema().nest(values)


def save_recipe(recipe: Recipe, file: str | Path) -> Path:
    """Write the recipe as `.toml` (with each key's meaning as a comment) or `.json`, and create its folder.

    Raises:
        ValueError: the file has another suffix.
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


def read_run_recipe(folder: Path) -> Recipe:
    """Read the recipe that a run saved in its folder, which may have been moved since; imports nothing that it names.

    Raises:
        ValueError: the file is not a recipe.
        OSError: it cannot be read.
    """
    file = folder / RUN_RECIPE_FILE
    return replace(recipe_from_dict(_read_file(file), origin=f"recipe {file}"), output=folder)


def render_draft(given: Mapping[str, object], suggested: Mapping[str, object]) -> str:
    """Return the text of a TOML recipe to edit: keys that are given, and suggested ones behind a `#`.

    Each key has its meaning as a comment. Both are values by full names, in the order of `recipe_keys`.
    """
    lines: list[str] = []
    for section in ("", *_section_types()):
        shown = [key for key in recipe_keys().values() if key.section == section and key.name in {*given, *suggested}]
        lines += ["", f"[{section}]"] if section and shown else []
        for key in shown:
            line = _toml_line(key.field, given.get(key.name, suggested.get(key.name)), key.name)
            lines.append(line if key.name in given else f"# {line}")
    return "\n".join(lines) + "\n"


def recipe_keys() -> dict[str, Key]:
    """Return every key of a recipe by its full name ("train.steps", "output"), in section order."""
    return _schema().keys


def recipe_switches() -> list[str]:
    """Return the names of the boolean keys."""
    return [name for name, key in recipe_keys().items() if key.value_type is bool]


_SUFFIXES = (".toml", ".yaml", ".yml", ".json")


class _PlainLoader(yaml.SafeLoader):
    """Loads YAML without aliases: a few nested ones expand to more values than fit in memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases such as *name are not supported; write the value itself")
        return super().compose_node(parent, index)


@cache
def _section_types() -> dict[str, type[Any]]:
    hints: dict[str, Any] = get_type_hints(Recipe)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


@cache
def _schema() -> Schema:
    keys = [key for section, cls in _section_types().items() for key in keys_of(section, cls)]
    return Schema(
        [*keys, *keys_of("", Recipe)],
        keys_listed_by="`nxd train --help`",
        section_form="write its keys under [{section}]",
    )


def _read_file(file: Path) -> Mapping[str, object]:
    origin = f"recipe {file}"
    if file.is_dir():
        inside = sorted(it.name for it in file.iterdir() if it.suffix in _SUFFIXES)
        instead = f"give {file / inside[0]}" if len(inside) == 1 else "give a recipe file"
        raise RecipeError(origin, [f"is a folder; {instead}, or pass a model folder as model.path={file}"])
    if not file.exists():
        raise RecipeError(origin, [f"does not exist; `nxd init {file}` writes one"])
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(origin, [f"cannot be read: {error}"]) from error
    try:
        if file.suffix == ".toml":
            content: object = tomllib.loads(text)
        elif file.suffix in (".yaml", ".yml"):
            content = yaml.load(text, _PlainLoader)
        elif file.suffix == ".json":
            content = json.loads(text)
        else:
            raise RecipeError(origin, [f"has suffix {file.suffix!r}; expected .toml, .yaml, .yml or .json"])
    except RecipeError:
        raise
    except Exception as error:  # PyYAML also raises KeyError, IndexError and more for values that it cannot construct
        reason = " ".join(str(error).split())  # YAML errors span several lines
        raise RecipeError(origin, [f"is not valid {file.suffix[1:].upper()}: {reason}"]) from error
    if content is None:  # an empty YAML file
        return {}
    if not isinstance(content, dict):
        raise RecipeError(origin, [f"holds a {type(content).__name__}; expected sections with keys"])
    return content


def _split_overrides(overrides: Iterable[str], mistakes: list[str]) -> dict[str, object]:
    given: dict[str, object] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals:
            mistakes.append(f"override {override!r} has no '='; write section.key=value")
        elif name in _section_types():
            mistakes.append(f"override {override!r}: {name} is a section; write {name}.key=value")
        else:
            given[name] = text.strip()
    return given


def _overridden(
    content: Mapping[str, object], overrides: Mapping[str, object], mistakes: list[str]
) -> dict[str, object]:
    """Put overrides on top of a file's keys. Each of the two may give one length, and that of the overrides counts."""
    lengths = [name for name in _LENGTHS if not is_none(overrides.get(name))]
    kept = {name: value for name, value in content.items() if not lengths or name not in _LENGTHS}
    for source in (kept, overrides):
        steps, epochs = (source.get(name) for name in _LENGTHS)
        if not is_none(steps) and not is_none(epochs):
            mistakes.append(
                f"train.steps={steps} and train.epochs={epochs} both give the length of the run; drop train.steps to "
                f"train for {epochs} epochs, or train.epochs to train for {steps} steps"
            )
    return {**kept, **overrides}


def _to_toml(recipe: Recipe) -> str:
    content = recipe_to_dict(recipe)
    top_level = {name: content.pop(name) for name in list(content) if name in recipe_keys()}
    lines = [_toml_line(name, value, name) for name, value in top_level.items()]  # before the first section
    for section, values in content.items():
        lines += [
            "",
            f"[{section}]",
            *(_toml_line(field, value, f"{section}.{field}") for field, value in values.items()),
        ]
    return "\n".join(lines) + "\n"


def _toml_line(field: str, value: object, name: str) -> str:
    return f"{field} = {_toml_value(value)}  # {recipe_keys()[name].description}"


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(part) for part in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml_value(part)}" for key, part in value.items()) + " }"
    if isinstance(value, str):  # TOML uses JSON's escapes, and also requires DEL to be escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
