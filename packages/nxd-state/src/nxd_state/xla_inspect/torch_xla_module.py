"""Imports torch-xla, where it is installed, for the code that records graphs. Nothing else in this package needs it."""

import importlib
import importlib.util
from typing import Any


def check_torch_xla(what: str) -> None:
    """Raise ModuleNotFoundError if torch-xla, which `what` needs, is not installed."""
    if importlib.util.find_spec("torch_xla") is None:
        raise ModuleNotFoundError(
            f"{what} needs torch-xla, which is not installed: install torch_xla of the same version as torch"
        )


def torch_xla_module(name: str = "torch_xla") -> Any:
    """A module of torch-xla, imported now: what it reads of the environment must be set before."""
    return importlib.import_module(name)
