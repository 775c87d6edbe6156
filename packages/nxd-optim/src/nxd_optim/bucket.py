"""Buckets: gradients of several parameters that travel in one message.

On most devices they share one contiguous buffer. On XLA a tensor has no fixed memory: a flat buffer with gradients as
views would be split and joined again by copies, and each gradient would be as old as its last read of the buffer. There
the gradients stay separate tensors, operands of one operation in the step's graph.

This module decides which parameters share a bucket, and the order in which buckets are sent, but not when.
"""

from collections.abc import Sequence

import torch
from nxd_state import Group, Pending, all_reduce_, all_reduce_coalesced_
from torch import Tensor

from nxd_optim.placement import is_expert


class GradientBucket:
    """One flat buffer whose slices are the `.grad` of its parameters.

    Once a parameter's `.grad` is its slice, backward adds to it in place: there is no second copy of the gradient,
    and nothing is copied before or after communication.

    Args:
        parameters: parameters of one dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        slices = self.buffer.split([p.numel() for p in parameters])
        self._views = {id(p): part.view(p.shape) for p, part in zip(parameters, slices, strict=True)}

    def add_gradient(self, parameter: Tensor) -> None:
        """Make the bucket's slice the parameter's gradient, adding any gradient accumulated elsewhere.

        Needed whenever `.grad` was set to None or to another tensor: the next backward then creates a new one or adds
        to that tensor. A missing gradient counts as zero.
        """
        view = self._views[id(parameter)]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        else:
            # Detached, because backward(create_graph=True) gives gradients a history; dense, because
            # nn.Embedding(sparse=True) gives them another layout.
            view.copy_(parameter.grad.detach().to_dense())
        parameter.grad = view

    def average(self, group: Group, dtype: torch.dtype | None, scale: float = 1.0) -> Pending[Tensor]:
        """Start averaging the gradients over the group, in `dtype` if given; a missing gradient counts as zero.

        Args:
            group: the process group to average over.
            dtype: dtype of the sum; the gradients' own if None.
            scale: factor of the average.
        """
        for parameter in self.parameters:
            self.add_gradient(parameter)
        if dtype in (None, self.buffer.dtype):
            pending = all_reduce_(self.buffer, group, op="avg", async_op=True)
        else:
            pending = all_reduce_(self.buffer.to(dtype), group, op="avg", async_op=True).then(self.buffer.copy_)
        return pending if scale == 1 else pending.then(lambda mean: mean.mul_(scale))

    def zero_grad(self) -> None:
        """Set the slices to zero and make them the gradients."""
        self.buffer.zero_()
        for parameter in self.parameters:
            parameter.grad = self._views[id(parameter)]


def make_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[GradientBucket]:
    """Make buckets of at most `bucket_bytes`, in the order in which backward fills them; see `batch_parameters`."""
    return [GradientBucket(batch) for batch in batch_parameters(parameters, bucket_bytes)]


def batch_parameters(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Cut the parameters into batches of at most `bucket_bytes`, listed in the order in which backward fills them.

    Backward is assumed to reach the parameters in reverse order. A batch holds one dtype and device, and experts or
    other layers. A parameter larger than `bucket_bytes` gets a batch of its own.
    """
    batches_of_kind: dict[tuple[torch.dtype, torch.device, bool], list[list[Tensor]]] = {}
    reached = {}
    for position, parameter in enumerate(reversed(parameters)):
        reached[id(parameter)] = position
        batches = batches_of_kind.setdefault((parameter.dtype, parameter.device, is_expert(parameter)), [[]])
        if batches[-1] and sum(p.nbytes for p in batches[-1]) + parameter.nbytes > bucket_bytes:
            batches.append([])
        batches[-1].append(parameter)
    # Sorted by the last parameter of each batch: sorted by dtype, a batch that fills late would delay all others.
    batches = [batch for batches_of_one in batches_of_kind.values() for batch in batches_of_one]
    batches.sort(key=lambda batch: reached[id(batch[-1])])
    return batches


class GraphBucket:
    """Gradients that are sent together; each stays the tensor that backward created.

    Args:
        parameters: parameters of one dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)

    def add_gradient(self, parameter: Tensor) -> None:
        """Nothing to do: gradients are not moved."""

    def average(self, group: Group, dtype: torch.dtype | None, scale: float = 1.0) -> Pending[None]:
        """Like `GradientBucket.average`, for use inside a step's graph."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad.detach() for parameter in self.parameters if parameter.grad is not None]
        sent = grads if dtype in (None, grads[0].dtype) else [grad.to(dtype) for grad in grads]
        all_reduce_coalesced_(sent, group, op="avg")
        for parameter, mean in zip(self.parameters, sent, strict=True):
            parameter.grad = (mean if scale == 1 else mean * scale).to(parameter.dtype)
        return Pending(None)  # part of the graph, so there is nothing to wait for

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
