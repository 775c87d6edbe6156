"""A process group written in Python, behind which gloo carries the messages of tensors on another device."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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


class GlooProcessGroup(dist.ProcessGroup):
    """Replaces all backends of a group; torch passes these arguments to a backend.

    Attributes:
        backend_name: its name in `torch.distributed`; a subclass sets it.
        device_kinds: the types of devices whose tensors it takes; a subclass sets them.
        gloo: the group on the host that carries the messages.
    """

    backend_name = ""
    device_kinds: tuple[str, ...] = ()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def carry(self, method: str, args: Any, kwargs: Any) -> Any:
        """Call a method of gloo with tensors of the host in place of these, and return its work."""
        raise NotImplementedError

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the backend in `torch.distributed`."""
        return self.backend_name

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
        return [torch.device(kind) for kind in self.device_kinds]

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the group."""
        return self.gloo.barrier()


def _carried(method: str) -> Callable[..., Any]:
    def call(self: GlooProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self.carry(method, args, kwargs)

    return call


for _name, _name_of_gloo in _METHODS.items():
    setattr(GlooProcessGroup, _name, _carried(_name_of_gloo))
