"""Process groups of several ranks on one GPU: NCCL refuses two ranks on a device, so gloo carries copies on the host.

For checks of numbers only: each message waits for the device and is copied twice.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

NAME = "staged"

# torch's name of each method: gloo's. torch 2.13 renamed those that end in "single".
_METHODS = {
    name: name
    for name in (
        *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "allgather_coalesced", "gather"),
        *("_allgather_base", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "scatter"),
        *("send", "recv"),
    )
} | {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def register_staged_groups(devices: list[str]) -> None:
    """Make "staged" a backend of torch.distributed for tensors of these types of devices."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch's flight recorder takes no group written in Python
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StagedProcessGroup, devices=devices)


class StagedWork(dist._Work):
    """A message under way on the host; `wait` copies what came back to the device."""

    def __init__(self, work: dist.Work, copies: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._copies = work, copies

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message, and for its copy to the device to be queued."""
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        for tensor, host in self._copies:
            tensor.copy_(host)
        self._copies = []
        return bool(done)

    def is_completed(self) -> bool:
        """Whether the message has arrived on the host."""
        return bool(self._work.is_completed())


class StagedProcessGroup(dist.ProcessGroup):
    """A process group of the backend "staged"; torch passes these arguments to a backend."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the backend in `torch.distributed`."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        """The name of the group in compiled graphs."""
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda")]

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the group."""
        return self._gloo.barrier()


def _staged(name: str) -> Callable[..., StagedWork]:
    def carry(self: StagedProcessGroup, *args: Any, **kwargs: Any) -> StagedWork:
        copies: list[tuple[Tensor, Tensor]] = []

        def to_host(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            copies.append((value, value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)))
            return copies[-1][1]

        args, kwargs = tree_map(to_host, (args, kwargs))
        return StagedWork(getattr(self._gloo, name)(*args, **kwargs), copies if name != "send" else [])

    return carry


for _name, _name_of_gloo in _METHODS.items():
    setattr(StagedProcessGroup, _name, _staged(_name_of_gloo))
