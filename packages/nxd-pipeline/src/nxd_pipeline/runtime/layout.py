"""The layout of a value: its structure with shapes and dtypes in the place of tensors, which can be sent ahead."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class TensorLayout:
    """What must be known of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLayout":
        """The layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device.type)

    def empty(self) -> Tensor:
        """A contiguous tensor on this process's device of that type, to receive into; its elements are not set."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


def layout_of(value: Any) -> Any:
    """The value with a `TensorLayout` for each tensor; equal for values that can be received alike."""
    return tree_map(lambda leaf: TensorLayout.of(leaf) if isinstance(leaf, Tensor) else leaf, value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, in the order of its structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def differentiable(value: Any) -> list[Tensor]:
    """Those tensors of a value whose gradient is asked for."""
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]


def tensor_layouts(layout: Any) -> list[TensorLayout]:
    """The tensors' layouts, in the same order."""
    return [leaf for leaf in tree_leaves(layout) if isinstance(leaf, TensorLayout)]


def fill(layout: Any, tensors: Iterable[Tensor]) -> Any:
    """The value of this layout that holds these tensors, as leaves of a graph of their own."""
    given = iter(tensors)
    return tree_map(
        lambda leaf: (
            next(given).detach().requires_grad_(leaf.needs_gradient) if isinstance(leaf, TensorLayout) else leaf
        ),
        layout,
    )
