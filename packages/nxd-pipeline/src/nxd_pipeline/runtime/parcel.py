"""How the tensors of one message travel: small ones together in one buffer, large ones as they are.

A transport takes its time per message, some tens of microseconds; below a certain size a copy is faster than that.
Both ends know the layouts, and so what comes in which buffer. On XLA all travel as they are: there is no memory there
in which tensors of several dtypes could lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_pipeline.runtime.layout import TensorLayout

SMALL = 64 * 1024  # bytes of a tensor that is copied into a common buffer
_ALIGNMENT = 16  # bytes; a view of another dtype has to start at a multiple of its size


@dataclass(frozen=True)
class _Place:
    index: int  # of the tensor
    start: int  # in the buffer, in bytes
    end: int


@dataclass(frozen=True)
class Parcel:
    """Which tensors of given layouts travel by themselves, and where in the common buffer the others lie.

    Attributes:
        layouts: of all the tensors.
        alone: the indices of those that travel by themselves; tensors without elements do not travel.
        together: those in the buffer.
        buffer_bytes: its size.
    """

    layouts: tuple[TensorLayout, ...]
    alone: tuple[int, ...]
    together: tuple[_Place, ...]
    buffer_bytes: int

    @classmethod
    def of(cls, layouts: Sequence[TensorLayout]) -> "Parcel":
        """The parcel of tensors of these layouts."""
        sizes = {index: layout.num_bytes for index, layout in enumerate(layouts) if layout.num_bytes}
        small = [index for index, size in sizes.items() if size <= SMALL and layouts[index].device_type != "xla"]
        if len(small) == 1 or len({layouts[index].device_type for index in small}) > 1:
            small = []
        together: list[_Place] = []
        start = 0
        for index in small:
            together.append(_Place(index, start, start + sizes[index]))
            start += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
        alone = tuple(index for index in sizes if index not in small)
        return cls(tuple(layouts), alone, tuple(together), start)

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What to send for these tensors."""
        packed = [tensors[index].detach() for index in self.alone]
        if self.together:
            buffer = self._buffer()
            for place in self.together:
                self._view(buffer, place).copy_(tensors[place.index].detach())
            packed.append(buffer)
        return packed

    def make_room(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors to receive what `pack` gives, and the tensors that it was made of, in the same memory."""
        in_buffer = {place.index for place in self.together}
        tensors = [
            torch.empty(0 if index in in_buffer else layout.shape, dtype=layout.dtype, device=layout.device_type)
            for index, layout in enumerate(self.layouts)
        ]
        packed = [tensors[index] for index in self.alone]
        if self.together:
            buffer = self._buffer()
            packed.append(buffer)
            for place in self.together:  # by `data`, autograd does not take a change of one for a change of all
                tensors[place.index] = self._view(buffer, place).data
        return packed, tensors

    def _buffer(self) -> Tensor:
        device = self.layouts[self.together[0].index].device_type
        return torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)

    def _view(self, buffer: Tensor, place: _Place) -> Tensor:
        layout = self.layouts[place.index]
        return buffer[place.start : place.end].view(layout.dtype).view(layout.shape)
