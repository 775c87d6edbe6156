"""The names of nxd_lightning, a package that may be missing, under other import paths."""

import importlib
from collections.abc import Sequence
from typing import Any


def from_nxd_lightning(module: str, name: str, names: Sequence[str]) -> Any:
    """What a module that passes some names of nxd_lightning on has under a name; imported now.

    Args:
        module: its name, for messages.
        name: asked for.
        names: those it passes on.

    Raises:
        AttributeError: it passes no such name on.
        ImportError: nxd-lightning is not installed.
    """
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}; there are {', '.join(names)}")
    try:
        nxd_lightning = importlib.import_module("nxd_lightning")
    except ModuleNotFoundError as error:
        if error.name != "nxd_lightning":
            raise
        raise ImportError(f"{module}.{name} is in a package of its own; pip install nxd-lightning") from error
    return getattr(nxd_lightning, name)
