"""Averaging gradients over data-parallel replicas, in buckets, while backward is still running.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" describes the method.
Gradients may be accumulated over any number of backward passes; nothing is communicated until the last one.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from nxd_state import Group, Pending, active_group, all_gather_object, all_reduce_
from torch import Tensor

from nxd_optim.bucket import make_buckets

DEFAULT_BUCKET_BYTES = 25 * 2**20

# Where a step stands. "sent": every bucket has left; "failed": an exception left the gradients incomplete.
Phase = Literal["accumulating", "overlapping", "sent", "failed"]
_REFUSALS: dict[Phase, str] = {
    "overlapping": "leave the block of overlap_backward() first",
    "sent": "this step's gradients have left; call finish() first",
    "failed": "this step failed, its gradients are incomplete; drop them on every rank with zero_grad() of the reducer",
}


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

    The replicas must start from equal weights. A parameter without a gradient on some rank counts as zero there.
    `optimizer.zero_grad()` does as well as `reducer.zero_grad()`, at the price of one more copy of each gradient.
    A change of `requires_grad` needs a new reducer.

    Args:
        parameters: the same on every rank and in the same order; those that need gradients are taken, each once.
        group: ranks to average over; data times context parallel if None.
        bucket_bytes: largest size of a bucket. A parameter above it travels alone.

    Raises:
        ValueError: `bucket_bytes` is not positive, or the ranks gave different parameters.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: Group | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be positive; the default is {DEFAULT_BUCKET_BYTES}")
        self.group = group if group is not None else active_group("dp", "cp")
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        _check_same_parameters(self.parameters, self.group)
        self._buckets = make_buckets(self.parameters, bucket_bytes) if self.group.size > 1 else []
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket.parameters}
        watched = [p for bucket in self._buckets for p in bucket.parameters]
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in watched]
        self._phase: Phase = "accumulating"
        self._missing: list[set[int]] = []  # by bucket: parameters that have no gradient yet from this backward
        self._pending: list[Pending] = []  # messages of the first buckets, in order

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Send each bucket as soon as backward has filled it, and at the end those that it has not filled.

        For the last backward before `finish` only. If the block raises, the step is void: `zero_grad` drops it.
        Inside the block, leave the group's ranks no other messages to exchange once backward has begun.

        Raises:
            RuntimeError: the last step is not finished, or a parameter gets a second gradient in the block.
        """
        self._refuse("overlap_backward()", "overlapping", "sent", "failed")
        self._missing = [{id(p) for p in bucket.parameters} for bucket in self._buckets]
        self._phase = "overlapping"
        try:
            yield
            self._send_rest()
        except BaseException:
            self._phase = "failed"
            raise
        self._phase = "sent"

    def finish(self) -> None:
        """Send what has not left yet, and wait: afterwards every `.grad` is the mean over the replicas.

        Where no rank has a gradient the mean is zero, not None, with one replica as with many.

        Raises:
            RuntimeError: inside `overlap_backward`, or after it failed.
        """
        self._refuse("finish()", "overlapping", "failed")
        self._complete()
        if not self._buckets:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def zero_grad(self) -> None:
        """Begin a new step without gradients; drops one that failed or was not finished, if every rank does so.

        Where there are buckets, the gradients are zeros that stay in them.

        Raises:
            RuntimeError: inside `overlap_backward`.
        """
        self._refuse("zero_grad()", "overlapping")
        if self._phase != "accumulating":
            # Ranks may have failed at different points. Were a message left out here that another rank has sent,
            # it would be taken for one of the next step.
            self._complete()
        for bucket in self._buckets:
            bucket.zero_grad()
        if not self._buckets:
            for parameter in self.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _refuse(self, call: str, *phases: Phase) -> None:
        if self._phase in phases:
            raise RuntimeError(f"{call} cannot be called now: {_REFUSALS[self._phase]}")

    def _on_gradient(self, parameter: Tensor) -> None:
        """Called by autograd after each accumulation into `parameter.grad`."""
        index = self._bucket_of[id(parameter)]
        if self._phase == "sent" or (self._phase == "overlapping" and id(parameter) not in self._missing[index]):
            self._phase = "failed"
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in or after overlap_backward(), "
                "when it may have left: enter it for the last backward of a step only. Reentrant checkpoints around "
                "tied weights do this too: use checkpoint(..., use_reentrant=False)"
            )
        self._buckets[index].adopt(parameter)
        if self._phase == "overlapping":
            self._missing[index].remove(id(parameter))
            # Buckets leave in one order on all ranks, whatever order they fill in.
            while len(self._pending) < len(self._buckets) and not self._missing[len(self._pending)]:
                self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._pending)]
        bucket.adopt_all()
        self._pending.append(all_reduce_(bucket.buffer, self.group, op="avg", async_op=True))

    def _send_rest(self) -> None:
        while len(self._pending) < len(self._buckets):
            self._send_next()

    def _complete(self) -> None:
        self._send_rest()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._phase = "accumulating"


def _check_same_parameters(parameters: Sequence[Tensor], group: Group) -> None:
    """Raise on every rank unless all gave parameters of the same shapes and dtypes in the same order."""
    text = repr([(tuple(p.shape), p.dtype) for p in parameters])
    mine = (len(parameters), sum(p.numel() for p in parameters), hashlib.sha256(text.encode()).hexdigest())
    descriptions = all_gather_object(mine, group)
    for rank, description in zip(group.ranks, descriptions, strict=True):
        if description != descriptions[0]:
            raise ValueError(
                f"rank {rank} gave {description[0]} parameters of {description[1]} elements, rank {group.ranks[0]} "
                f"{descriptions[0][0]} of {descriptions[0][1]}, or in another order, shape or dtype; give the same "
                "ones (with the same requires_grad) in the same order on every rank"
            )
