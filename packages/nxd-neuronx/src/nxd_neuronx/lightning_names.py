"""The names of nxd_lightning, a package that may be missing, under other import paths."""

import importlib
from collections.abc import Callable
from typing import Any


def from_nxd_lightning(module: str, *names: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that passes names of nxd_lightning on, which is imported at the first use.

    What it returns raises an ImportError if nxd-lightning is not installed.

    Args:
        module: its `__name__`.
        *names: those it passes on.
    """

    def getattr_of_module(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(names)}")
        try:
            nxd_lightning = importlib.import_module("nxd_lightning")
        except ModuleNotFoundError as error:
            if error.name != "nxd_lightning":
                raise
            raise ImportError(f"{module}.{name} is in a separate package; pip install nxd-lightning") from error
        return getattr(nxd_lightning, name)

    return getattr_of_module
