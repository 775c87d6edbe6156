"""The gradients of ZeRO-1: `GradientExchange` averages them during backward; then missing sums and the norm follow.

Sums and norms are computed on each rank's part of the mean gradients, at 1/dp of the cost on whole gradients.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from nxd_state import Group, active_group, all_gather_object, all_reduce_, get_shard_spec
from torch import Tensor

from nxd_optim.bucket_sender import BucketSender, Usage
from nxd_optim.clip import differs_between_ranks, norm_accumulator, tensor_norms
from nxd_optim.placement import Placement, dense_placement, expert_placement, placement_of, ranks_with_gradients
from nxd_optim.reducer import sum_gradients
from nxd_optim.zero1.buckets import Bucket
from nxd_optim.zero1.even_bucket import EvenBucket
from nxd_optim.zero1.flat_bucket import OwnRange
from nxd_optim.zero1.logical_pieces import pieces_of_flat_range


@dataclass(frozen=True, eq=False)
class OwnGradient:
    """The mean gradient of the part of a parameter that this rank updates.

    Attributes:
        parameter: the model's parameter.
        start: first element, in C order, that this rank owns.
        stop: one past the last element.
        gradient: gradient of these elements, flat; shares memory with the optimizer.
    """

    parameter: Tensor
    start: int
    stop: int
    gradient: Tensor


def own_gradients(buckets: Sequence[Bucket]) -> list[OwnGradient]:
    """Return all gradients that this rank owns, once the buckets have arrived."""
    return [
        OwnGradient(own.parameter, own.start, own.stop, own.of(bucket.gradient))
        for bucket in buckets
        if bucket.gradient is not None
        for own in bucket.ranges
    ]


@torch.no_grad()
def sum_sequence_parallel(buckets: Sequence[Bucket]) -> None:
    """Sum gradients of sequence-parallel regions, where each tensor-parallel rank has seen a part, in place."""
    group = active_group("tp")
    if group.size == 1:
        return
    gradients = []
    for bucket, own in _sequence_parallel_ranges(buckets):
        assert bucket.gradient is not None
        gradients.append(own.of(bucket.gradient))
    sum_gradients(gradients, group)


def check_same_sequence_parallel_ranges(buckets: Sequence[Bucket]) -> None:
    """Raise a ValueError on every rank unless the tensor-parallel ranks own the same parts of those parameters."""
    group = active_group("tp")
    mine = [(own.start, own.stop) for _, own in _sequence_parallel_ranges(buckets)]
    for rank, ranges in zip(group.ranks, all_gather_object(mine, group), strict=True):
        if ranges != mine:
            raise ValueError(
                f"rank {rank} owns {ranges} of the parameters marked sequence_parallel_enabled, this rank {mine}; pass "
                "parameters with the same local shapes and marks in the same order on all tensor-parallel ranks"
            )


@torch.no_grad()
def average_over_contexts(buckets: Sequence[Bucket]) -> None:
    """Average in place over the context-parallel ranks, which still differ if states are sharded over "dp" only.

    Experts are excluded: their replicas span all contexts.
    """
    for bucket in buckets:
        if bucket.placement.replicas is not active_group("dp"):
            continue
        assert bucket.gradient is not None
        all_reduce_(bucket.gradient, active_group("cp"), op="avg")


@torch.no_grad()
def norm_of_parts(buckets: Sequence[Bucket], group: Group, device: torch.device) -> Tensor:
    """Return the 2-norm of the mean gradients from the ranks' parts; the same on all ranks.

    Args:
        buckets: the buckets, with their `gradient`.
        group: the replicas of dense layers.
        device: device of the result.

    Returns:
        A 0-d tensor in the device's widest float.
    """
    # All ranks, even those without experts, take part in the sums of all placements.
    placements = [dense_placement(group), *filter(None, [expert_placement()])]
    squares = [
        _square_norm([it for it in buckets if it.placement.axis == each.axis], each, device) for each in placements
    ]
    return torch.stack(squares).sum().sqrt()


def _square_norm(buckets: Sequence[Bucket], placement: Placement, device: torch.device) -> Tensor:
    by_copies: dict[int, list[Tensor]] = {}
    for bucket in buckets:
        assert bucket.gradient is not None
        for own in bucket.ranges:
            for copies, part in _counted_here(bucket, own):
                by_copies.setdefault(copies, []).append(part)
    total = norm_accumulator(device)
    for copies, parts in by_copies.items():
        total += tensor_norms(parts, 2.0, total).square().sum() / copies
    return all_reduce_(all_reduce_(total, placement.replicas), placement.parts).squeeze(0)


def _counted_here(bucket: Bucket, own: OwnRange) -> list[tuple[int, Tensor]]:
    assert bucket.gradient is not None
    gradient = own.of(bucket.gradient)
    if isinstance(bucket, EvenBucket) and (_is_in_pieces(own.parameter) or differs_between_ranks(own.parameter)):
        return [(1, gradient * bucket.norm_weights(own))]
    return counted_parts(own.parameter, own.start, own.stop, gradient)


def counted_parts(parameter: Tensor, start: int, stop: int, gradient: Tensor) -> list[tuple[int, Tensor]]:
    """Return the parts of a gradient that count, and how many ranks hold each.

    Args:
        parameter: the parameter of the gradient.
        start: first element, in C order, of `gradient`.
        stop: one past the last element.
        gradient: gradient of these elements, flat.
    """
    if getattr(parameter, "shared", False):  # the second copy of a tied weight; its first copy counts
        return []
    spec, placement = get_shard_spec(parameter), placement_of(parameter)
    if spec is None:
        return [(placement.copies, gradient)]
    placement.check(spec)
    if not _is_in_pieces(parameter):
        return [(spec.pieces[0].copies, gradient)]
    return [(piece.copies, piece.view(gradient)) for piece in pieces_of_flat_range(spec, start, stop)]


def _is_in_pieces(parameter: Tensor) -> bool:
    """Whether a parameter is anything other than one box of one logical tensor."""
    spec = get_shard_spec(parameter)
    return spec is not None and not (len(spec.pieces) == 1 and spec.pieces[0].local.shape == spec.local_shape)


def _sequence_parallel_ranges(buckets: Sequence[Bucket]) -> list[tuple[Bucket, OwnRange]]:
    return [
        (bucket, own)
        for bucket in buckets
        for own in bucket.ranges
        if getattr(own.parameter, "sequence_parallel_enabled", False)
    ]


MAX_MESSAGES = 2  # reduce-scatters in flight: enough to keep the transport busy without more buffers


class GradientExchange:
    """Sends the gradients of buckets, driven by hooks on their parameters.

    Args:
        buckets: the buckets, in the order in which they are sent.
        group: the replicas.
        frozen: parameters that must not get a gradient.

    Attributes:
        sender: the `BucketSender`, which follows backward and has the blocks in which gradients are sent.
    """

    def __init__(self, buckets: Sequence[Bucket], group: Group, frozen: Sequence[Tensor]) -> None:
        self._buckets, self._frozen = buckets, frozen
        self._averages_contexts = group is active_group("dp")  # otherwise the replicas span both
        self.sender = BucketSender(buckets, self._send, finish="step()", drop="zero_grad() of the optimizer")
        contexts = (active_group("cp"),) if self._averages_contexts else ()
        asked = (group, *contexts, *ranks_with_gradients())
        self._usage = Usage([p for bucket in buckets for p in bucket.parameters], asked)

    def check_frozen(self) -> None:
        """Raise a RuntimeError if a frozen parameter has a gradient."""
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen when the optimizer was created, but has "
                    "a gradient now; create the optimizer without it, and call add_param_group() when it is unfrozen"
                )

    def complete(self) -> Set[int]:
        """Send the remaining buckets; each bucket then has the mean gradient of this rank's part.

        Returns:
            Ids of the parameters that have a gradient on some rank.
        """
        self.sender.complete()
        used = self._usage.anywhere()
        if self._averages_contexts:
            average_over_contexts(self._buckets)
        sum_sequence_parallel(self._buckets)
        return used

    def _send(self, index: int) -> Bucket:
        if index >= MAX_MESSAGES:
            self._buckets[index - MAX_MESSAGES].wait()
        bucket = self._buckets[index]
        bucket.send()
        if index == len(self._buckets) - 1:
            self._usage.send(set().union(*(it.used for it in self._buckets)))
        return bucket
