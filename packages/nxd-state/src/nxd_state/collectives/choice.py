"""Chooses the transport that carries a tensor within its group, for all collectives and messages."""

import functools

import torch
from torch import Tensor

from nxd_state.collectives.c10d import C10dTransport
from nxd_state.collectives.functional import FunctionalTransport
from nxd_state.collectives.transport import MessageTransport, Transport
from nxd_state.collectives.xla import XlaTransport
from nxd_state.device import is_lazy_device
from nxd_state.group import Group
from nxd_state.shared_memory import SharedMemoryTransport

# A transport other than shared memory holds nothing but its group. It is made when it is asked for: one that the group
# kept would keep the group, in a circle, and with it the connections of its process group.


def transport_of(tensor: Tensor, group: Group) -> Transport:
    """The tensor's transport: functional collectives while torch is recording a graph, else `eager_transport_of`."""
    if torch.compiler.is_compiling():
        return FunctionalTransport(group)
    return eager_transport_of(tensor, group)


def eager_transport_of(tensor: Tensor, group: Group) -> MessageTransport:
    """The tensor's transport outside of recorded graphs; messages are never part of a graph that torch compiles."""
    memory = shared_memory_of(tensor, group)
    if memory is not None:
        return memory
    return XlaTransport(group) if is_lazy_device(tensor) else C10dTransport(group)


def host_transport_of(group: Group) -> SharedMemoryTransport | C10dTransport:
    """The transport of objects and barriers, whatever the device."""
    return C10dTransport(group) if group.shared_memory is None else group.shared_memory


def shared_memory_of(tensor: Tensor, group: Group) -> SharedMemoryTransport | None:
    """The group's shared memory, if it can carry the tensor."""
    memory = group.shared_memory
    if memory is None or not tensor.is_cpu or not _has_memory(type(tensor)):
        return None
    return memory


@functools.cache
def _has_memory(kind: type[Tensor]) -> bool:
    """Whether tensors of that class have memory of their own; fake tensors, for example, have none."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def shared_memory_bytes(group: Group) -> int:
    """The most memory that all ranks of the group together can ever share; 0 if they share none.

    It is allocated page by page on first use, and freed with the group.
    """
    return 0 if group.shared_memory is None else group.shared_memory.bytes
