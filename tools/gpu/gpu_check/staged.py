"""Process groups of several ranks on one GPU: NCCL refuses two ranks on a device, so gloo carries copies on the host.

For checks of numbers only: each message waits for the device and is copied twice.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nxd_testing.gloo_group import GlooProcessGroup
from torch import Tensor
from torch.utils._pytree import tree_map

NAME = "staged"


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


class StagedProcessGroup(GlooProcessGroup):
    """A process group of the backend "staged"."""

    backend_name = NAME
    device_kinds = ("cpu", "cuda")

    def carry(self, method: str, args: Any, kwargs: Any) -> StagedWork:
        """Let gloo work on copies, which come back when the work is waited for."""
        copies: list[tuple[Tensor, Tensor]] = []

        def to_host(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            copies.append((value, value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)))
            return copies[-1][1]

        args, kwargs = tree_map(to_host, (args, kwargs))
        return StagedWork(getattr(self.gloo, method)(*args, **kwargs), copies if method != "send" else [])
