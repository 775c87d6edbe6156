"""Averaging gradients over data-parallel replicas, in buckets, while backward is still running.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" describes the method.
Gradients may be accumulated over any number of backward passes; nothing is communicated until the last one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nxd_state import Group, Pending, active_group, all_reduce_
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nxd_optim.bucket import GradientBucket, make_buckets

DEFAULT_BUCKET_BYTES = 25 * 2**20


class GradientReducer:
    """Keeps the gradients of a model's parameters in buckets and averages them over its replicas.

    A step is::

        for microbatch in microbatches[:-1]:
            loss(microbatch).backward()
        with reducer.overlap_backward():  # optional: buckets leave as soon as they are full
            loss(microbatches[-1]).backward()
        reducer.finish()
        optimizer.step()
        reducer.zero_grad()

    Every rank must give the same parameters in the same order. A parameter without a gradient on some rank counts as
    zero there. With one replica the reducer leaves gradients alone.

    Args:
        parameters: those that need gradients are taken, each once.
        group: ranks to average over; data times context parallel if None.
        bucket_bytes: size of a bucket.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Group | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be positive; the default is {DEFAULT_BUCKET_BYTES}")
        self.group = group if group is not None else active_group("dp", "cp")
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self._overlapping = False
        self._pending: list[Pending] = []
        self._next_bucket = 0
        self._buckets: list[GradientBucket] = []
        self._hooks: list[RemovableHandle] = []
        if self.group.size > 1:
            self._buckets = make_buckets(self.parameters, bucket_bytes)
            self._watch_gradients()
        self._bucket_of = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._missing: list[set[int]] = []

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Send each bucket as soon as backward has filled it. Only for the last backward before `finish`.

        Raises:
            RuntimeError: a parameter gets a second gradient after its bucket may have left.
        """
        if self._overlapping or self._next_bucket:
            raise RuntimeError("overlap_backward() was entered twice in one step; call finish() in between")
        self._missing = [{id(p) for p in bucket.parameters} for bucket in self._buckets]
        self._overlapping = True
        try:
            yield
        finally:
            self._overlapping = False

    def finish(self) -> None:
        """Average what has not been averaged yet, and wait: afterwards every `.grad` is the mean over the replicas."""
        while self._next_bucket < len(self._buckets):
            self._send_next_bucket()
        for pending in self._pending:
            pending.wait()
        self._pending, self._next_bucket = [], 0

    def zero_grad(self) -> None:
        """Set all gradients to zero; where there are buckets, they stay in them."""
        for bucket in self._buckets:
            bucket.adopt_all()
            bucket.buffer.zero_()
        if not self._buckets:
            for parameter in self.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _watch_gradients(self) -> None:
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in self.parameters]

    def _on_gradient(self, parameter: Tensor) -> None:
        index = self._bucket_of[id(parameter)]
        assert isinstance(parameter, nn.Parameter)
        self._buckets[index].adopt(parameter)
        if not self._overlapping:
            return
        missing = self._missing[index]
        if id(parameter) not in missing:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient inside overlap_backward(); "
                "enter it only for the last backward of a step"
            )
        missing.remove(id(parameter))
        # Buckets leave in one order on all ranks, whatever order they fill in.
        while self._next_bucket < len(self._buckets) and not self._missing[self._next_bucket]:
            self._send_next_bucket()

    def _send_next_bucket(self) -> None:
        bucket = self._buckets[self._next_bucket]
        bucket.adopt_all()
        self._next_bucket += 1
        self._pending.append(all_reduce_(bucket.buffer, self.group, op="avg", async_op=True))
