"""The bytes of the tensors that live, counted: the same number on every machine, whatever its allocator does."""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Inside, counts the memory of the tensors that operations make, until nobody holds them.

    Attributes:
        now: bytes that live.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        given = {_storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage_key(leaf) not in given | self._counted:
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage_key(tensor)
        self._counted.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
