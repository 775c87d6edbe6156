"""The adapter of Lightning: chooses the package and the base classes, and starts ranks and devices.

The same library is published as `lightning.pytorch` and as `pytorch_lightning`. On torch-xla the base classes are its
XLA classes, otherwise their siblings for CPU and CUDA: Lightning's XLA classes cannot be created without torch-xla, so
the choice is made once, by nxd_state's device.
"""

import importlib
import os
import socket
import subprocess
import sys
from typing import Any, ClassVar

import torch
from nxd_state import destroy_model_parallel, get_device, is_lazy_device, start_store_process

SPELLINGS = ("lightning.pytorch", "pytorch_lightning")
SPELLING = next((name for name in SPELLINGS if name in sys.modules), SPELLINGS[0])
OTHER_SPELLING = next(name for name in SPELLINGS if name != SPELLING)
ON_XLA = is_lazy_device()

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_LOOPBACK = "127.0.0.1"


def lightning(submodule: str = "") -> Any:
    """Return the chosen Lightning, or a module in it such as "callbacks"."""
    return importlib.import_module(f"{SPELLING}.{submodule}".rstrip("."))


def fabric(submodule: str) -> Any:
    """Return a module of the Fabric that the chosen Lightning is built on."""
    return importlib.import_module(f"{_FABRIC[SPELLING]}.{submodule}")


def advice() -> str:
    """Return advice for programs that use classes of both packages."""
    return (
        f"nxd_lightning is built on {SPELLING}, which was imported first; take Trainer, callbacks and loggers from "
        f"there too, or import {OTHER_SPELLING} before nxd_lightning and neuronx_distributed.lightning"
    )


def check_spelling(found: object) -> None:
    """Raise TypeError if an object belongs to the other Lightning package."""
    if any(cls.__module__.startswith(OTHER_SPELLING) for cls in type(found).__mro__):
        raise TypeError(f"{type(found).__name__} is a class of {OTHER_SPELLING}, but {advice()}")


_plugins = lightning("plugins")
_strategies = lightning("strategies")
StrategyBase: Any = _strategies.XLAStrategy if ON_XLA else _strategies.DDPStrategy
PrecisionBase: Any = _plugins.XLAPrecision if ON_XLA else _plugins.Precision
CheckpointIOBase: Any = _plugins.XLACheckpointIO if ON_XLA else _plugins.CheckpointIO
_XLAAccelerator: Any = lightning("accelerators").XLAAccelerator
_ScriptLauncher: Any = lightning("strategies.launchers")._SubprocessScriptLauncher
_command: Any = fabric("strategies.launchers.subprocess_script")._basic_subprocess_cmd


class NeuronXLAAccelerator(_XLAAccelerator):
    """Any torch-xla device, one per process; Lightning's own class supports only TPUs."""

    @staticmethod
    def is_available() -> bool:
        """Whether this process computes on torch-xla."""
        return ON_XLA

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices on a host if nothing gives the number of ranks."""
        return 1

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """Return the number of ranks on a host; raises ValueError if it is not a positive number."""
        count = len(devices) if isinstance(devices, list) else int(devices)
        if count < 1:
            raise ValueError(f"devices={devices!r} is not a number of devices; use 1 or more")
        return count

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """Return a device for each rank of this host."""
        return [torch.device(get_device().type, index) for index in range(devices)]

    @staticmethod
    def name() -> str:
        """Return the accelerator's name in Lightning."""
        return "nxd_xla"

    def setup_device(self, device: torch.device) -> None:
        """Do nothing."""

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Return nothing: torch-xla does not have statistics for all its devices."""
        return {}


class RankLauncher(_ScriptLauncher):
    """Lightning's launcher, which runs the script again for each rank, with the environment that torchrun would set.

    So a script may ask for ranks anywhere, even before the Trainer is created. It starts nothing under torchrun, where
    the ranks are already running, or for one rank.

    Ranks of one host connect through a store that serves this user alone, ranks of several hosts through torch's store
    on rank 0.
    """

    _store: ClassVar["subprocess.Popen[bytes] | None"] = None  # not per Trainer: it would end with the first one

    def _call_children_scripts(self) -> None:
        if self.num_processes * self.num_nodes == 1:
            return
        self._check_can_spawn_children()
        destroy_model_parallel()  # the mesh of one rank that this process has had until now
        first = self.cluster_environment.node_rank() * self.num_processes
        os.environ.update(
            **self._store_of_one_host() if self.num_nodes == 1 else self._store_of_rank_0(),
            NODE_RANK=str(self.cluster_environment.node_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
            LOCAL_WORLD_SIZE=str(self.num_processes),
            LOCAL_RANK="0",
            RANK=str(first),
        )
        self.procs = [
            subprocess.Popen(
                _command(),
                env=os.environ | {"LOCAL_RANK": str(local_rank), "RANK": str(first + local_rank)},
            )
            for local_rank in range(1, self.num_processes)
        ]

    def _store_of_one_host(self) -> dict[str, str]:
        listener = socket.create_server((_LOOPBACK, 0), backlog=2 * self.num_processes)
        port = listener.getsockname()[1]
        RankLauncher._store = start_store_process(listener)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        return {
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 does not serve it
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def _store_of_rank_0(self) -> dict[str, str]:
        return {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
        }
