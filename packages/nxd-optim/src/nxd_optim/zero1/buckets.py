"""Creates, steps and gathers the buckets of ZeRO-1, and the optimizer that updates this rank's part of each.

This module chooses the kind of bucket for a device; all kinds have the same interface.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from nxd_state import Group, records_graphs
from torch import Tensor
from torch.optim import Optimizer

from nxd_optim.bucket import batch_parameters
from nxd_optim.placement import Placement, dense_placement, expert_placement, is_expert
from nxd_optim.reducer import check_same_parameters
from nxd_optim.zero1.even_bucket import EvenBucket
from nxd_optim.zero1.flat_bucket import Dtypes, FlatBucket
from nxd_optim.zero1.settings import copy_settings, settings_of

Bucket = FlatBucket | EvenBucket
Parts = Iterable[tuple[Bucket, Optimizer]]  # each bucket, and the optimizer of this rank's part of it


def make_bucket(parameters: Sequence[Tensor], placement: Placement, dtypes: Dtypes) -> Bucket:
    """Make a bucket of parameters of one dtype, device and placement."""
    kind = EvenBucket if records_graphs(parameters[0]) else FlatBucket
    return kind(parameters, placement, dtypes)


def choose_dtypes(
    parameter: torch.dtype, optimizer_dtype: torch.dtype | None, *, accumulate_wide: bool, average_wide: bool
) -> Dtypes:
    """Return the dtypes that train parameters of a dtype; wide is float32, or the parameter's own dtype if wider."""
    wide = torch.promote_types(parameter, torch.float32)
    gradient = wide if accumulate_wide else parameter
    return Dtypes(optimizer_dtype or wide, gradient, wide if average_wide else gradient)


def make_buckets(
    parameters: Iterable[Tensor], group: Group, bucket_bytes: int, dtypes_of: Callable[[torch.dtype], Dtypes]
) -> list[Bucket]:
    """Move the trained parameters into buckets, in the order in which the buckets are sent.

    Args:
        parameters: the model's parameters.
        group: the replicas of dense layers.
        bucket_bytes: maximum size of a bucket.
        dtypes_of: function from a parameter dtype to the dtypes of training.

    Raises:
        ValueError: parameters are on the meta device, or differ between ranks of the group.
    """
    trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    if any(p.is_meta for p in trained):
        raise ValueError("parameters on the meta device cannot be trained; materialize them, then call init_zero()")
    check_same_parameters(trained, group)
    # Small parameters (norms, biases) are sent separately and last. They are often listed apart from the matrices, so
    # the time at which backward reaches them is unknown, and a bucket waits for the last of its parameters.
    matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    batches = (*batch_parameters(matrices, bucket_bytes), *batch_parameters(others, bucket_bytes))
    dense = dense_placement(group)
    experts = expert_placement() or dense
    return [
        make_bucket(batch, experts if is_expert(batch[0]) else dense, dtypes_of(batch[0].dtype)) for batch in batches
    ]


def make_base_optimizer(
    bucket: Bucket, param_groups: Sequence[dict[str, Any]], make: Callable[[Any], Optimizer]
) -> Optimizer:
    """Make the optimizer of this rank's part of a bucket, in groups with the settings of the user's groups."""
    weights = {own.parameter: own.weight for own in bucket.ranges}
    return make(
        [
            settings_of(group) | {"params": [weights[p] for p in group["params"] if p in weights]}
            for group in param_groups
        ]
    )


def scale_gradients(buckets: Sequence[Bucket], scale: Tensor) -> None:
    """Multiply the mean gradients by a 0-d tensor, in place."""
    # On the CPU the value can be read; elsewhere reading it would stall the device.
    if scale.is_cpu and scale == 1:
        return
    for bucket in buckets:
        assert bucket.gradient is not None
        bucket.gradient.mul_(scale.to(bucket.gradient.dtype))


def update_and_gather(parts: Parts, used: Set[int], settings: list[dict[str, Any]]) -> None:
    """Step on this rank's part of each bucket, and gather the bucket while the next one is updated.

    Args:
        parts: each bucket and the optimizer of this rank's part.
        used: ids of the parameters to update; the others have no gradient on any rank.
        settings: the user's parameter groups; values that an optimizer counts in its own groups are copied there.
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
