"""Flattens nested tuples, lists and dicts of tensors into a list and a JSON-serializable structure.

Programs take and return flat lists; the structure restores the nesting for users.
"""

from collections.abc import Mapping, Sequence
from reprlib import repr as shortened
from typing import Any

from torch import Tensor

# An index into the flat list, None, or {"tuple" | "list": [...]} or {"dict": {...}}.
Structure = Any


def flatten(value: Any, what: str) -> tuple[list[Tensor], Structure]:
    """Return the tensors in `value`, in order, and how they are nested.

    Args:
        value: a tensor, None, or tuples, lists and string-keyed mappings of these.
        what: name of the value, for errors.

    Raises:
        TypeError: it contains something else.
    """
    tensors: list[Tensor] = []

    def visit(part: Any, path: str) -> Structure:
        if isinstance(part, Tensor):
            tensors.append(part)
            return len(tensors) - 1
        if part is None:
            return None
        if isinstance(part, Mapping) and all(isinstance(key, str) for key in part):
            return {"dict": {key: visit(inner, f"{path}[{key!r}]") for key, inner in part.items()}}
        if isinstance(part, Sequence) and not isinstance(part, str | bytes):
            kind = "list" if isinstance(part, list) else "tuple"
            return {kind: [visit(inner, f"{path}[{index}]") for index, inner in enumerate(part)]}
        raise TypeError(
            f"{path} is a {type(part).__name__}; expected tensors, None, or tuples, lists and dicts of them: "
            "other values are part of the program, so pass them to func"
        )

    return tensors, visit(value, what)


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flatten`, with these tensors in place of the original ones."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return tensors[structure]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: unflatten(part, tensors) for key, part in parts.items()}
    inner = [unflatten(part, tensors) for part in parts]
    return inner if kind == "list" else tuple(inner)


def check_structure(structure: Structure, count: int) -> None:
    """Raise ValueError unless `flatten` could have returned this structure with this number of tensors."""
    stack, found = [structure], 0
    while stack:
        match stack.pop():
            case None:
                pass
            case int(index) if index == found:
                found += 1
            case {"tuple": list(parts)} as nested if len(nested) == 1:
                stack.extend(reversed(parts))
            case {"list": list(parts)} as nested if len(nested) == 1:
                stack.extend(reversed(parts))
            case {"dict": dict(named)} as nested if len(nested) == 1:
                stack.extend(reversed(named.values()))
            case other:
                raise ValueError(f"{shortened(other)} is not a nesting of tensors; expected the next index, {found}")
    if found != count:
        raise ValueError(f"{shortened(structure)} nests {found} tensors, but there are {count}")


def without(structure: Structure, dropped: set[int]) -> Structure:
    """The structure without the tensors at these indices; containers that held only these are removed too."""
    count = _count(structure)
    kept = {old: new for new, old in enumerate(index for index in range(count) if index not in dropped)}

    def visit(part: Structure) -> Structure:
        if part is None or isinstance(part, int):
            return None if part is None else kept[part]
        ((kind, parts),) = part.items()
        if kind == "dict":
            return {kind: {key: visit(inner) for key, inner in parts.items() if not _only(inner, dropped)}}
        return {kind: [visit(inner) for inner in parts if not _only(inner, dropped)]}

    return visit(structure)


def _indices(structure: Structure) -> list[int]:
    if structure is None:
        return []
    if isinstance(structure, int):
        return [structure]
    ((kind, parts),) = structure.items()
    return [index for part in (parts.values() if kind == "dict" else parts) for index in _indices(part)]


def _count(structure: Structure) -> int:
    return len(_indices(structure))


def _only(structure: Structure, dropped: set[int]) -> bool:
    indices = _indices(structure)
    return bool(indices) and dropped.issuperset(indices)
