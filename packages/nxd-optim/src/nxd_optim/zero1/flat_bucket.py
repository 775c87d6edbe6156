"""A bucket of ZeRO-1: parameters in one flat buffer, of which each rank updates one part.

This module manages the memory: parameters, gradients while they are needed, and the weights for this rank's optimizer.
The order of sending is in `gradients`, the update in `sharded_weights`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from nxd_state import Pending, all_gather_, is_host, reduce_scatter_mean
from torch import Tensor, nn

from nxd_optim.placement import Placement

ALIGNMENT_BYTES = 64  # a cache line, and more than any kernel requires


@dataclass(frozen=True, eq=False)
class OwnRange:
    """The part of a parameter that this rank updates.

    Attributes:
        parameter: the model's parameter.
        start: first element, in C order, that this rank owns.
        stop: one past the last element.
        offset: their start in this rank's part of the bucket.
        weight: these elements, flat, as the optimizer updates them; on XLA padded to the length on other ranks.
    """

    parameter: Tensor
    start: int
    stop: int
    offset: int
    weight: nn.Parameter

    def of(self, part: Tensor) -> Tensor:
        """Return this range of a tensor with the layout of this rank's part."""
        return part[self.offset : self.offset + self.weight.numel()]


@dataclass(frozen=True)
class Dtypes:
    """The dtypes that a bucket computes in.

    Attributes:
        master: dtype of the weights that the optimizer updates.
        gradient: dtype in which gradients are accumulated.
        reduction: dtype in which they are summed over the ranks.
    """

    master: torch.dtype
    gradient: torch.dtype
    reduction: torch.dtype

    @classmethod
    def choose(
        cls, parameter: torch.dtype, optimizer_dtype: torch.dtype | None, *, accumulate_wide: bool, average_wide: bool
    ) -> "Dtypes":
        """Return the dtypes for parameters of a dtype; wide is float32, or the parameter's own dtype if wider."""
        wide = torch.promote_types(parameter, torch.float32)
        gradient = wide if accumulate_wide else parameter
        return cls(optimizer_dtype or wide, gradient, wide if average_wide else gradient)


