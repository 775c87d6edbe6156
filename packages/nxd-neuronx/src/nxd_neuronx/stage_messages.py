"""Messages between neighbouring pipeline ranks, for scripts that move tensors or values between stages themselves.

The pipeline's runtime does not use them: `NxDPPModel` knows its own messages. Each message has its two ends called, in
the same order on both ranks.
"""

from typing import Any

import torch
from nxd_state import get_device, get_group
from nxd_state import recv as receive_into
from nxd_state import send as send_to
from torch import Tensor

from nxd_neuronx.serialization import TensorMeta, compress_to_string, uncompress_from_string

MAX_LENGTH = 2**20  # bytes of a Python object that stages send to each other
MAX_RETRY = 3  # of the old runtime's key-value store; messages here arrive or raise


def send(tensor: Tensor, send_next: bool = True, all_reduce_send_recv: bool = False) -> Tensor:
    """Send a tensor to the next rank of the pipeline, which calls `recv_from`.

    Args:
        tensor: any shape.
        send_next: to the next rank; else to the one before.
        all_reduce_send_recv: how the old runtime carried it; of no effect.

    Returns:
        The tensor.

    Raises:
        ValueError: the pipeline has one rank.
    """
    send_to(tensor.detach().contiguous(), get_group("pp"), destination=_neighbour(is_next=send_next))
    return tensor


def recv_from(
    tensor_meta: TensorMeta, recv_prev: bool = True, tracing: bool = False, all_reduce_send_recv: bool = False
) -> Tensor:
    """Receive a tensor that a neighbour in the pipeline gave to `send`.

    Args:
        tensor_meta: its shape and dtype, and whether the result needs gradients.
        recv_prev: from the rank before; else from the next.
        tracing: of the old runtime; of no effect.
        all_reduce_send_recv: as there.

    Returns:
        The tensor, on this process's device.

    Raises:
        ValueError: the pipeline has one rank.
    """
    received = torch.empty(tensor_meta.shape, dtype=tensor_meta.dtype, device=get_device())
    receive_into(received, get_group("pp"), source=_neighbour(is_next=not recv_prev))
    return received.requires_grad_(tensor_meta.requires_grad)


def send_python_object(obj: Any, send_next: bool = True, method: str = "tcp") -> None:
    """Send a plain value to the next rank of the pipeline, which calls `recv_python_object`.

    Args:
        obj: containers of numbers, strings, dtypes, shapes, `TensorMeta` and tensors, up to `MAX_LENGTH` bytes as text.
        send_next: to the next rank; else to the one before.
        method: "tcp" or "gloo", as old scripts say; the pipeline's own group carries it in either case.

    Raises:
        ValueError: it is larger, or the pipeline has one rank.
    """
    text = compress_to_string(obj).encode("ascii")
    if len(text) > MAX_LENGTH:
        raise ValueError(f"the object takes {len(text)} bytes, more than {MAX_LENGTH}; send its tensors by send()")
    group, destination = get_group("pp"), _neighbour(is_next=send_next)
    send_to(torch.tensor([len(text)]), group, destination=destination)
    send_to(torch.frombuffer(bytearray(text), dtype=torch.uint8), group, destination=destination)


def recv_python_object(recv_prev: bool = True, method: str = "tcp") -> Any:
    """Receive a value that a neighbour in the pipeline gave to `send_python_object`.

    Args:
        recv_prev: from the rank before; else from the next.
        method: as there.

    Raises:
        ValueError: it is no plain value, or the pipeline has one rank.
    """
    group, source = get_group("pp"), _neighbour(is_next=not recv_prev)
    length = receive_into(torch.empty(1, dtype=torch.int64), group, source=source)
    text = receive_into(torch.empty(int(length), dtype=torch.uint8), group, source=source)
    return uncompress_from_string(text.numpy().tobytes().decode("ascii"))


def _neighbour(*, is_next: bool) -> int:
    """The index in the pipeline of the rank after or before this one; the last is followed by the first."""
    group = get_group("pp")
    return (group.rank + (1 if is_next else -1)) % group.size
