"""The collectives of compiled and exported graphs, for groups that share memory.

The graphs still contain torch's functional collectives, which name a group, so other compilers understand them. On the
CPU these operators get a kernel that looks the group up. If the group shares memory, the collective runs through it,
and there is nothing left to wait for; otherwise torch's own kernel runs. Torch's kernel also runs for an all-to-all,
whose parts may be of any size, and for reductions that `nxd_state.collectives` lacks.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from nxd_state.shared_memory.reduction import REDUCTIONS
from nxd_state.shared_memory.transport import SharedMemoryTransport

_NAMESPACE = "_c10d_functional"
_Kernel = Callable[..., Any]  # gives a tensor

_transports: dict[str, tuple[SharedMemoryTransport, dist.ProcessGroup]] = {}
_libraries: list[torch.library.Library] = []  # kernels live as long as their library


def serve_graphs(transport: SharedMemoryTransport, process_group: dist.ProcessGroup) -> None:
    """Let graphs that name this process group use its memory, until it is destroyed."""
    for name in [name for name in _transports if not _is_live(*_transports[name])]:
        del _transports[name]
    _transports[process_group.group_name] = transport, process_group
    if not _libraries:
        _install()


def _install() -> None:
    library = torch.library.Library(_NAMESPACE, "IMPL")
    for operator, kernel in _KERNELS.items():
        library.impl(operator, functools.partial(_dispatch, kernel, _torch_kernel(operator)), "CPU")
    _libraries.append(library)


def _dispatch(kernel: _Kernel, torch_kernel: _Kernel, tensor: Tensor, *arguments: Any) -> Any:
    *others, name = arguments
    transport, process_group = _transports.get(getattr(name, "group_name", name), (None, None))
    if transport is None or process_group is None or not _is_live(transport, process_group):
        return torch_kernel(tensor, *arguments)
    if isinstance(others[0], str) and others[0] not in REDUCTIONS:
        return torch_kernel(tensor, *arguments)
    return kernel(transport, tensor, *others)


def _is_live(transport: SharedMemoryTransport, process_group: dist.ProcessGroup) -> bool:
    """Names are given again once a group is destroyed."""
    return transport.is_open and process_group in _world.pg_names


def _torch_kernel(operator: str) -> _Kernel:
    overload = getattr(torch.ops, _NAMESPACE).__getattr__(operator).default
    return functools.partial(overload._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)


_KERNELS: dict[str, _Kernel] = {
    "all_reduce": lambda transport, tensor, op: transport.all_reduce(tensor, op),
    "all_reduce_": lambda transport, tensor, op: transport.all_reduce_(tensor, op),
    "all_gather_into_tensor": lambda transport, tensor, group_size: transport.all_gather(tensor, 0),
    "reduce_scatter_tensor": lambda transport, tensor, op, group_size: transport.reduce_scatter(tensor, 0, op),
    "broadcast": lambda transport, tensor, source: transport.broadcast(tensor, source),
    "broadcast_": lambda transport, tensor, source: tensor.copy_(transport.broadcast(tensor, source)),
}
