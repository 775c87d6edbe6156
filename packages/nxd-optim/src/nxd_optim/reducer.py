"""Averages gradients over data-parallel replicas, in buckets, while backward is still running.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" describes the method.
Gradients may be accumulated over any number of backward passes; nothing is communicated until the last one.

On most devices a bucket is one contiguous buffer. On XLA a tensor has no fixed memory: a flat buffer with gradients as
views would be split and joined again by copies, and each gradient would be as old as its last read of the buffer. There
the gradients stay separate tensors, operands of one operation in the step's graph.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from nxd_state import (
    Group,
    Pending,
    active_group,
    all_reduce_,
    all_reduce_coalesced_,
    check_same_start,
    is_lazy_device,
)
from nxd_state.parameter_marks import is_expert
from torch import Tensor

from nxd_optim.bucket_sender import DEFAULT_BUCKET_BYTES, BucketSender, Message, UsedParameters, batch_parameters
from nxd_optim.placement import (
    Placement,
    check_same_parameters,
    placements_of,
    ranks_with_gradients,
    require_mesh,
    with_messages_apart,
)


class GradientReducer:
    """Keeps the gradients of a model's parameters in buckets and averages them over its replicas.

    A step is::

        for microbatch in microbatches[:-1]:
            loss(microbatch).backward()
        with reducer.overlap_backward():  # optional: buckets are sent as soon as they are full
            loss(microbatches[-1]).backward()
        reducer.finish()
        optimizer.step()
        reducer.zero_grad()

    The ranks must start from equal weights; the first `finish` compares them, except on XLA. If a rank has no gradient
    for a parameter, it counts as zero. `optimizer.zero_grad()` also works in place of `reducer.zero_grad()`, at the
    cost of one more copy of each gradient. After a change of `requires_grad`, create a new reducer.

    Args:
        parameters: the model's parameters, in the same order on every rank; those that need gradients are used once.
        group: the ranks to average over; data times context parallel if None, and for parameters of experts the ranks
            with the same experts.
        bucket_bytes: maximum size of a bucket. A larger parameter is sent alone.
        reduce_dtype: dtype in which gradients are sent and summed, such as float32 for bfloat16 gradients; their own
            dtype if None.
        find_unused_parameters: whether to ask replicas and tensor-parallel ranks which parameters have gradients.
            Parameters without any keep None, so an optimizer skips them; otherwise their mean is zero.

    Raises:
        RuntimeError: there are several ranks, but neither a mesh nor a `group`.
        ValueError: `bucket_bytes` is not positive, `reduce_dtype` is not a float dtype, or the ranks passed different
            parameters.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: Group | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        reduce_dtype: torch.dtype | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be positive; the default is {DEFAULT_BUCKET_BYTES}")
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype={reduce_dtype} cannot hold an average; use a float dtype")
        if group is None:
            require_mesh()
        self.reduce_dtype = reduce_dtype
        placements = placements_of(group)
        self._dense, self._experts = map(with_messages_apart, placements) if group is None else placements
        self.group = self._dense.replicas
        self._given, self._group_given = list(dict.fromkeys(parameters)), group
        self._has_compared = False
        self.parameters = [p for p in self._given if p.requires_grad]
        check_same_parameters(self.parameters, self.group)
        sent = [p for p in self.parameters if self._is_sent(p)]
        self._kept = [p for p in self.parameters if not self._is_sent(p)]
        kind = GraphBucket if any(map(is_lazy_device, sent)) else GradientBucket
        self._buckets = [kind(batch) for batch in batch_parameters(sent, bucket_bytes)]
        asked = (self.group, active_group("tp"), *ranks_with_gradients())
        self._usage = UsedParameters(self.parameters, asked) if find_unused_parameters else None
        self._used: set[int] = set()  # ids of parameters that had a gradient when they were sent
        self._sender = BucketSender(
            self._buckets,
            self._send,
            finish="finish()",
            drop="zero_grad() of the reducer",
        )

    def overlap_backward(self) -> AbstractContextManager[None]:
        """Send each bucket as soon as backward has filled it, and the remaining ones at the end.

        Use it only for the last backward before `finish`. If the block raises, the step is invalid: `zero_grad` drops
        it. Once backward has begun in the block, the group's ranks must not exchange other messages.

        Raises:
            RuntimeError: the last step is not finished, or a parameter gets a second gradient in the block.
        """
        return self._sender.overlap_backward()

    def last_backward(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Like `overlap_backward`, for the parameters that get their last gradient of a step in the block.

        A pipeline's stages run their last backward one after the other, so each gets its own block. `synchronize` or
        `finish` sends the rest.

        Raises:
            RuntimeError: a block is open or has failed, or a parameter gets a second gradient in it.
        """
        return self._sender.last_backward(map(id, parameters))

    def synchronize(self) -> None:
        """Send the remaining buckets and wait: every `.grad` is then the mean of the gradients accumulated so far.

        More gradients may be accumulated: the next `synchronize` or `finish` averages those of further backward passes.

        Raises:
            RuntimeError: inside `overlap_backward`, or after a backward failed while its gradients were being sent.
        """
        self._sender.synchronize()
        if self._usage is not None and self._buckets:
            if self._kept:
                self._send_usage_with_kept(self._usage)
            self._leave_unused_without_gradient(self._usage)

    def finish(self) -> None:
        """Send the remaining buckets and wait: afterwards every `.grad` is the mean over the replicas.

        If no rank has a gradient, the mean is zero, with any number of replicas; None with `find_unused_parameters`.

        Raises:
            RuntimeError: inside `overlap_backward`, or after a backward failed while its gradients were being sent.
            ValueError: on the first call: ranks that should hold the same weights have different ones.
        """
        self._sender.refuse("finish()", "overlapping", "failed", "held")
        self._sender.complete()
        if not self._has_compared:
            check_same_start(self._given, self._group_given)
            self._has_compared = True
        if self._usage is not None:
            if self._kept or not self._buckets:
                self._send_usage_with_kept(self._usage)
            self._leave_unused_without_gradient(self._usage)
            self._used = set()
        for parameter in self._kept:
            if parameter.grad is None and (self._usage is None or id(parameter) in self._usage.anywhere()):
                parameter.grad = torch.zeros_like(parameter)

    def hold(self) -> None:
        """Refuse further gradients, and another `finish`, until `drop` or `zero_grad`: they have been clipped.

        Gradients that need no message, as those of a single replica, are refused only in the blocks of this class.
        """
        self._sender.hold()

    def zero_grad(self) -> None:
        """Begin a new step without gradients; drops a failed or unfinished step if every rank calls this.

        With buckets, the gradients become zeros in the buckets; None on XLA or with `find_unused_parameters`.

        Raises:
            RuntimeError: inside `overlap_backward`.
        """
        self.drop()
        in_buckets = self._buckets if self._usage is None else []
        for bucket in in_buckets:
            bucket.zero_grad()
        for parameter in self._kept if in_buckets else self.parameters:
            parameter.grad = None

    def drop(self) -> None:
        """Drop a failed or unfinished step, if every rank calls this; `.grad` does not change.

        Raises:
            RuntimeError: inside `overlap_backward`.
        """
        self._sender.refuse("zero_grad()", "overlapping")
        self._sender.drop()
        self._used = set()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._sender.close()

    def _send(self, index: int) -> Message:
        bucket = self._buckets[index]
        self._note_used(bucket.parameters)
        placement = self._placement_of(bucket.parameters[0])
        message = bucket.average(placement.replicas, self.reduce_dtype, placement.scale)
        if self._usage is not None and bucket is self._buckets[-1] and not self._kept:
            self._usage.send(self._used)
        return message

    def _send_usage_with_kept(self, usage: UsedParameters) -> None:
        """Send which parameters have gradients when backward is over: those that are not sent may get theirs last."""
        self._note_used(self._kept)
        usage.send(self._used)

    def _placement_of(self, parameter: Tensor) -> Placement:
        return self._experts if is_expert(parameter) else self._dense

    def _is_sent(self, parameter: Tensor) -> bool:
        """Whether averaging changes its gradient."""
        placement = self._placement_of(parameter)
        return placement.replicas.size > 1 or placement.scale != 1

    def _leave_unused_without_gradient(self, usage: UsedParameters) -> None:
        self._used = set(usage.anywhere())
        for parameter in self.parameters:
            if id(parameter) not in self._used:
                parameter.grad = None

    def _note_used(self, parameters: Iterable[Tensor]) -> None:
        self._used |= {id(p) for p in parameters if p.requires_grad and p.grad is not None}


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

    def take_gradient(self, parameter: Tensor) -> None:
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
            self.take_gradient(parameter)
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


class GraphBucket:
    """Gradients that are sent together; each stays the tensor that backward created.

    Args:
        parameters: parameters of one dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)

    def take_gradient(self, parameter: Tensor) -> None:
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
