"""What a bucket of ZeRO is: parameters whose gradients travel in one message, of which each rank updates a part.

Two classes implement it: `FlatBucket` in one buffer, and `XlaBucket` on XLA, where tensors cannot share memory.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_optim.clip import GradientRange
from nxd_optim.placement import Placement
from nxd_optim.updated_parts import UpdatedRange


@dataclass(frozen=True, eq=False)
class WeightRange:
    """The elements of a parameter that this rank updates.

    Attributes:
        parameter: the model's parameter.
        start: first element, in C order.
        stop: one past the last element.
        offset: their start in this rank's part of the bucket.
        weight: these elements, flat, as the optimizer updates them; on XLA padded to the length on other ranks.
    """

    parameter: Tensor
    start: int
    stop: int
    offset: int
    weight: nn.Parameter

    @property
    def updated(self) -> UpdatedRange:
        """The range for code that does not know buckets."""
        return UpdatedRange(self.parameter, self.start, self.stop, self.weight)

    def slice_of(self, part: Tensor) -> Tensor:
        """Return this range of a tensor with the layout of this rank's part."""
        return part[self.offset : self.offset + self.weight.numel()]


@dataclass(frozen=True)
class Dtypes:
    """The dtypes that a bucket computes in.

    Attributes:
        master: dtype of the weights that the optimizer updates.
        gradient: dtype in which gradients are accumulated.
        reduction: dtype in which they are summed over the ranks.
    """

    master: torch.dtype
    gradient: torch.dtype
    reduction: torch.dtype

    @classmethod
    def choose(
        cls, parameter: torch.dtype, optimizer_dtype: torch.dtype | None, *, accumulate_wide: bool, average_wide: bool
    ) -> "Dtypes":
        """Return the dtypes for parameters of a dtype; wide is float32, or the parameter's own dtype if wider."""
        wide = torch.promote_types(parameter, torch.float32)
        gradient = wide if accumulate_wide else parameter
        return cls(optimizer_dtype or wide, gradient, wide if average_wide else gradient)


class Bucket(Protocol):
    """Parameters of one dtype, device and placement, and the part of them that this rank updates.

    Attributes:
        parameters: the model's parameters.
        placement: their placement; its replicas share the bucket.
        dtypes: the dtypes of gradients and master weights.
        device: device of the parameters.
        is_on_host: whether this rank's part of gradients and updated weights is in host memory, and not on the device.
        parameters_on_host: whether its part of the parameters is, too.
        ranges: this rank's part of each parameter, if any.
        used: ids of the parameters that had a gradient when the bucket was sent in this step.
        stale: ids of the parameters whose master weights must still be set from them; see `refresh_stale_masters`.
        gradient: the mean gradient of this rank's part after `wait`, 1-d, in the optimizer's dtype, until the update.
    """

    parameters: list[Tensor]
    placement: Placement
    dtypes: Dtypes
    device: torch.device
    is_on_host: bool
    parameters_on_host: bool
    ranges: list[WeightRange]
    used: set[int]
    stale: set[int]
    gradient: Tensor | None

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates separate weights in its own dtype, not the parameters themselves."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that a rank keeps: all, or its part of those that are gathered when they are used."""

    @property
    def message_bytes(self) -> int:
        """Bytes of all parameters, which travel in one message."""

    @property
    def master_bytes(self) -> int:
        """Bytes of the weights that the optimizer updates, if they are separate from the parameters."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the existing gradients of whole parameters."""

    @property
    def mean_bytes(self) -> int:
        """Bytes of `gradient`, and of the memory kept for it between steps."""

    def take_gradient(self, parameter: Tensor) -> None:
        """Take a parameter's new gradient from its `.grad` into the bucket's sum, where the bucket keeps one."""

    def follow_unit(self, done: Callable[[], None]) -> bool:
        """Have `done` called when backward has left the unit of the parameters; returns whether it will be called."""

    def send(self) -> None:
        """Start averaging the gradients over the ranks; a parameter without one counts as zero."""

    def wait(self) -> None:
        """Wait for the average, which is then in `gradient`, added to those of earlier rounds of the step."""

    def drop_gradients(self) -> None:
        """Drop all gradients of a step."""

    def zero_gradients(self) -> None:
        """Set existing gradients to zero, averaged or not."""

    def refresh_stale_masters(self) -> None:
        """Set the master weights of the stale parameters."""

    def publish(self) -> None:
        """Start sending this rank's updated part to the others and taking theirs into the parameters.

        Parameters that are gathered when they are used are only forgotten.
        """

    def wait_for_parameters(self) -> None:
        """Return when all parameters that are sent after an update are whole again."""

    def check_places(self) -> None:
        """Raise a RuntimeError if updates would not reach a parameter because it was moved."""


Parts = Iterable[tuple[Bucket, Optimizer]]  # each bucket, and the optimizer of this rank's part of it


def mean_gradients(buckets: Sequence[Bucket]) -> list[GradientRange]:
    """Return the mean gradients of this rank's parts, once the buckets have arrived; they share the buckets' memory."""
    return [
        GradientRange(it.parameter, it.start, it.stop, it.slice_of(bucket.gradient))
        for bucket in buckets
        if bucket.gradient is not None
        for it in bucket.ranges
    ]
