"""Copies between the host and the device for which the host does not wait: batches on their way there, losses back.

On XLA both are asynchronous by themselves. On devices with streams they need pinned host memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nxd_state.device import has_streams


def send_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`, which need not have arrived yet; on the CPU the tensor itself.

    On XLA it is data from the beginning and no part of the graph under way, so that another thread may call this.
    """
    pinned = tensor.pin_memory() if has_streams(device) else tensor
    return pinned.to(device, non_blocking=True)


def read_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Ask for a tensor's values before the device has computed them, so that it can be given more work meanwhile.

    Args:
        tensor: on XLA part of a step that has ended, see `step_boundary`.

    Returns:
        What waits for the values, and for no later work: a CPU tensor.
    """
    if not has_streams(tensor):
        return tensor.detach().cpu
    values = tensor.detach().to("cpu", non_blocking=True)  # queued on the device before any later work
    copied = torch.Event(tensor.device)
    copied.record(torch.accelerator.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return values

    return wait
