"""Finds the parameters that have a gradient on some rank: as in torch, an optimizer leaves the others alone."""

from collections.abc import Sequence, Set

import torch
from nxd_state import Group, Pending, all_reduce_, records_graphs
from torch import Tensor


class Usage:
    """Agrees on the parameters that a step is to update, in a message that travels behind the gradients.

    A rank that uses all parameters knows the answer without reading it, which would be a wait on an accelerator. On XLA
    nothing is sent: all ranks record one graph, and so have gradients of the same parameters.

    Args:
        parameters: the same, in the same order, on all ranks.
        groups: the ranks that are asked; those of these groups together.
    """

    def __init__(self, parameters: Sequence[Tensor], groups: Sequence[Group]) -> None:
        self._parameters = parameters
        sends = bool(parameters) and not records_graphs(parameters[0])
        self._groups = [group for group in groups if sends and group.size > 1]
        self._used_here: Set[int] = set()
        self._pending: Pending[Tensor] | None = None

    def send(self, used_here: Set[int]) -> None:
        """Start to tell which parameters (their ids) have a gradient here. Called once every gradient was sent."""
        self._used_here = used_here
        if not self._groups:
            return
        if self._pending is not None:  # of an earlier round of the step, which this one includes
            self._pending.wait()
        flags = torch.tensor([id(p) in used_here for p in self._parameters], dtype=torch.uint8)
        flags = flags.to(self._parameters[0].device)
        self._pending = all_reduce_(flags, self._groups[0], op="max", async_op=True)

    def anywhere(self) -> Set[int]:
        """Ids of the parameters that have a gradient on some rank; of those `send` was told last."""
        if self._pending is None:
            return self._used_here
        flags = self._pending.wait()
        self._pending = None
        for group in self._groups[1:]:
            flags = all_reduce_(flags, group, op="max")
        if len(self._used_here) < len(self._parameters):
            self._used_here = {id(p) for p, flag in zip(self._parameters, flags.tolist(), strict=True) if flag}
        return self._used_here
