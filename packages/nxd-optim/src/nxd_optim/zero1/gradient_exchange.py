"""Averages the gradients of ZeRO-1: sends buckets during backward, and finds out which parameters have a gradient."""

from collections.abc import Sequence, Set

from nxd_state import Group, active_group
from torch import Tensor

from nxd_optim.bucket_sender import BucketSender
from nxd_optim.placement import ranks_with_gradients
from nxd_optim.used_parameters import Usage
from nxd_optim.zero1.buckets import Bucket
from nxd_optim.zero1.gradient_parts import average_over_contexts, sum_sequence_parallel

MAX_MESSAGES = 2  # of reduce-scatters under way: enough to keep the transport busy, and no more buffers than that


class GradientExchange:
    """Sends the gradients of some buckets, by hooks on their parameters.

    Args:
        buckets: in the order in which they are sent.
        group: the replicas.
        frozen: parameters that must not get a gradient.

    Attributes:
        sender: follows backward; it has the blocks in which gradients are sent.
    """

    def __init__(self, buckets: Sequence[Bucket], group: Group, frozen: Sequence[Tensor]) -> None:
        self._buckets, self._frozen = buckets, frozen
        self._averages_contexts = group is active_group("dp")  # else the replicas are both
        self.sender = BucketSender(buckets, self._send, finish="step()", drop="zero_grad() of the optimizer")
        contexts = (active_group("cp"),) if self._averages_contexts else ()
        asked = (group, *contexts, *ranks_with_gradients())
        self._usage = Usage([p for bucket in buckets for p in bucket.parameters], asked)

    def check_frozen(self) -> None:
        """Raise a RuntimeError if a parameter that was frozen has a gradient."""
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen when the optimizer was made, and has a "
                    "gradient now; leave it out there, and use add_param_group() once it is to be trained"
                )

    def complete(self) -> Set[int]:
        """Send the remaining buckets: then each bucket has the mean gradient of this rank's part.

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
