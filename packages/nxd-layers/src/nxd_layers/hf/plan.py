"""Matches the styles of a plan to the modules and parameters of a model.

A plan is a dict from patterns to names of styles, as transformers has them: a pattern is a path in which `*` stands for
one part, such as "model.layers.*.self_attn.q_proj". A path is that of a module or of a parameter.
"""

import re
from collections.abc import Mapping

from torch import nn


def named_styles(model: nn.Module, plan: Mapping[str, str], *, must_match: bool) -> dict[str, str]:
    """The style of each module and parameter that the plan names.

    Args:
        model: whose modules and parameters are meant.
        plan: pattern to style. Where several patterns match, the last one counts.
        must_match: whether a pattern that matches nothing is an error.

    Returns:
        By path, in the model's order: modules before what is in them.

    Raises:
        ValueError: `must_match`, and a pattern matches nothing.
    """
    paths = list(_paths(model))
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        matches = [path for path in paths if _matches(pattern, path)]
        if must_match and not matches:
            raise ValueError(
                f"{pattern!r} of the plan matches no module or parameter of {type(model).__name__}; a pattern is a "
                f"whole path in which * stands for one part, such as {_example(paths)!r}"
            )
        styles.update(dict.fromkeys(matches, style))
    return {path: styles[path] for path in paths if path in styles}


def joined(path: str, name: str) -> str:
    """The path of what is called `name` in the module at `path`, which is "" for the whole model."""
    return f"{path}.{name}" if path else name


def _paths(model: nn.Module) -> list[str]:
    """Of all modules (also where one is in several places) and their parameters."""
    paths = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            paths.append(name)
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        paths += [joined(name, key) for key, _ in own]
    return paths


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


def _example(paths: list[str]) -> str:
    longest = max(paths, key=lambda path: path.count("."), default="layers.0.q_proj")
    return re.sub(r"\.\d+(?=\.)", ".*", longest.removesuffix(".weight").removesuffix(".bias"))
