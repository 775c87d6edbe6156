"""Results of operations on tensors without memory, worked out once for each kind of inputs.

torch works out in Python what such an operation returns, which takes longer than everything else about it; and a plan
runs the same layers many times.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves


class _Made(NamedTuple):
    """A tensor that an operation has made."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> "_Made":
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Outcomes:
    """What operations on the meta device return; called in place of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Made | tuple[_Made, ...]] = {}

    def of(self, func: OpOverload) -> Callable[..., Any]:
        """The operation, which is run only for inputs that it has not had yet, if all that it does is make tensors."""
        if func.namespace != "aten" or func.is_view or func._schema.is_mutable:
            return func

        def outcome(*args: Any, **kwargs: Any) -> Any:
            key = (func, _described(args), _described(kwargs))
            known = self._known.get(key)
            if known is None:
                result = func(*args, **kwargs)
                if _is_new(result, (args, kwargs)):
                    alone = isinstance(result, Tensor)
                    self._known[key] = _Made.like(result) if alone else tuple(map(_Made.like, result))
                return result
            return known.again() if isinstance(known, _Made) else tuple(made.again() for made in known)

        return outcome


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _Made.like(value), value.device
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_described, value))
    if isinstance(value, Mapping):
        return tuple((name, _described(it)) for name, it in value.items())
    return type(value), value  # 1 and 1.0 give tensors of other types


def _is_new(result: Any, given: Any) -> bool:
    """Whether a result is tensors on the meta device, each with memory of its own."""
    made = [result] if isinstance(result, Tensor) else result
    if not isinstance(made, (list, tuple)) or not all(isinstance(it, Tensor) and it.is_meta for it in made):
        return False
    storages = [it.untyped_storage()._cdata for it in [*made, *tree_leaves(given)] if isinstance(it, Tensor)]
    own = storages[: len(made)]
    return len(set(own)) == len(own) and not set(own) & set(storages[len(made) :])
