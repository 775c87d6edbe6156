"""Messages between the stages of different ranks: tensors without blocking, and layouts ahead of them when new.

Both ends of a message come to it in one order (see `nxd_pipeline.schedules.insert_communication`), so messages
between two ranks need no labels.
"""

import pickle
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from nxd_state import Group, get_device, recv
from torch import Tensor

from nxd_pipeline.runtime.layout import TensorLayout, fill, layout_of, tensor_layouts, tensors_of

# A send that is this many messages old has been received, or soon will be; waiting for it bounds the memory it holds.
SENDS_UNDER_WAY = 8


class Incoming:
    """Tensors on their way to this rank."""

    def __init__(self, tensors: list[Tensor], works: list[dist.Work], layout: Any = None) -> None:
        self._tensors = tensors
        self._works = works
        self._layout = layout

    def tensors(self) -> list[Tensor]:
        """The tensors, once they are here."""
        for work in self._works:
            work.wait()
        self._works = []
        return self._tensors

    def value(self) -> Any:
        """The value that they make, once they are here: with leaf tensors that collect gradients."""
        return fill(self._layout, self.tensors())


class Mailbox:
    """Sends and receives over a pipeline-parallel group.

    Layouts are kept for each `key`: the two ends know from the key, without a message, whether the layout is known.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._device = message_device(group)  # of layouts; other tensors stay where they are
        self._sent_layouts: dict[Hashable, Any] = {}
        self._received_layouts: dict[Hashable, Any] = {}
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send_value(self, value: Any, destination: int, key: Hashable) -> None:
        """Send a value of any structure; its layout, too, the first time for this key.

        Raises:
            RuntimeError: the layout differs from that sent for this key before.
        """
        layout = layout_of(value)
        known = self._sent_layouts.setdefault(key, layout)
        if known is layout:
            data = torch.frombuffer(bytearray(pickle.dumps(layout)), dtype=torch.uint8)
            self._send(torch.tensor([data.numel()], device=self._device), destination)
            self._send(data.to(self._device), destination)
        elif known != layout:
            raise RuntimeError(
                f"a stage returned {layout} where it returned {known} before, for inputs of the same shapes; the "
                "stages after it expect the same. Make shapes, dtypes and plain Python values between stages depend "
                "on the shapes of the inputs only, and freeze parameters before the pipeline is made"
            )
        self.send_tensors(tensors_of(value), destination)

    def receive_value(self, source: int, key: Hashable) -> Incoming:
        """Begin to receive what `send_value` sends for the same key."""
        if key not in self._received_layouts:
            length = self._receive_now(torch.empty(1, dtype=torch.int64, device=self._device), source)
            data = self._receive_now(torch.empty(int(length), dtype=torch.uint8, device=self._device), source)
            self._received_layouts[key] = pickle.loads(bytes(data.tolist()))
        layout = self._received_layouts[key]
        return Incoming(*self._begin_to_receive(tensor_layouts(layout), source), layout)

    def send_tensors(self, tensors: Sequence[Tensor], destination: int) -> None:
        """Begin to send tensors whose layouts the receiver knows."""
        for tensor in tensors:
            self._send(tensor, destination)

    def receive_tensors(self, layouts: Sequence[TensorLayout], source: int) -> Incoming:
        """Begin to receive tensors of these layouts."""
        return Incoming(*self._begin_to_receive(layouts, source))

    def finish(self) -> None:
        """Return once everything sent has left."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _send(self, tensor: Tensor, destination: int) -> None:
        if not tensor.numel():
            return
        sent = _as_bytes(tensor)
        work = dist.isend(sent, dst=self._group.ranks[destination], group=self._group.process_group)
        self._sends.append((_work(work), sent))
        while len(self._sends) > SENDS_UNDER_WAY:
            self._sends.popleft()[0].wait()

    def _begin_to_receive(self, layouts: Sequence[TensorLayout], source: int) -> tuple[list[Tensor], list[dist.Work]]:
        tensors = [layout.empty() for layout in layouts]
        works = [
            _work(dist.irecv(_as_bytes(tensor), src=self._group.ranks[source], group=self._group.process_group))
            for tensor in tensors
            if tensor.numel()
        ]
        return tensors, works

    def _receive_now(self, tensor: Tensor, source: int) -> Tensor:
        return recv(tensor, self._group, source=source)


def message_device(group: Group) -> torch.device:
    """The device of the small tensors that a group exchanges beside those of the model."""
    if group.size == 1 or dist.get_backend(group.process_group) == "gloo":
        return torch.device("cpu")
    return get_device()


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError(
            "this rank is not in the pipeline-parallel group it was given; make the pipeline on its ranks"
        )
    return work


def _as_bytes(tensor: Tensor) -> Tensor:
    """The elements as a flat tensor of bytes, in the same memory where the tensor is contiguous."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
