"""The memory that ZeRO-1 keeps on this rank, measured, and predicted from the sizes of the model.

For transient memory (messages in flight, temporaries of the update), only the largest size is given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_optim.zero1.buckets import Parts


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on this rank.

    Attributes:
        parameters: trained parameters.
        gradients: measured: existing gradients; predicted: gradients of all parameters before a step.
        mean_gradients: mean gradients of this rank's part; kept between steps on the CPU only.
        master_weights: master weights of this rank's part; zero if the parameters are updated directly.
        state: optimizer state of this rank's part.
        buckets: measured: the largest bucket, which is the most that a message adds; predicted: zero.
    """

    parameters: int
    gradients: int
    mean_gradients: int
    master_weights: int
    state: int
    buckets: int


@dataclass(frozen=True)
class MemoryReport:
    """Measured and predicted bytes; `str()` formats them as a table."""

    measured: MemoryBytes
    predicted: MemoryBytes

    def __str__(self) -> str:
        rows = [f"{'':16}{'measured':>12}{'predicted':>12}"]
        for kind in MemoryBytes.__dataclass_fields__:
            numbers = (getattr(self.measured, kind), getattr(self.predicted, kind))
            rows.append(f"{kind.replace('_', ' '):16}" + "".join(f"{number / 2**20:8.1f} MiB" for number in numbers))
        return "\n".join(rows)


def memory_report(parts: Parts, make_optimizer: Callable[[Any], Optimizer]) -> MemoryReport:
    """Count the memory of each bucket and its optimizer.

    Args:
        parts: each bucket and the optimizer of this rank's part.
        make_optimizer: function that makes an optimizer for a list of parameters, to find out which states it keeps.
    """
    parts = list(parts)
    measured = MemoryBytes(
        parameters=sum(bucket.parameter_bytes for bucket, _ in parts),
        gradients=sum(bucket.gradient_bytes for bucket, _ in parts),
        mean_gradients=sum(bucket.mean_bytes for bucket, _ in parts),
        master_weights=sum(bucket.master_bytes for bucket, _ in parts),
        state=sum(_state_bytes(base) for _, base in parts),
        buckets=max((bucket.parameter_bytes for bucket, _ in parts), default=0),
    )
    parameters = gradients = means = masters = state = 0
    for bucket, _ in parts:
        elements = sum(parameter.numel() for parameter in bucket.parameters)
        group_size = bucket.placement.replicas.size
        parameters += elements * bucket.parameters[0].itemsize
        gradients += elements * bucket.gradient_itemsize
        means += elements * bucket.master_dtype.itemsize // group_size if bucket.mean_bytes else 0
        masters += elements * bucket.master_dtype.itemsize // group_size if bucket.master_bytes else 0
        state += elements * _state_bytes_per_element(make_optimizer, bucket.master_dtype) // group_size
    return MemoryReport(measured, MemoryBytes(parameters, gradients, means, masters, state, 0))


def _state_bytes(optimizer: Optimizer) -> int:
    return sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )


def _state_bytes_per_element(make_optimizer: Callable[[Any], Optimizer], dtype: torch.dtype) -> int:
    """Measure it by a step with a tiny parameter."""
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = make_optimizer([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(value.itemsize for value in state if isinstance(value, Tensor) and value.shape == parameter.shape)
