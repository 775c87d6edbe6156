"""A bucket of ZeRO on XLA: each parameter is cut into equal parts, one for each rank, and stays a separate tensor.

On XLA all ranks record one graph, so only the values of a rank's part may depend on its index: the parts of a parameter
have the same shape on every rank, the last ones padded with zeros. Tensors cannot share memory there: `flat_bucket`'s
buffer with views would be split and joined by copies.
"""

from collections.abc import Callable, Sequence

import torch
from nxd_state import all_gather, reduce_scatter
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_optim.placement import Placement
from nxd_optim.zero.bucket import Dtypes, WeightRange


class XlaBucket:
    """A `Bucket` of separate tensors. Ranges beyond a parameter's end hold only zeros; `send` sets `gradient` at once.

    Args:
        parameters: parameters of one dtype, device and placement.
        placement: the placement; its replicas share the bucket.
        dtypes: see `Dtypes`.
    """

    def __init__(self, parameters: Sequence[Tensor], placement: Placement, dtypes: Dtypes) -> None:
        self.parameters = list(parameters)
        self.placement = placement
        self.dtypes = dtypes
        self.device = parameters[0].device
        self.is_on_host = self.parameters_on_host = False
        self.has_masters = dtypes.master != parameters[0].dtype
        self._group = placement.replicas
        self.ranges = self._make_ranges()
        self.used: set[int] = set()
        self.gradient: Tensor | None = None
        self._sums: dict[int, Tensor] = {}  # sums of gradients in a dtype that `.grad` cannot have
        self.stale: set[int] = set()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def message_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.parameter_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of the weights that the optimizer updates; here they are separate from the parameters in any dtype."""
        return sum(it.weight.nbytes for it in self.ranges)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the existing gradients of whole parameters."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return sum(grad.nbytes for grad in (*grads, *self._sums.values()))

    @property
    def mean_bytes(self) -> int:
        """Bytes of `gradient`."""
        return 0 if self.gradient is None else self.gradient.nbytes

    def take_gradient(self, parameter: Tensor) -> None:
        """Add a parameter's new gradient to its sum, if the sum has another dtype than `.grad`."""
        if parameter.grad is None or self.dtypes.gradient == parameter.dtype:
            return
        grad = parameter.grad.detach().to(self.dtypes.gradient)
        before = self._sums.get(id(parameter))
        self._sums[id(parameter)] = grad if before is None else before + grad
        parameter.grad = None

    def follow_unit(self, done: Callable[[], None]) -> bool:
        """There are no units on XLA."""
        return False

    @torch.no_grad()
    def send(self) -> None:
        """Average the gradients over the ranks; a parameter without one counts as zero."""
        for parameter in self.parameters:
            self.take_gradient(parameter)
        grads = [self._sums.get(id(parameter), parameter.grad) for parameter in self.parameters]
        self.used = self.used | {id(p) for p, grad in zip(self.parameters, grads, strict=True) if grad is not None}
        whole = [
            torch.zeros_like(parameter, dtype=self.dtypes.gradient) if grad is None else grad.detach().to_dense()
            for parameter, grad in zip(self.parameters, grads, strict=True)
        ]
        by_rank = torch.cat([self._cut(grad) for grad in whole], dim=1).to(self.dtypes.reduction)
        mean = reduce_scatter(by_rank, self._group, op="avg").squeeze(0).to(self.dtypes.master)
        if self.placement.scale != 1:
            mean = mean * self.placement.scale
        self._release_gradients()
        self.gradient = mean if self.gradient is None else self.gradient + mean

    def wait(self) -> None:
        """Do nothing: the average is part of the graph."""

    def drop_gradients(self) -> None:
        """Drop all gradients of a step."""
        self.gradient = None
        self.used = set()
        self._release_gradients()

    def zero_gradients(self) -> None:
        """Set existing gradients to zero, averaged or not."""
        if self.gradient is not None:
            self.gradient = torch.zeros_like(self.gradient)
        self._sums = {key: torch.zeros_like(total) for key, total in self._sums.items()}
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

    @torch.no_grad()
    def refresh_stale_masters(self) -> None:
        """Set the weights from the stale parameters, and from all parameters without separate masters."""
        for it in self.ranges:
            if not self.has_masters or id(it.parameter) in self.stale:
                it.weight.copy_(self._part_of(it.parameter))
        self.stale = set()

    @torch.no_grad()
    def publish(self) -> None:
        """Send this rank's parts to the others and copy theirs into the parameters."""
        parts = torch.cat([it.weight for it in self.ranges]).to(self.parameters[0].dtype)
        by_rank = all_gather(parts.unsqueeze(0), self._group)
        for it in self.ranges:
            whole = by_rank[:, it.offset : it.offset + it.weight.numel()].reshape(-1)
            it.parameter.copy_(whole[: it.parameter.numel()].view(it.parameter.shape))

    def wait_for_parameters(self) -> None:
        """Do nothing: the parameters are part of the graph."""

    def check_places(self) -> None:
        """Do nothing: the parameters may be in any memory."""

    def _release_gradients(self) -> None:
        self._sums = {}
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def _make_ranges(self) -> list[WeightRange]:
        ranges, offset = [], 0
        for parameter in self.parameters:
            numel, length = parameter.numel(), self._part_length(parameter)
            start, stop = (min(rank * length, numel) for rank in (self._group.rank, self._group.rank + 1))
            weight = nn.Parameter(self._part_of(parameter).to(self.dtypes.master))
            ranges.append(WeightRange(parameter, start, stop, offset, weight))
            offset += length
        return ranges

    def _part_length(self, tensor: Tensor) -> int:
        return -(-max(tensor.numel(), 1) // self._group.size)

    def _cut(self, tensor: Tensor) -> Tensor:
        """Return the tensor as `[ranks, elements of a part]`, padded with zeros."""
        length = self._part_length(tensor)
        missing = length * self._group.size - tensor.numel()
        return F.pad(tensor.reshape(-1), (0, missing)).view(self._group.size, length)

    def _part_of(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter, as a copy."""
        rank = self._group.rank_tensor(parameter).view(1)
        return self._cut(parameter.detach()).index_select(0, rank).squeeze(0)
