"""The last part of a ZeRO-1 step: scale the mean gradients, update this rank's parts, send them to the other ranks."""

from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nxd_optim.zero1.buckets import Bucket
from nxd_optim.zero1.rank_state import Parts
from nxd_optim.zero1.settings import copy_settings


def scale_gradients(buckets: Sequence[Bucket], scale: Tensor) -> None:
    """Multiply the mean gradients by a 0-d tensor, in place."""
    # On the CPU the value is at hand; elsewhere reading it would stall the device.
    if scale.device.type == "cpu" and scale == 1:
        return
    for bucket in buckets:
        assert bucket.gradient is not None
        bucket.gradient.mul_(scale.to(bucket.gradient.dtype))


def update_and_gather(parts: Parts, used: Set[int], settings: list[dict[str, Any]]) -> None:
    """Step on this rank's part of each bucket, and gather the bucket while the next one is updated.

    Args:
        parts: each bucket and the optimizer of this rank's part.
        used: ids of the parameters that are updated; the others have no gradient on any rank.
        settings: the parameter groups that a user sees; what an optimizer counts in its own is copied there.
    """
    parts = list(parts)
    for _, base in parts:
        copy_settings(settings, base.param_groups)
    for bucket, base in reversed(parts):  # in the order in which the next forward needs them
        if any(id(p) in used for p in bucket.parameters):
            _update(bucket, base, used)
            bucket.gather()
    for _, base in parts[:1]:
        copy_settings(base.param_groups, settings)


def _update(bucket: Bucket, base: Optimizer, used: Set[int]) -> None:
    assert bucket.gradient is not None
    for own in bucket.ranges:
        own.weight.grad = own.of(bucket.gradient) if id(own.parameter) in used else None
    base.step()
    for own in bucket.ranges:
        own.weight.grad = None
    bucket.gradient = None