class FlatBucket:
    """Parameters in one buffer, and the part of them that this rank owns.

    The parameters become views of the buffer, so that gathering fills them in place. If gradients are accumulated in
    the parameters' own dtype, each `.grad` is a view of a second buffer from its first gradient until the bucket is
    sent; then that memory is free for the next bucket and `.grad` is None. Otherwise `.grad` is None after each
    backward, because the sum has a dtype that `.grad` cannot have.

    Args:
        parameters: parameters of one dtype, device and placement; they are moved into the buffer.
        placement: the placement; its replicas share the bucket.
        dtypes: see `Dtypes`.

    Attributes:
        placement: as given.
        dtypes: as given.
        device: device of the parameters.
        own: this rank's part of the parameters, 1-d.
        master: the same in the optimizer's dtype; `own` itself if the dtypes are equal.
        ranges: this rank's part of each parameter, if any.
        used: ids of the parameters that had a gradient when the bucket was sent in this step.
        stale: ids of the parameters whose master weights must still be set from them; see `refresh_stale_masters`.
        gradient: the mean gradient of this rank's part between `wait` and `update`, in the optimizer's dtype.
    """

    def __init__(self, parameters: Sequence[Tensor], placement: Placement, dtypes: Dtypes) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self.placement = placement
        self.dtypes = dtypes
        self.device = first.device
        self._group = group = placement.replicas
        self._starts, length = _lay_out(parameters, group.size)
        self._buffer = torch.zeros(length, dtype=first.dtype, device=first.device)
        self._places = self._views_of(self._buffer)
        for parameter in self.parameters:
            view = self._places[id(parameter)]
            view.copy_(parameter.detach())
            parameter.data = view
        self.own = self._buffer.chunk(group.size)[group.rank]
        self.master = self.own.to(dtypes.master)
        self.ranges = self._own_ranges()
        self.used: set[int] = set()
        self.gradient: Tensor | None = None
        self._gradients: Tensor | None = None
        self._gradient_views: dict[int, Tensor] = {}
        self._mean_memory = self._memory_of_means()
        self.stale: set[int] = set()
        self._filled: set[int] = set()  # parameters whose sum is in the buffer, because `.grad` cannot hold it
        self._reduction: Pending[Tensor] | None = None
        self._gathering: Pending[Tensor] | None = None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the buffer, including padding."""
        return self._buffer.nbytes

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates separate weights, not the parameters themselves."""
        return self.master is not self.own

    @property
    def master_bytes(self) -> int:
        """Bytes of the weights that the optimizer updates, if they are separate."""
        return self.master.nbytes if self.has_masters else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the existing gradients of whole parameters."""
        return 0 if self._gradients is None else self._gradients.nbytes

    @property
    def mean_bytes(self) -> int:
        """Bytes of `gradient`, and of the memory kept for it between steps."""
        mean = self.gradient if self._mean_memory is None else self._mean_memory
        return 0 if mean is None else mean.nbytes

    def add_gradient(self, parameter: Tensor) -> None:
        """Add a parameter's new gradient to the bucket's buffer."""
        if parameter.grad is None:
            return
        if self._gradients is None:
            self._gradients = torch.empty_like(self._buffer, dtype=self.dtypes.gradient)
            self._gradient_views = self._views_of(self._gradients)
        view = self._gradient_views[id(parameter)]
        if parameter.grad is view:
            return
        # Detached, because backward(create_graph=True) gives gradients a history; dense, because
        # nn.Embedding(sparse=True) gives them another layout.
        grad = parameter.grad.detach().to_dense()
        if view.dtype == parameter.dtype:
            view.copy_(grad)
            parameter.grad = view
            return
        if id(parameter) in self._filled:
            view.add_(grad)
        else:
            view.copy_(grad)
        self._filled.add(id(parameter))
        parameter.grad = None

    def send(self) -> None:
        """Start averaging the gradients over the ranks; a parameter without one counts as zero."""
        for parameter in self.parameters:
            self.add_gradient(parameter)
        if self._gradients is None:
            self._gradients = torch.zeros_like(self._buffer, dtype=self.dtypes.gradient)
        sent = self._filled | {id(p) for p in self.parameters if p.grad is not None}
        self.used = self.used | sent
        for parameter in self.parameters:
            if id(parameter) not in sent and self._gradient_views:
                self._gradient_views[id(parameter)].zero_()
        self._reduction = reduce_scatter_mean(
            self._gradients,
            self._group,
            sum_dtype=self.dtypes.reduction,
            dtype=self.dtypes.master,
            out=self._mean_memory if self.gradient is None else None,
        )
        self._release_gradients()

    def wait(self) -> None:
        """Wait for the average, which is then in `gradient`, added to those of earlier rounds of the step."""
        if self._reduction is not None:
            mean = self._reduction.wait()
            if self.placement.scale != 1:
                mean = mean.mul_(self.placement.scale)
            self.gradient = mean if self.gradient is None else self.gradient.add_(mean)
            self._reduction = None

    def drop_gradients(self) -> None:
        """Drop all gradients of a step."""
        self.gradient = None
        self.used = set()
        self._release_gradients()

    def zero_gradients(self) -> None:
        """Set existing gradients to zero, averaged or not."""
        if self.gradient is not None:
            self.gradient.zero_()
        for key, view in self._gradient_views.items():
            if key in self._filled:
                view.zero_()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.detach().zero_()

    @torch.no_grad()
    def refresh_stale_masters(self) -> None:
        """Set the master weights of the stale parameters."""
        for own in self.ranges:
            if self.has_masters and id(own.parameter) in self.stale:
                own.weight.copy_(own.of(self.own))
        self.stale = set()

    def gather(self) -> None:
        """Start sending this rank's part to the others and filling the buffer with theirs."""
        if self.has_masters:
            self.own.copy_(self.master)
        self._gathering = all_gather_(self._buffer, self._group, async_op=True)

    def wait_for_parameters(self) -> None:
        """Return when all parameters are whole again."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def check_places(self) -> None:
        """Raise a RuntimeError if a parameter is no longer in the buffer."""
        for parameter in self.parameters:
            if parameter.data_ptr() != self._places[id(parameter)].data_ptr():
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was moved after the optimizer was created, so "
                    "updates would not reach it; move, convert or assign parameters before that, or pass lazy_init=True"
                    " and call init_zero() afterwards"
                )

    def _memory_of_means(self) -> Tensor | None:
        """Memory for `gradient` that is kept between steps, on the CPU: new pages would cost more than the sums."""
        if not is_host(self._buffer) or self._group.size == 1:
            return None
        return torch.empty_like(self.own, dtype=self.dtypes.master)

    def _release_gradients(self) -> None:
        self._gradients = None
        self._gradient_views = {}
        self._filled = set()
        for parameter in self.parameters:
            parameter.grad = None

    def _views_of(self, flat: Tensor) -> dict[int, Tensor]:
        places = zip(self.parameters, self._starts, strict=True)
        return {id(p): flat[start : start + p.numel()].view(p.shape) for p, start in places}

    def _own_ranges(self) -> list[OwnRange]:
        part = self.own.numel()
        part_start = self._group.rank * part
        ranges = []
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            first = max(start, part_start)
            last = min(start + parameter.numel(), part_start + part)
            if first < last:
                offset = first - part_start
                weight = nn.Parameter(self.master[offset : offset + last - first])
                ranges.append(OwnRange(parameter, first - start, last - start, offset, weight))
        return ranges


def _lay_out(parameters: Sequence[Tensor], parts: int) -> tuple[list[int], int]:
    """Return where each parameter starts, and the buffer's length, which `parts` divides.

    A parameter starts at a multiple of `ALIGNMENT_BYTES` if the gap before it is less than 1% of its size.
    """
    starts, end = [], 0
    for parameter in parameters:
        if parameter.nbytes > 100 * ALIGNMENT_BYTES:
            elements = ALIGNMENT_BYTES // parameter.element_size()
            end = -(-end // elements) * elements
        starts.append(end)
        end += parameter.numel()
    return starts, -(-max(end, 1) // parts) * parts
