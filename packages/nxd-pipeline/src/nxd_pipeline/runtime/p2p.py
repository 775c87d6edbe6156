"""Messages between the stages of different ranks: non-blocking, and preceded by their layouts when these are new.

The layout of a value is its structure, with shapes and dtypes in place of tensors.

Both ends of a message reach it in one order (see `nxd_pipeline.schedules.insert_communication`, and for XLA, where
messages block, `insert_blocking_communication`), so messages between two ranks need no labels.

Small tensors of one message are sent together in one buffer, large ones separately: a transport has an overhead of some
tens of microseconds per message, and below a certain size a copy is faster. Both ends know the layouts, and so the
contents of each buffer. On XLA all tensors are sent separately: a buffer there cannot hold tensors of several dtypes.
"""

import io
import pickle
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from nxd_state import (
    Group,
    Pending,
    Receive,
    Send,
    barrier,
    batch_isend_irecv,
    is_cpu,
    is_lazy_device,
    recv,
    send,
    step_boundary,
    transport_device,
)
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class TensorLayout:
    """The metadata needed to receive a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    device_type: str

    @cached_property
    def num_bytes(self) -> int:
        """Size of the elements."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ValueLayout:
    """A value's structure and its leaves, with a `TensorLayout` in place of each tensor."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @cached_property
    def tensors(self) -> tuple[TensorLayout, ...]:
        """Layouts of the tensors, in the order of the structure."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorLayout))

    @cached_property
    def gradients(self) -> tuple[TensorLayout, ...]:
        """Layouts of the tensors whose gradients are sent back."""
        return tuple(tensor for tensor in self.tensors if tensor.needs_gradient)

    def fill(self, tensors: Iterable[Any]) -> Any:
        """Return a value of this layout with these tensors."""
        given = iter(tensors)
        return tree_unflatten(
            [next(given) if isinstance(leaf, TensorLayout) else leaf for leaf in self.leaves], self.structure
        )

    def described(self) -> str:
        """Return the value with layouts in place of tensors, for error messages."""
        return repr(self.fill(self.tensors))

    def allows(self, other: "ValueLayout") -> bool:
        """Whether a receiver of this layout accepts the other: equal, except for gradients that are not needed."""
        if self.structure != other.structure or len(self.leaves) != len(other.leaves):
            return False
        return all(_allows(mine, theirs) for mine, theirs in zip(self.leaves, other.leaves, strict=True))


def describe_value(value: Any) -> tuple[ValueLayout, list[Tensor]]:
    """Return the layout of a value, and its tensors in the order of its structure."""
    leaves, structure = tree_flatten(value)
    layouts = tuple(
        TensorLayout(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.device.type)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    )
    return ValueLayout(structure, layouts), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _Identity(torch.autograd.Function):
    """The identity after a leaf: a leaf that needs gradients cannot be changed in place, but the result can."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def after_leaf(leaf: Tensor) -> Tensor:
    """Return the leaf's values for use in a graph, in the same memory; they may be changed in place."""
    return _Identity.apply(leaf) if leaf.requires_grad else leaf


