"""The collectives of some code, counted, and the bytes that each rank must send for them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# How often each rank sends its (size - 1)/size of the whole tensor: an all-reduce scatters it and gathers it again.
# gloo's reduce-scatter is an exchange of parts.
_PASSES = {
    "c10d.allreduce_": ("all-reduce", 2),
    "c10d._allgather_base_": ("all-gather", 1),
    "c10d._reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d.alltoall_base_": ("reduce-scatter", 1),
    "_c10d_functional.all_reduce": ("all-reduce", 2),
    "_c10d_functional.all_gather_into_tensor": ("all-gather", 1),
    "_c10d_functional.reduce_scatter_tensor": ("reduce-scatter", 1),
}


class CollectiveTraffic(TorchDispatchMode):
    """Inside, counts collectives of groups of one size.

    Args:
        group_size: of each collective's group.

    Attributes:
        number: of collectives, by kind.
        bytes_sent: by each rank, with algorithms that send no more than they must.
    """

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.bytes_sent = 0
        self._group_size = group_size

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if str(func.overloadpacket) in _PASSES:
            kind, passes = _PASSES[str(func.overloadpacket)]
            whole = max(leaf.nbytes for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor))
            self.number[kind] += 1
            self.bytes_sent += passes * whole * (self._group_size - 1) // self._group_size
        return result
