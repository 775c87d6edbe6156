"""The buffers of a module as a forward found them, for the forward that computes it again.

A forward may change buffers: running statistics, counters, codebooks. The second one has to begin with what the first
one began with, and to leave what the first one left. Buffers are exchanged, not written to: backward may have saved
their tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

_LARGEST_COPY = 2**18  # elements; a larger buffer, such as a mask or a quantized weight, is taken to stay as it is


class BufferState:
    """The buffers below a module, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        copies: dict[int, Tensor] = {}  # a buffer that modules share is copied once
        self._buffers = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
        self._versions: list[tuple[nn.Module, str, Tensor, int]] = []
        for part, buffers in self._buffers:
            for name, buffer in buffers.items():
                if buffer is None:
                    continue
                if buffer.numel() <= _LARGEST_COPY and not buffer.requires_grad:
                    buffers[name] = copies.setdefault(id(buffer), buffer.clone())
                else:
                    self._versions.append((part, name, buffer, buffer._version))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, modules have copies of these buffers; afterwards those that they had before.

        Raises:
            RuntimeError: a buffer has changed that is too large to be copied.
        """
        for part, name, buffer, version in self._versions:
            if part._buffers.get(name) is not buffer or buffer._version != version:
                raise RuntimeError(
                    f"buffer {name!r} of a {type(part).__name__}, {tuple(buffer.shape)}, has changed since the forward "
                    "that activation checkpointing recomputes; exclude the module from checkpointing (buffers of "
                    f"up to {_LARGEST_COPY} elements may change)"
                )
        copies: dict[int, Tensor] = {}
        unchanged = {id(buffer) for _, _, buffer, _ in self._versions}
        changed = [(part, dict(part._buffers)) for part, _ in self._buffers]
        for part, buffers in self._buffers:
            part._buffers.update(
                {
                    name: it if it is None or id(it) in unchanged else copies.setdefault(id(it), it.clone())
                    for name, it in buffers.items()
                }
            )
        try:
            yield
        finally:
            for part, buffers in changed:
                part._buffers.clear()
                part._buffers.update(buffers)
