"""Methods of another library's classes are replaced for a while."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Replacement = Callable[[Any], Any]
"""Takes a class's own method or property, and returns what replaces it."""


@contextmanager
def replaced(owner: type, replacements: Mapping[str, Replacement]) -> Iterator[None]:
    """Replace methods and properties of a class inside the block.

    Args:
        owner: the class.
        replacements: by name, the function that makes the replacement.

    Raises:
        RuntimeError: the class does not define one of them, as in a version of the library that is not known.
    """
    own = vars(owner)
    if missing := [name for name in replacements if name not in own]:
        raise RuntimeError(
            f"{owner.__module__}.{owner.__qualname__} has no {', '.join(missing)}: this version of "
            f"{owner.__module__.partition('.')[0]} is not supported; `pip show nxd-hf-trainer` names those that are"
        )
    before = {name: own[name] for name in replacements}
    for name, make in replacements.items():
        setattr(owner, name, make(before[name]))
    try:
        yield
    finally:
        for name, member in before.items():
            setattr(owner, name, member)
