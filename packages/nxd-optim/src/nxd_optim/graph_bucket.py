"""A bucket on XLA: gradients of several parameters that are operands of one operation of the step's graph.

There a tensor is no place in memory: one flat buffer with the gradients as views of it, as `bucket` has it, would be
taken apart and put together again by copies, and each gradient would be as old as its last look at the buffer.
"""

from collections.abc import Sequence

import torch
from nxd_state import Group, all_reduce_coalesced_
from torch import Tensor


class GraphBucket:
    """Gradients that leave together; each stays the tensor that backward has made.

    Args:
        parameters: of one dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)

    def add_gradient(self, parameter: Tensor) -> None:
        """Nothing to do: a gradient lies where it is."""

    def average(self, group: Group, dtype: torch.dtype | None) -> "Recorded":
        """Average the gradients over the group, in `dtype` if given; no gradient counts as zero."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad.detach() for parameter in self.parameters if parameter.grad is not None]
        sent = grads if dtype in (None, grads[0].dtype) else [grad.to(dtype) for grad in grads]
        all_reduce_coalesced_(sent, group, op="avg")
        for parameter, mean in zip(self.parameters, sent, strict=True):
            parameter.grad = mean.to(parameter.dtype)
        return Recorded()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class Recorded:
    """A message that is a part of the graph: nobody waits for it."""

    def wait(self) -> None:
        """Return at once."""
