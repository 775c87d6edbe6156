"""Chooses the Lightning package and the base classes of the documented classes.

The same library is published as `lightning.pytorch` and as `pytorch_lightning`. Base classes are its XLA classes
on torch-xla, and their siblings on CPU and CUDA: Lightning refuses to create its XLA classes without torch-xla, so the
choice is made once, by nxd_state's device.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from nxd_state import get_device, records_graphs

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
    """A module of the Fabric that the chosen Lightning is built on."""
    return _module(f"{_FABRIC[SPELLING]}.{submodule}")


def advice() -> str:
    """Advice for programs that use classes of both."""
    return (
        f"nxd_lightning is built on {SPELLING}, which was imported first; take Trainer, callbacks and loggers from "
        f"there too, or import {OTHER_SPELLING} before nxd_lightning and neuronx_distributed.lightning"
    )


def check_spelling(found: object) -> None:
    """Raise if an object belongs to the other Lightning package.

    Raises:
        TypeError: it does.
    """
    if any(cls.__module__.startswith(OTHER_SPELLING) for cls in type(found).__mro__):
        raise TypeError(f"{type(found).__name__} is a class of {OTHER_SPELLING}, but {advice()}")


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


ON_XLA = records_graphs()


_plugins = lightning("plugins")


_strategies = lightning("strategies")


StrategyBase: Any = _strategies.XLAStrategy if ON_XLA else _strategies.DDPStrategy


PrecisionBase: Any = _plugins.XLAPrecision if ON_XLA else _plugins.Precision


CheckpointIOBase: Any = _plugins.XLACheckpointIO if ON_XLA else _plugins.CheckpointIO


_XLAAccelerator: Any = lightning("accelerators").XLAAccelerator


class NeuronXLAAccelerator(_XLAAccelerator):
    """Any device of torch-xla, one for each process; Lightning's own class knows TPUs only."""

    @staticmethod
    def is_available() -> bool:
        """Whether this process computes on torch-xla."""
        return ON_XLA

    @staticmethod
    def auto_device_count() -> int:
        """Devices of a host where nothing says how many ranks there are."""
        return 1

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """How many ranks a host has.

        Raises:
            ValueError: not a number of devices.
        """
        count = len(devices) if isinstance(devices, list) else int(devices)
        if count < 1:
            raise ValueError(f"devices={devices!r} is not a number of devices; use 1 or more")
        return count

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """A device for each rank of this host."""
        return [torch.device(get_device().type, index) for index in range(devices)]

    @staticmethod
    def name() -> str:
        """Lightning's name of it."""
        return "nxd_xla"

    def setup_device(self, device: torch.device) -> None:
        """Nothing is to be done."""

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Empty: torch-xla has no statistics for all its devices."""
        return {}
