"""The torch operations that a function runs on this rank, the dtypes that it sends, and what it reads of values."""

from collections.abc import Callable
from typing import Any

import nxd_state
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent_dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        if func._schema.name.startswith("c10d::"):
            self.sent_dtypes |= {it.dtype for it in tree_leaves(args) if isinstance(it, Tensor)}
        return func(*args, **(kwargs or {}))


def operations_of(fn: Callable[[], object]) -> list[str]:
    """Return the names of the operations of `fn()` in order, such as "aten::mm", "c10d::allreduce_" and "wait".

    Set `NXD_SHM=0`: collectives through shared memory are not torch operations.
    """
    original = nxd_state.Pending.wait

    def wait(pending: Any) -> Any:
        recorder.names.append("wait")
        return original(pending)

    nxd_state.Pending.wait = wait  # type: ignore[method-assign, assignment]
    try:
        with _Recorder() as recorder:
            fn()
    finally:
        nxd_state.Pending.wait = original  # type: ignore[method-assign]
    return recorder.names


def collectives_of(fn: Callable[[], object]) -> list[str]:
    """Return the collectives among `operations_of(fn)`."""
    return [name for name in operations_of(fn) if name.startswith("c10d::")]


def sent_dtypes_of(fn: Callable[[], object]) -> set[torch.dtype]:
    """Return the dtypes of all tensors that `fn()` sends."""
    with _Recorder() as recorder:
        fn()
    return recorder.sent_dtypes


# Functions that return values to the host, or tensors whose shapes depend on values.
_READS = {
    *(Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__),
    *(Tensor.__index__, Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere),
    *(Tensor.bincount, torch.bincount, Tensor.unique, torch.unique, Tensor.equal, torch.equal),
    *(Tensor.masked_select, torch.masked_select),
}


class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS or (func is Tensor.__getitem__ and _has_mask(args[1])):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    return any(isinstance(it, Tensor) and it.dtype == torch.bool for it in tree_leaves(index))


def reads_of(fn: Callable[[], object]) -> list[str]:
    """Return the names of the functions of `fn()`, in order, for which the host waits for the device of a tensor.

    Such are "tolist", "item" and "nonzero". They are counted on the CPU as well, where nothing waits; functions of C++
    that read values by themselves are not seen.
    """
    with _Reads() as reads:
        fn()
    return reads.names
