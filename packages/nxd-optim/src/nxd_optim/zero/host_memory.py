"""Host memory for what ZeRO keeps there, and copies that run beside the device's computation.

Ren et al. 2021, "ZeRO-Offload". On a device with streams the memory is pinned, and copies have a stream of their own;
on others a copy has ended when the call returns.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from nxd_state import has_streams
from torch import Tensor

from nxd_optim.elementwise import for_the_cpu


def host_memory(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized 1-d tensor in host memory that a device can read and write."""
    return torch.empty(length, dtype=dtype, device="cpu", pin_memory=has_streams(device))


def copy_on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a device's 1-d tensor in host memory that the device can read."""
    return host_memory(tensor.numel(), dtype, tensor.device).copy_(tensor)


class HostSum:
    """A sum in host memory of a device's 1-d tensors, which arrive while the device computes on.

    Args:
        length: length of the tensors.
        dtype: their dtype.
        device: the device.
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._total = host_memory(length, dtype, device)
        self._further: Tensor | None = None  # memory of a tensor that arrives to be added
        self._finish: Callable[[], Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the host memory."""
        return sum(it.nbytes for it in (self._total, self._further) if it is not None)

    def start_adding(self, tensor: Tensor, *, is_first: bool) -> Tensor:
        """Start adding a tensor, or start the sum with it; returns the sum, which is complete after `wait`."""
        self.wait()
        if is_first:
            self._finish = _start_copy(tensor, self._total)
            return self._total
        if self._further is None:
            self._further = host_memory(len(self._total), self._total.dtype, self._device)
        total, further, arrive = self._total, self._further, _start_copy(tensor, self._further)

        def add() -> None:
            arrive()
            total.add_(further)

        self._finish = add
        return self._total

    def wait(self) -> None:
        """Return when all tensors have arrived and are added."""
        if self._finish is not None:
            self._finish()
            self._finish = None


def beside_computation(device: torch.device) -> AbstractContextManager[Any]:
    """Queue what the block does on a device beside its computation, after what is queued there so far."""
    if not has_streams(device):
        return nullcontext()
    stream = _copy_stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


def record_copies(device: torch.device) -> torch.Event | None:
    """Return an event after all that was queued by `beside_computation`; None where nothing is queued."""
    return _copy_stream(device).record_event() if has_streams(device) else None


@contextmanager
def on_device(tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Inside the block a tensor is on a device, where its group's ranks can exchange it; it is then copied back."""
    there = tensor.to(device)
    yield there
    if there is not tensor:
        tensor.copy_(there)


def settings_on_host(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's settings for weights on the host: torch's fused kernel, and nothing on the device."""
    changed = {**settings, **for_the_cpu(settings)}
    if "capturable" in changed:
        changed["capturable"] = False
    if "fused" in changed and not changed.get("foreach") and not changed.get("differentiable"):
        changed["fused"] = True
    return changed


def _start_copy(source: Tensor, target: Tensor) -> Callable[[], None]:
    """Start copying a device's tensor to host memory; returns a function that waits for the copy."""
    with beside_computation(source.device):
        target.copy_(source, non_blocking=True)
        copied = record_copies(source.device)
    if copied is None:
        return lambda: None
    source.record_stream(_copy_stream(source.device))  # its memory must not be used again before
    return copied.synchronize


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
