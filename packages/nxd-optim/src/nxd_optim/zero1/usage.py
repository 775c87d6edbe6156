"""Which parameters have a gradient on some replica: as in torch, the optimizer leaves the others alone."""

from collections.abc import Sequence

import torch
from nxd_state import Group, Pending, all_reduce_
from torch import Tensor

from nxd_optim.zero1.buckets import Bucket


class Usage:
    """Agrees on the parameters that a step is to update, in a message that travels behind the gradients.

    On XLA nothing is sent: all ranks record one graph, and so have gradients of the same parameters.

    Args:
        buckets: of the optimizer.
        groups: the ranks of these together are all replicas.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: Sequence[Group]) -> None:
        self._buckets = buckets
        self._groups = [group for group in groups if group.size > 1]
        self._flags: Tensor | None = None
        self._pending: Pending | None = None
        self._used_here: set[int] = set()

    def send(self) -> None:
        """Start to tell which parameters have a gradient here. Called once every bucket was sent."""
        device = self._buckets[0].device
        if device.type == "xla":
            self._used_here = set().union(*(bucket.used for bucket in self._buckets))
            return
        used = [id(p) in bucket.used for bucket in self._buckets for p in bucket.parameters]
        self._flags = torch.tensor(used, dtype=torch.uint8, device=device)
        if self._groups:
            self._pending = all_reduce_(self._flags, self._groups[0], op="max", async_op=True)

    def anywhere(self) -> set[int]:
        """Ids of the parameters that have a gradient on some replica."""
        if self._flags is None:
            return self._used_here
        flags = self._flags if self._pending is None else self._pending.wait()
        for group in self._groups[1:]:
            flags = all_reduce_(flags, group, op="max")
        self._flags = self._pending = None
        parameters = (p for bucket in self._buckets for p in bucket.parameters)
        return {id(p) for p, flag in zip(parameters, flags.tolist(), strict=True) if flag}
