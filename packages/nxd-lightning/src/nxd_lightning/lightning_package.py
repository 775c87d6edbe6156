"""Chooses the Lightning package: the same library is published as `lightning.pytorch` and as `pytorch_lightning`.

A Trainer of one does not accept classes of the other, so ours inherit from the one that the program has imported first;
from `lightning.pytorch` if it has imported none. Nothing else here depends on the spelling.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

SPELLINGS = ("lightning.pytorch", "pytorch_lightning")
_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def _choose() -> str:
    imported = [name for name in SPELLINGS if name in sys.modules]
    return imported[0] if imported else SPELLINGS[0]


SPELLING = _choose()
OTHER_SPELLING = next(name for name in SPELLINGS if name != SPELLING)


def lightning(submodule: str = "") -> Any:
    """The chosen Lightning, or a module in it such as "callbacks"."""
    return _module(f"{SPELLING}.{submodule}".rstrip("."))


def fabric(submodule: str) -> Any:
    """A module of the Fabric that the chosen Lightning stands on."""
    return _module(f"{_FABRIC[SPELLING]}.{submodule}")


def advice() -> str:
    """Advice for programs that use classes of both."""
    return (
        f"nxd_lightning is built on {SPELLING}, which was imported first; take Trainer, callbacks and loggers from "
        f"there too, or import {OTHER_SPELLING} before nxd_lightning and neuronx_distributed.lightning"
    )


def check_spelling(found: object) -> None:
    """Raise if an object is of the other spelling.

    Raises:
        TypeError: it is.
    """
    if any(cls.__module__.startswith(OTHER_SPELLING) for cls in type(found).__mro__):
        raise TypeError(f"{type(found).__name__} is a class of {OTHER_SPELLING}, but {advice()}")


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)
