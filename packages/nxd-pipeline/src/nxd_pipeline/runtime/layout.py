"""The layout of a value: its structure, with shapes and dtypes instead of tensors. It can be sent ahead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class TensorLayout:
    """The metadata needed to receive a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLayout":
        """The layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device.type)

    @cached_property
    def num_bytes(self) -> int:
        """Size of the elements."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ValueLayout:
    """A value's structure and what is at its leaves: a `TensorLayout` for each tensor, else the leaf itself."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @cached_property
    def tensors(self) -> tuple[TensorLayout, ...]:
        """Those of the tensors, in the order of the structure."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorLayout))

    @cached_property
    def gradients(self) -> tuple[TensorLayout, ...]:
        """Those of the tensors whose gradient goes back."""
        return tuple(tensor for tensor in self.tensors if tensor.needs_gradient)

    def fill(self, tensors: Iterable[Any]) -> Any:
        """The value of this layout with these tensors in the place of its own."""
        given = iter(tensors)
        return tree_unflatten(
            [next(given) if isinstance(leaf, TensorLayout) else leaf for leaf in self.leaves], self.structure
        )

    def described(self) -> str:
        """The value with layouts in the place of tensors, for error messages."""
        return repr(self.fill(self.tensors))

    def allows(self, other: "ValueLayout") -> bool:
        """Whether a receiver of this layout can take the other: equal, except for gradients made but not needed."""
        if self.structure != other.structure or len(self.leaves) != len(other.leaves):
            return False
        return all(_allows(mine, theirs) for mine, theirs in zip(self.leaves, other.leaves, strict=True))


def describe_value(value: Any) -> tuple[ValueLayout, list[Tensor]]:
    """The layout of a value, and its tensors in the order of its structure."""
    leaves, structure = tree_flatten(value)
    layouts = tuple(TensorLayout.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return ValueLayout(structure, layouts), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _Entry(torch.autograd.Function):
    """The identity between a leaf and those who use it: a leaf that needs gradients cannot be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def behind(leaf: Tensor) -> Tensor:
    """The tensor by which a graph begins at the leaf, in the same memory; it may be changed in place."""
    return _Entry.apply(leaf) if leaf.requires_grad else leaf


def leaves_of_a_graph(layouts: Sequence[TensorLayout], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors without their history, as leaves that collect the gradients that the layouts ask for."""
    return [
        tensor.detach().requires_grad_(layout.needs_gradient) for layout, tensor in zip(layouts, tensors, strict=True)
    ]


def _allows(mine: Any, other: Any) -> bool:
    if isinstance(mine, TensorLayout) and isinstance(other, TensorLayout):
        same = (mine.shape, mine.dtype, mine.device_type) == (other.shape, other.dtype, other.device_type)
        return same and (mine.needs_gradient or not other.needs_gradient)
    return bool(mine == other)