def detached_leaves(layouts: Sequence[TensorLayout], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors without history, as leaves that collect the gradients that their layouts require."""
    return [
        tensor.detach().requires_grad_(layout.needs_gradient) for layout, tensor in zip(layouts, tensors, strict=True)
    ]


def _allows(mine: Any, other: Any) -> bool:
    if isinstance(mine, TensorLayout) and isinstance(other, TensorLayout):
        same = (mine.shape, mine.dtype, mine.device_type) == (other.shape, other.dtype, other.device_type)
        return same and (mine.needs_gradient or not other.needs_gradient)
    return bool(mine == other)


SMALL = 64 * 1024  # bytes of a tensor that is copied into a common buffer
_ALIGNMENT = 16  # bytes; a view of another dtype has to start at a multiple of its size

# A send that is this many messages old has been received, or soon will be; waiting for it bounds the memory it holds.
SENDS_IN_FLIGHT = 4

# Layouts kept for a pair of stages; both ends drop the oldest at the same message. An input that counts steps in a
# Python number makes a new layout in each step.
LAYOUTS_KEPT = 1000

Key = tuple[int, int, Hashable]  # the producing stage, the consuming stage, and a key of the inputs' shapes


@dataclass(frozen=True)
class _BufferRange:
    tensor: int  # its index
    start: int  # in bytes
    end: int


@dataclass(frozen=True)
class Packing:
    """How tensors of given layouts are sent: large ones separately, small ones in a common buffer.

    Attributes:
        layouts: layouts of all tensors.
        alone: indices of the tensors that are sent separately; tensors without elements are not sent.
        together: ranges of the buffer, for the other tensors.
        buffer_bytes: size of the buffer.
    """

    layouts: tuple[TensorLayout, ...]
    alone: tuple[int, ...]
    together: tuple[_BufferRange, ...]
    buffer_bytes: int

    @classmethod
    def of(cls, layouts: Sequence[TensorLayout]) -> "Packing":
        """Return the packing of tensors of these layouts."""
        sizes = {index: layout.num_bytes for index, layout in enumerate(layouts) if layout.num_bytes}
        in_memory = [index for index in sizes if not is_lazy_device(layouts[index].device_type)]
        small = [index for index in in_memory if sizes[index] <= SMALL]
        if len(small) == 1 or len({layouts[index].device_type for index in small}) > 1:
            small = []
        together: list[_BufferRange] = []
        start = 0
        for index in small:
            together.append(_BufferRange(index, start, start + sizes[index]))
            start += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
        alone = tuple(index for index in sizes if index not in small)
        return cls(tuple(layouts), alone, tuple(together), start)

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the messages that carry these tensors."""
        packed = [tensors[index].detach() for index in self.alone]
        if self.together:
            buffer = self._buffer()
            for place in self.together:
                self._view(buffer, place).copy_(tensors[place.tensor].detach())
            packed.append(buffer)
        return packed

    def receive_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors to receive the result of `pack`, and the tensors that were packed, in the same memory."""
        in_buffer = {place.tensor for place in self.together}
        tensors = [
            torch.empty(0 if index in in_buffer else layout.shape, dtype=layout.dtype, device=layout.device_type)
            for index, layout in enumerate(self.layouts)
        ]
        packed = [tensors[index] for index in self.alone]
        if self.together:
            buffer = self._buffer()
            packed.append(buffer)
            for place in self.together:  # `data`: for autograd, changing one does not change all
                tensors[place.tensor] = self._view(buffer, place).data
        return packed, tensors

    def _buffer(self) -> Tensor:
        device = self.layouts[self.together[0].tensor].device_type
        return torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)

    def _view(self, buffer: Tensor, place: _BufferRange) -> Tensor:
        layout = self.layouts[place.tensor]
        return buffer[place.start : place.end].view(layout.dtype).view(layout.shape)


@dataclass(frozen=True)
class MessageFormat:
    """How values are sent from one stage to another for inputs of one shape; both ends know it.

    Attributes:
        layout: layout of the values.
        values: how the values are sent.
        gradients: how their gradients are sent back.
    """

    layout: ValueLayout
    values: Packing
    gradients: Packing


class P2PCommunicator:
    """Sends and receives over a pipeline-parallel group.

    Both ends know from the key of a value, without a message, whether its layout is known.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._device = transport_device(group)  # for layouts; other tensors stay on their device
        self._is_lazy_device = is_lazy_device()
        self._formats: dict[tuple[int, int], dict[Hashable, MessageFormat]] = {}
        self._sends: dict[tuple[Key, int, str], list[Pending[Tensor]]] = {}  # in the order in which they began
        if not is_cpu(self._device):
            barrier(group)  # nccl needs a call by all ranks of a group before it takes batches among some of them

    def send_value(self, value: Any, destination: int, key: Key, microbatch: int) -> tuple[ValueLayout, list[Tensor]]:
        """Begin to send a value of any structure; its layout goes ahead the first time for this key.

        Returns:
            The layout that the receiver expects, and the tensors.

        Raises:
            RuntimeError: the layout differs from that sent for this key before.
        """
        layout, tensors = describe_value(value)
        message_format = self._known(key)
        if message_format is None:
            self._send_now(layout, destination)
            message_format = self._learn(key, layout)
        elif not message_format.layout.allows(layout):
            raise RuntimeError(
                f"a stage returned {layout.described()} but {message_format.layout.described()} before, for "
                "inputs of the same shapes; the stages after it expect the same. Make shapes, dtypes and plain Python "
                "values between stages depend on the shapes of the inputs only; after unfreezing parameters, create "
                "the pipeline again"
            )
        self._send((key, microbatch, "value"), message_format.values.pack(tensors), destination)
        return message_format.layout, tensors

    def receive_value(self, source: int, key: Key) -> tuple[ValueLayout, Pending[list[Tensor]]]:
        """Begin to receive the value sent with the same key; returns its layout and its pending tensors."""
        message_format = self._known(key) or self._learn(key, self._receive_now(source))
        return message_format.layout, self._receive(message_format.values, source)

    def send_gradients(self, gradients: Sequence[Tensor], destination: int, key: Key, microbatch: int) -> None:
        """Begin to send the gradients of a value received with this key, for the tensors that need them."""
        message_format = self._formats[key[:2]][key[2]]
        self._send((key, microbatch, "gradient"), message_format.gradients.pack(gradients), destination)

    def receive_gradients(self, source: int, key: Key) -> Pending[list[Tensor]]:
        """Begin to receive the gradients of a value that was sent with this key."""
        message_format = self._formats[key[:2]][key[2]]
        return self._receive(message_format.gradients, source)

    def release(self, key: Key, microbatch: int) -> None:
        """Release the memory of a sent value, which has arrived because its gradient has come back."""
        for pending in self._sends.pop((key, microbatch, "value"), ()):
            pending.wait()

    def finish(self) -> None:
        """Return once all sends are complete."""
        while self._sends:
            self._wait_for_oldest()

    def forget_layouts(self) -> None:
        """Forget all layouts. Called by all ranks when the outputs of stages have changed."""
        self._formats.clear()

    def _known(self, key: Key) -> MessageFormat | None:
        return self._formats.get(key[:2], {}).get(key[2])

    def _learn(self, key: Key, layout: ValueLayout) -> MessageFormat:
        formats = self._formats.setdefault(key[:2], {})
        if len(formats) == LAYOUTS_KEPT:
            del formats[next(iter(formats))]
        formats[key[2]] = MessageFormat(layout, Packing.of(layout.tensors), Packing.of(layout.gradients))
        return formats[key[2]]

    def _send(self, label: tuple[Key, int, str], tensors: Sequence[Tensor], destination: int) -> None:
        if tensors:
            self._sends[label] = batch_isend_irecv([Send(tensor, destination) for tensor in tensors], self._group)
            if len(self._sends) > SENDS_IN_FLIGHT:
                self._wait_for_oldest()

    def _receive(self, packing: Packing, source: int) -> Pending[list[Tensor]]:
        if self._is_lazy_device:
            step_boundary()  # ends the graph, so that it is the same with and without this receive
        packed, tensors = packing.receive_buffers()
        pending = batch_isend_irecv([Receive(tensor, source) for tensor in packed], self._group)
        return Pending(tensors, *pending)

    def _wait_for_oldest(self) -> None:
        for pending in self._sends.pop(next(iter(self._sends))):
            pending.wait()

    def _send_now(self, layout: ValueLayout, destination: int) -> None:
        data = torch.frombuffer(bytearray(_pickled(layout)), dtype=torch.uint8)
        send(torch.tensor([data.numel()], device=self._device), self._group, destination=destination)
        send(data.to(self._device), self._group, destination=destination)

    def _receive_now(self, source: int) -> ValueLayout:
        length = recv(torch.empty(1, dtype=torch.int64, device=self._device), self._group, source=source)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        leaves, structure = tree_flatten(pickle.loads(bytes(recv(data, self._group, source=source).tolist())))
        return ValueLayout(structure, tuple(leaves))


def _pickled(layout: ValueLayout) -> bytes:
    data = io.BytesIO()
    _WithoutTensors(data, layout).dump(layout.fill(layout.tensors))
    return data.getvalue()


class _WithoutTensors(pickle.Pickler):
    """Rejects tensors inside unknown classes, which would be sent with the layout: once and without gradients."""

    def __init__(self, file: io.BytesIO, layout: ValueLayout) -> None:
        super().__init__(file)
        self._layout = layout

    def persistent_id(self, obj: Any) -> None:
        """Raise a TypeError for a tensor; everything else is pickled as usual."""
        if isinstance(obj, Tensor):
            raise TypeError(
                f"a stage returned {self._layout.described()}, with a tensor inside an unknown class; "
                "return tensors in tuples, lists and dicts, or register its class, see "
                "torch.utils._pytree.register_pytree_node or, for a dataclass, register_dataclass"
            )
