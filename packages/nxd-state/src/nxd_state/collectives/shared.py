"""Which tensors of a group go through shared memory, and handles of what is under way there."""

import functools

from torch import Tensor

from nxd_state.collectives.c10d import Pending
from nxd_state.group import Group
from nxd_state.shared_memory import Transport
from nxd_state.shared_memory.progress import Operation


def shared_memory_of(tensor: Tensor, group: Group) -> Transport | None:
    """What carries the tensor within its group, if not torch.distributed."""
    memory = group.shared_memory
    if memory is None or not tensor.is_cpu or not _has_memory(type(tensor)):
        return None
    return memory


@functools.cache
def _has_memory(kind: type[Tensor]) -> bool:
    """Whether tensors of that class are what they seem; fake tensors, for one, are not."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def pending_of(tensor: Tensor, operation: Operation) -> Pending:
    """The handle of an operation; `tensor` is kept until it is done."""
    return Pending(tensor, operation, lambda _: operation.wait())


def shared_memory_bytes(group: Group) -> int:
    """The most memory that the ranks of the group can ever share, all of them together; 0 where they share none.

    It is taken page by page when it is first used, and given back with the group.
    """
    return 0 if group.shared_memory is None else group.shared_memory.bytes
