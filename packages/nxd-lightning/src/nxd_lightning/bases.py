"""Base classes of the documented classes: Lightning's XLA classes on torch-xla, their siblings on CPU and CUDA.

Lightning refuses to make its XLA classes without torch-xla, so the choice is made once, by nxd_state's device.
"""

from typing import Any

import torch
from nxd_state import get_device, records_graphs

from nxd_lightning.lightning_package import lightning

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
