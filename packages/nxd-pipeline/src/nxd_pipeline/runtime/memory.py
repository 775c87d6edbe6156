"""Measures the memory of a step: activations, gradients and messages, counted as they are created and freed."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StepMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are created in its body, on any device, until they are freed.

    `with StepMemory() as memory: model.run_train(...)` and then `memory.peak_bytes`. Tensors from before do not count;
    run a step first if gradients of parameters should not. Storages that grow or shrink (`resize_`), as those of
    sharded parameters do, count by the difference. It slows every operation down by microseconds.

    Attributes:
        held_bytes: bytes of the tensors that exist now.
        peak_bytes: maximum of `held_bytes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}  # bytes of storages, by address of the object behind them
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        # What changes a storage is no operation on tensors, which a dispatch mode sees.
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, size)
            self._add(storage._cdata, storage.nbytes() - before)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        entered: Self = super().__enter__()
        return entered

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {it.untyped_storage()._cdata for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._count(leaf)
        return result

    def _count(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = 0
        self._add(key, storage.nbytes())
        weakref.finalize(storage, self._forget, key)

    def _add(self, key: int, size: int) -> None:
        if key in self._known:
            self._known[key] += size
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _forget(self, key: int) -> None:
        self.held_bytes -= self._known.pop(key)
