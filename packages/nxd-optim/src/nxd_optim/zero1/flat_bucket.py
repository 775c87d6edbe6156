"""A bucket of ZeRO-1 in one flat buffer, of which each rank updates one part.

This module manages the memory: parameters, gradients while they are needed, and the weights for this rank's optimizer.
The order of sending is in `gradients`, the update in `sharded_weights`.
"""

from collections.abc import Sequence

import torch
from nxd_state import Pending, all_gather_, is_cpu, reduce_scatter_mean
from torch import Tensor, nn

from nxd_optim.placement import Placement
from nxd_optim.zero1.bucket import Dtypes, WeightRange

ALIGNMENT_BYTES = 64  # a cache line, and more than any kernel requires


class FlatBucket:
    """A `Bucket` in one buffer.

    The parameters become views of the buffer, so that gathering fills them in place. If gradients are accumulated in
    the parameters' own dtype, each `.grad` is a view of a second buffer from its first gradient until the bucket is
    sent; then that memory is free for the next bucket and `.grad` is None. Otherwise `.grad` is None after each
    backward, because the sum has a dtype that `.grad` cannot have.

    Args:
        parameters: parameters of one dtype, device and placement; they are moved into the buffer.
        placement: the placement; its replicas share the bucket.
        dtypes: see `Dtypes`.

    Attributes:
        shard: this rank's part of the buffer, 1-d.
        master: the same in the optimizer's dtype; `shard` itself if the dtypes are equal.
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
        self.shard = self._buffer.chunk(group.size)[group.rank]
        self.master = self.shard.to(dtypes.master)
        self.ranges = self._make_ranges()
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
        return self.master is not self.shard

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

    def take_gradient(self, parameter: Tensor) -> None:
        """Move a parameter's new gradient into the bucket's buffer, or add it to the sum there."""
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
            self.take_gradient(parameter)
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
        for it in self.ranges:
            if self.has_masters and id(it.parameter) in self.stale:
                it.weight.copy_(it.slice_of(self.shard))
        self.stale = set()

    def gather(self) -> None:
        """Start sending this rank's part to the others and filling the buffer with theirs."""
        if self.has_masters:
            self.shard.copy_(self.master)
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
        if not is_cpu(self._buffer) or self._group.size == 1:
            return None
        return torch.empty_like(self.shard, dtype=self.dtypes.master)

    def _release_gradients(self) -> None:
        self._gradients = None
        self._gradient_views = {}
        self._filled = set()
        for parameter in self.parameters:
            parameter.grad = None

    def _views_of(self, flat: Tensor) -> dict[int, Tensor]:
        places = zip(self.parameters, self._starts, strict=True)
        return {id(p): flat[start : start + p.numel()].view(p.shape) for p, start in places}

    def _make_ranges(self) -> list[WeightRange]:
        part = self.shard.numel()
        part_start = self._group.rank * part
        ranges = []
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            first = max(start, part_start)
            last = min(start + parameter.numel(), part_start + part)
            if first < last:
                offset = first - part_start
                weight = nn.Parameter(self.master[offset : offset + last - first])
                ranges.append(WeightRange(parameter, first - start, last - start, offset, weight))
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
