"""Which layers `target_modules` names."""

import difflib
import re
from collections.abc import Mapping, Sequence


def match_targets(
    targets: Sequence[str] | str | None, adaptable: Mapping[str, str], others: Mapping[str, str]
) -> list[str]:
    """The adaptable layers that are named.

    Args:
        targets: `LoraConfig.target_modules`.
        adaptable: the layers that can have adapters, in the model's order: by name, the layer that holds it, which is
            itself or one that holds several. A target that names some of these does not name the one that holds them:
            `.*v_proj` matches `qkv_proj` by chance.
        others: class by name of every other module.

    Returns:
        Names, in the model's order.

    Raises:
        ValueError: targets are not given, or one of them names no adaptable layer; says what is there.
    """
    names = list(adaptable)
    last_parts = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or "none"
    if targets is None:
        raise ValueError(f"target_modules is not set; layers of this model that can be adapted: {last_parts}")
    patterns = [targets] if isinstance(targets, str) else sorted(targets)
    problems = []
    found: set[str] = set()
    for target in patterns:
        is_regex = isinstance(targets, str)
        matched = {name for name in names if _matches(target, name, is_regex)}
        matched -= {adaptable[name] for name in matched if adaptable[name] != name}
        if not matched:
            problems.append(_why_nothing_matches(target, names, others, is_regex))
        found.update(matched)
    if problems:
        raise ValueError("target_modules: " + "; ".join(problems) + f". Layers that can be adapted: {last_parts}")
    return [name for name in names if name in found]


def _matches(target: str, name: str, is_regex: bool) -> bool:
    if is_regex:
        return re.fullmatch(target, name) is not None
    # Exact, the end of the name, or whole parts of it: all three are a run of whole parts.
    return f".{target}." in f".{name}."


def _why_nothing_matches(target: str, names: Sequence[str], others: Mapping[str, str], is_regex: bool) -> str:
    kinds = sorted({kind for name, kind in others.items() if name and _matches(target, name, is_regex)})
    if kinds:
        return f"{target!r} names only {', '.join(kinds)}, which LoRA cannot adapt"
    if is_regex:
        return f"the regular expression {target!r} matches no whole name, such as {names[0] if names else 'none'!r}"
    parts = sorted({part for name in [*names, *others] for part in [name, *name.split(".")] if part})
    near = difflib.get_close_matches(target, parts, n=3)
    return f"{target!r} matches nothing" + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
