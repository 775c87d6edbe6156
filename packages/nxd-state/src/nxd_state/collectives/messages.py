"""What one rank sends to or receives from another of its `Group`."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Send:
    """`tensor` goes to the rank with index `destination` in the group."""

    tensor: Tensor
    destination: int


@dataclass(frozen=True, slots=True)
class Receive:
    """The rank with index `source` in the group sends what `tensor` (contiguous, of that shape and dtype) receives."""

    tensor: Tensor
    source: int
