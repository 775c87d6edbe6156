"""The import name `neuronx_distributed`, which another distribution may own too, and its names of nxd_lightning."""

import importlib
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

OTHER_OWNER = "neuronx-distributed"


def other_owner() -> str | None:
    """Return name and version of the other distribution that owns `neuronx_distributed`, if it is installed."""
    try:
        return f"{OTHER_OWNER} {metadata.version(OTHER_OWNER)}"
    except metadata.PackageNotFoundError:
        return None


def warn_of_other_owner() -> None:
    """Warn if both are installed: their files share a folder, and the distribution installed last wins."""
    other = other_owner()
    if other is not None:
        warnings.warn(
            f"{other} is installed next to nxd-neuronx, and both own the import name neuronx_distributed: which one "
            f"is imported depends on the order of installation. {how_to_part_them()}",
            RuntimeWarning,
            stacklevel=3,
        )


def how_to_part_them() -> str:
    """Return advice on how to keep only one of the two distributions."""
    return (
        f"Keep one of them in an environment: pip uninstall {OTHER_OWNER} && pip install --force-reinstall --no-deps "
        "nxd-neuronx"
    )


def from_nxd_lightning(module: str, *names: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that re-exports names of nxd_lightning, imported at the first use.

    It raises an ImportError if nxd-lightning is not installed.

    Args:
        module: the module's `__name__`.
        *names: names that it re-exports.
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
