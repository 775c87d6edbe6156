"""A bucket: gradients of several parameters in one contiguous buffer, so that they travel in one message."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class GradientBucket:
    """One flat buffer whose slices are the `.grad` of its parameters.

    Gradients are accumulated straight into the buffer, so nothing is copied before or after communication.

    Args:
        parameters: of one dtype and device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        slices = self.buffer.split([p.numel() for p in parameters])
        self._views = {id(p): part.view(p.shape) for p, part in zip(parameters, slices, strict=True)}

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.buffer.numel() * self.buffer.element_size()

    def adopt(self, parameter: nn.Parameter) -> None:
        """Make the bucket's slice the parameter's gradient, taking over what has been accumulated elsewhere.

        Needed whenever somebody set `.grad` to None or to another tensor: the first backward then makes a new one.
        """
        view = self._views[id(parameter)]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = view

    def adopt_all(self) -> None:
        """`adopt` for every parameter; one without a gradient counts as zero."""
        for parameter in self.parameters:
            self.adopt(parameter)


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[GradientBucket]:
    """Cut the parameters into buckets of about `bucket_bytes`, in reverse order: backward fills the last ones first.

    A bucket holds one dtype and device. A parameter larger than `bucket_bytes` gets a bucket of its own.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    for parameter in reversed(parameters):
        batches = groups.setdefault((parameter.dtype, parameter.device), [[]])
        filled = sum(_nbytes(p) for p in batches[-1])
        if batches[-1] and filled + _nbytes(parameter) > bucket_bytes:
            batches.append([])
        batches[-1].append(parameter)
    return [GradientBucket(batch) for batches in groups.values() for batch in batches]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
