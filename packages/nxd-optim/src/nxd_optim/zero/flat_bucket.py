"""A bucket in one flat buffer, of which each rank updates one part.

This module manages the memory of gradients while they are needed, and of the weights for this rank's optimizer;
`flat_parameters` that of the parameters. The order of sending is in `gradients`, the update in `sharded_weights`.
"""

from collections.abc import Callable

import torch
from nxd_state import Pending, is_cpu, reduce_scatter_mean
from torch import Tensor, nn

from nxd_optim.placement import Placement
from nxd_optim.zero.bucket import Dtypes, WeightRange
from nxd_optim.zero.flat_parameters import FlatParameters
from nxd_optim.zero.host_memory import HostSum, copy_on_host, host_memory


class FlatBucket:
    """A `Bucket` of `FlatParameters`.

    If gradients are accumulated in the parameters' own dtype, each `.grad` is a view of a second buffer from its first
    gradient until the bucket is sent; then that memory is free for the next bucket and `.grad` is None. Otherwise
    `.grad` is None after each backward, because the sum has a dtype that `.grad` cannot have.

    Args:
        flat: the parameters.
        placement: the placement; its replicas share the bucket.
        dtypes: see `Dtypes`.
        offload: whether this rank's part of the gradients, and the weights that its optimizer updates, are kept in host
            memory; those of parameters whose own part is there always are.

    Attributes:
        master: this rank's part of the parameters in the optimizer's dtype; the part itself if dtype and memory agree.
    """

    def __init__(self, flat: FlatParameters, placement: Placement, dtypes: Dtypes, *, offload: bool = False) -> None:
        self._flat = flat
        self.parameters = flat.parameters
        self.placement = placement
        self.dtypes = dtypes
        self.device = flat.device
        self.parameters_on_host = flat.is_on_host
        self.is_on_host = flat.is_on_host or (offload and not is_cpu(flat.device))
        crosses = self.is_on_host and not flat.is_on_host  # updated weights come back to the device
        self.master = copy_on_host(flat.shard, dtypes.master) if crosses else flat.shard.to(dtypes.master)
        is_rounded = crosses and dtypes.master != flat.shard.dtype
        self._outgoing: Tensor | None = None  # updated weights on their way back
        if is_rounded:
            self._outgoing = host_memory(flat.shard.numel(), flat.shard.dtype, self.device)
        self.ranges = [
            WeightRange(it, start, stop, offset, nn.Parameter(self.master[offset : offset + stop - start]))
            for it, start, stop, offset in flat.own_ranges()
        ]
        self.used: set[int] = set()
        self._mean: Tensor | None = None
        self._sum_on_host: HostSum | None = None
        if self.is_on_host:
            self._sum_on_host = HostSum(flat.shard.numel(), dtypes.master, self.device)
        self._gradients: Tensor | None = None
        self._gradient_views: dict[int, Tensor] = {}
        self._mean_memory = self._memory_of_means()
        self.stale: set[int] = set()
        self._filled: set[int] = set()  # parameters whose sum is in the buffer, because `.grad` cannot hold it
        self._reduction: Pending[Tensor] | None = None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the buffer, including padding, or of this rank's part if the others are given up."""
        return self._flat.shard.nbytes if self._flat.is_released else self._flat.nbytes

    @property
    def message_bytes(self) -> int:
        """Bytes of the buffer, including padding."""
        return self._flat.nbytes

    @property
    def gradient(self) -> Tensor | None:
        """The mean gradient of this rank's part; waits for its way to the host."""
        if self._sum_on_host is not None:
            self._sum_on_host.wait()
        return self._mean

    @gradient.setter
    def gradient(self, mean: Tensor | None) -> None:
        if self._sum_on_host is not None:
            self._sum_on_host.wait()
        self._mean = mean

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates weights of another dtype than the parameters."""
        return self.dtypes.master != self._flat.shard.dtype

    @property
    def master_bytes(self) -> int:
        """Bytes of the weights that the optimizer updates, if they are separate."""
        return self.master.nbytes if self._updates_copies else 0

    @property
    def _updates_copies(self) -> bool:
        return self.master is not self._flat.shard

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the existing gradients of whole parameters."""
        return 0 if self._gradients is None else self._gradients.nbytes

    @property
    def mean_bytes(self) -> int:
        """Bytes of `gradient`, and of the memory kept for it between steps."""
        if self._sum_on_host is not None:
            return self._sum_on_host.nbytes
        mean = self._mean if self._mean_memory is None else self._mean_memory
        return 0 if mean is None else mean.nbytes

    def take_gradient(self, parameter: Tensor) -> None:
        """Move a parameter's new gradient into the bucket's buffer, or add it to the sum there."""
        if parameter.grad is None:
            return
        if self._gradients is None:
            self._gradients = self._empty_gradients()
            self._gradient_views = self._flat.views_of(self._gradients)
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

    def follow_unit(self, done: Callable[[], None]) -> bool:
        """Have `done` called when backward has left the unit of sharded parameters; returns whether it will be."""
        return self._flat.follow_unit(done)

    def send(self) -> None:
        """Start averaging the gradients over the ranks; a parameter without one counts as zero."""
        for parameter in self.parameters:
            self.take_gradient(parameter)
        if self._gradients is None:
            self._gradients = self._empty_gradients().zero_()
        sent = self._filled | {id(p) for p in self.parameters if p.grad is not None}
        self.used = self.used | sent
        for parameter in self.parameters:
            if id(parameter) not in sent and self._gradient_views:
                self._gradient_views[id(parameter)].zero_()
        self._reduction = reduce_scatter_mean(
            self._gradients,
            self.placement.replicas,
            sum_dtype=self.dtypes.reduction,
            dtype=self.dtypes.master,
            out=self._mean_memory if self._mean is None else None,
        )
        self._release_gradients()

    def wait(self) -> None:
        """Wait for the average, which is then in `gradient`, added to those of earlier rounds of the step."""
        if self._reduction is not None:
            mean = self._reduction.wait()
            if self.placement.scale != 1:
                mean = mean.mul_(self.placement.scale)
            if self._sum_on_host is not None:
                self._mean = self._sum_on_host.start_adding(mean, is_first=self._mean is None)
            else:
                self._mean = mean if self._mean is None else self._mean.add_(mean)
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
            if self._updates_copies and id(it.parameter) in self.stale:
                it.weight.copy_(it.slice_of(self._flat.shard))
        self.stale = set()

    @torch.no_grad()
    def publish(self) -> None:
        """Start sending this rank's updated part to the others, or forget the parameters gathered before."""
        if self._updates_copies:
            updated = self.master if self._outgoing is None else self._outgoing.copy_(self.master)
            self._flat.shard.copy_(updated, non_blocking=True)
        self._flat.publish()

    def wait_for_parameters(self) -> None:
        """Return when all parameters that are sent after an update are whole again, and those on the host are read."""
        if self._flat.is_released:
            self._flat.finish_reading()
        else:
            self._flat.wait()

    def check_places(self) -> None:
        """Raise a RuntimeError if a parameter is no longer in the buffer."""
        self._flat.check_places()

    def _memory_of_means(self) -> Tensor | None:
        """Memory for `gradient` that is kept between steps, on the CPU: new pages would cost more than the sums."""
        if not is_cpu(self.device) or self.placement.replicas.size == 1:
            return None
        return torch.empty_like(self._flat.shard, dtype=self.dtypes.master)

    def _empty_gradients(self) -> Tensor:
        return torch.empty(self._flat.numel, dtype=self.dtypes.gradient, device=self.device)

    def _release_gradients(self) -> None:
        self._gradients = None
        self._gradient_views = {}
        self._filled = set()
        for parameter in self.parameters:
            parameter.grad = None
