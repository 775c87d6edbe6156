"""The gradients of ZeRO: `GradientExchange` averages them during backward, and adds the sums that are then missing.

The sums are computed on each rank's part of the mean gradients, at 1/dp of the cost on whole gradients.
"""

from collections import deque
from collections.abc import Sequence, Set

import torch
from nxd_state import active_group, all_gather_object, all_reduce_
from nxd_state.parameter_marks import is_sequence_parallel
from torch import Tensor

from nxd_optim.bucket_sender import BucketSender, UsedParameters
from nxd_optim.placement import Placement, ranks_with_gradients
from nxd_optim.sequence_parallel import sum_sequence_parallel
from nxd_optim.zero.bucket import Bucket, mean_gradients
from nxd_optim.zero.host_memory import on_device

MAX_MESSAGES = 2  # reduce-scatters in flight: enough to keep the transport busy without more buffers


class GradientExchange:
    """Sends the gradients of buckets, driven by hooks on their parameters.

    Args:
        buckets: the buckets, in the order in which they are sent.
        placements: the placements of dense layers and of experts.
        frozen: parameters that must not get a gradient.

    Attributes:
        sender: the `BucketSender`, which follows backward and has the blocks in which gradients are sent.
    """

    def __init__(self, buckets: Sequence[Bucket], placements: Sequence[Placement], frozen: Sequence[Tensor]) -> None:
        self._buckets, self._frozen = buckets, frozen
        self.sender = BucketSender(
            buckets,
            self._send,
            finish="step()",
            drop="zero_grad() of the optimizer",
            follow_unit=lambda index, done: buckets[index].follow_unit(done),
        )
        dense = placements[0]
        mirrors = () if dense.mirrors is None else (dense.mirrors,)
        asked = (dense.replicas, *mirrors, *ranks_with_gradients())
        self._used = UsedParameters([p for bucket in buckets for p in bucket.parameters], asked)
        self._under_way: deque[Bucket] = deque(maxlen=MAX_MESSAGES)
        self._used_is_sent = False  # since the last bucket

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
        if not self._used_is_sent:
            self._send_used()
        used = self._used.anywhere()
        _average_over_mirrors(self._buckets)
        if active_group("tp").size > 1:
            means = mean_gradients(self._buckets)
            sum_sequence_parallel(((it.parameter, it.gradient) for it in means), active_group("tp"))
        return used

    def _send(self, index: int) -> Bucket:
        bucket = self._buckets[index]
        if len(self._under_way) == MAX_MESSAGES:
            self._under_way[0].wait()
        bucket.wait()  # for its message of an earlier microbatch
        bucket.send()
        self._under_way.append(bucket)
        self._used_is_sent = False
        if index == len(self._buckets) - 1:
            self._send_used()
        return bucket

    def _send_used(self) -> None:
        self._used.send(set().union(*(it.used for it in self._buckets)))
        self._used_is_sent = True


def check_same_sequence_parallel_ranges(buckets: Sequence[Bucket]) -> None:
    """Raise a ValueError on every rank unless the tensor-parallel ranks own the same parts of marked parameters."""
    group = active_group("tp")
    all_ranges = (it for bucket in buckets for it in bucket.ranges)
    mine = [(it.start, it.stop) for it in all_ranges if is_sequence_parallel(it.parameter)]
    for rank, ranges in zip(group.ranks, all_gather_object(mine, group), strict=True):
        if ranges != mine:
            raise ValueError(
                f"rank {rank} owns {ranges} of the parameters marked sequence_parallel_enabled, this rank {mine}; pass "
                "parameters with the same local shapes and marks in the same order on all tensor-parallel ranks"
            )


@torch.no_grad()
def _average_over_mirrors(buckets: Sequence[Bucket]) -> None:
    """Average in place over the ranks that hold the same parts of the states, which still differ."""
    for bucket in buckets:
        if bucket.placement.mirrors is not None:
            assert bucket.gradient is not None
            with on_device(bucket.gradient, bucket.device) as gradient:
                all_reduce_(gradient, bucket.placement.mirrors, op="avg")
