"""Buckets of gradients that travel in one message: which parameters share one, and when it is sent.

`BucketSender` sends buckets as backward fills them or on request, in the same order on all ranks. Its owner defines
what a bucket holds and how it is sent: `GradientReducer` averages over replicas, the ZeRO optimizer reduce-scatters.
`UsedParameters` then finds the parameters that have a gradient on some rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol
from weakref import WeakMethod

import torch
from nxd_state import Group, Pending, all_reduce_, is_lazy_device
from nxd_state.parameter_marks import is_expert, is_summed_over_stages
from torch import Tensor

DEFAULT_BUCKET_BYTES = 25 * 2**20

_UNIT = -1  # no id of a parameter

# The phase of a step. "overlapping": in a block around a last backward. "leaving": after such a block, which may not
# have covered all parameters. "arrived": every gradient is averaged, and none was added since. "failed": an exception
# left the gradients incomplete. "held": the gradients are complete and must stay as they are until the update.
Phase = Literal["accumulating", "overlapping", "leaving", "arrived", "failed", "held"]


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


class WatchedBucket(Protocol):
    """Parameters whose gradients are sent together."""

    parameters: list[Tensor]

    def take_gradient(self, parameter: Tensor) -> None:
        """Take a parameter's new gradient from its `.grad`, if the bucket keeps gradients elsewhere."""


class Message(Protocol):
    """A message in flight."""

    def wait(self) -> Any:
        """Return when the message has arrived."""


class BucketSender:
    """Follows backward by hooks on the parameters and sends each bucket in its turn.

    Args:
        buckets: the buckets, in the order in which they are sent.
        send: starts sending the bucket with this index.
        finish: name of the owner's call that ends a step, for errors.
        drop: name of the owner's call that drops a failed step, for errors.
        follow_unit: has a function called when backward has left the unit of a bucket's parameters, and returns whether
            it will be called. Other messages travel in the same group during backward then, so that the bucket is sent
            at that moment on all ranks, also on those that lack gradients. None if there are no units.
    """

    def __init__(
        self,
        buckets: Sequence[WatchedBucket],
        send: Callable[[int], Message],
        *,
        finish: str,
        drop: str,
        follow_unit: Callable[[int, Callable[[], None]], bool] | None = None,
    ) -> None:
        self._buckets = buckets
        self._send = send
        self._refusals: dict[Phase, str] = {
            "overlapping": "leave the block of overlap_backward() first",
            "leaving": f"this step's gradients have been sent; call {finish} first",
            "arrived": f"this step's gradients have been sent; call {finish} first",
            "failed": f"this step failed and its gradients are incomplete; drop them on every rank with {drop}",
            "held": "this step's gradients have been clipped; call step() or zero_grad() of the optimizer first",
        }
        self._parameters = [frozenset(map(id, bucket.parameters)) for bucket in buckets]
        self._bucket_of = {key: index for index, keys in enumerate(self._parameters) for key in keys}
        on_unit = WeakMethod(self._on_unit)
        self._of_units = {
            index
            for index in range(len(buckets))
            if follow_unit is not None and follow_unit(index, partial(_call, on_unit, index))
        }
        watched = [p for bucket in buckets for p in bucket.parameters]
        # Parameters keep their hooks alive. A hook that kept this object alive would be a cycle that is never freed.
        on_gradient = WeakMethod(self._on_gradient)
        self._hooks = [p.register_post_accumulate_grad_hook(partial(_call, on_gradient)) for p in watched]
        self._phase: Phase = "accumulating"
        # By bucket: parameters whose last gradient is still to come, and _UNIT until backward has left its unit.
        self._missing: dict[int, set[int]] = {}
        self._last: set[int] = set()  # parameters that get their last gradient in the backward that is running
        self._waiting: list[int] = []  # in and after a block: the buckets still to be sent, in order
        self._sent: set[int] = set()  # buckets that `each_backward` has sent in this step
        self._late: set[int] = set()  # those with gradients that a backward outside such a block has added since
        self._messages: dict[int, Message] = {}  # the last one of each bucket

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Send each bucket as soon as backward has filled it, and the remaining ones at the end.

        Raises:
            RuntimeError: the last step is not finished, or a parameter gets a second gradient in the block.
        """
        self.refuse("overlap_backward()", "overlapping", "leaving", "arrived", "failed", "held")
        with self.last_backward(self._bucket_of):
            yield

    @contextmanager
    def last_backward(self, parameters: Iterable[int]) -> Iterator[None]:
        """Send each bucket as soon as it has the last gradients of all its parameters, some of which come in the block.

        Args:
            parameters: ids of the parameters that get no gradient after the block, and at most one inside it; those
                outside the buckets are ignored.

        Raises:
            RuntimeError: a block is open or has failed, or a parameter gets a second gradient in it.
        """
        self.refuse("last_backward()", "overlapping", "failed", "held")
        if self._phase != "leaving":
            self._waiting = list(range(len(self._buckets)))
            self._missing = self._all_of(self._waiting)
        self._phase = "overlapping"
        self._last = self._bucket_of.keys() & set(parameters)
        try:
            yield
            for missing in self._missing.values():
                missing.difference_update(self._last)
                if missing == {_UNIT}:
                    missing.clear()
            self._last = set()
            self._send_filled()
        except BaseException:
            self._phase = "failed"
            raise
        self._phase = "leaving"

    @contextmanager
    def each_backward(self, parameters: Iterable[int]) -> Iterator[None]:
        """Send each bucket of these parameters as soon as this backward has filled it; more gradients may follow.

        Args:
            parameters: ids of the parameters, at most one gradient each; buckets with others are left for later.

        Raises:
            RuntimeError: a block is open or has failed, or a parameter gets a second gradient in it.
        """
        self.refuse("each_backward()", "overlapping", "leaving", "failed", "held")
        wanted = set(parameters)
        self._missing = self._all_of(index for index, keys in enumerate(self._parameters) if keys <= wanted)
        self._waiting = list(self._missing)
        self._last = set().union(*(self._parameters[index] for index in self._waiting))
        self._phase = "overlapping"
        try:
            yield
            while self._waiting:
                self._send_next()
        except BaseException:
            self._phase = "failed"
            raise
        self._sent |= self._missing.keys()
        self._late -= self._missing.keys()
        self._last, self._missing = set(), {}
        self._phase = "accumulating"

    def synchronize(self) -> None:
        """Send the remaining buckets, and wait for all. Gradients that follow belong to the same step."""
        self.refuse("synchronize()", "overlapping", "failed", "held")
        self._finish_messages()
        self._phase = "arrived"

    def complete(self) -> None:
        """Send the remaining buckets and wait for all, so that a new step can begin."""
        if self._phase != "arrived":
            self._finish_messages()
        self._phase = "accumulating"

    def hold(self) -> None:
        """Refuse further gradients, after `complete`, until `release` or `drop`."""
        self._phase = "held"

    def release(self) -> None:
        """Allow the gradients of a new step, after `hold`."""
        self._phase = "accumulating"

    def drop(self) -> None:
        """Drop a step that failed or was not finished; every rank must do so."""
        if self._phase == "held":
            self.release()
        elif self._phase != "accumulating":
            # Ranks may have failed at different points. If this rank skipped a message that another rank has sent, that
            # message would be matched with one of the next step.
            self.complete()
        self._wait_for_messages()  # of `each_backward`, whose result must not count in the next step
        self._last, self._missing = set(), {}

    def refuse(self, call: str, *phases: Phase) -> None:
        """Raise a RuntimeError with the remedy if the step is in one of these phases."""
        if self._phase in phases:
            raise RuntimeError(f"{call} cannot be called now: {self._refusals[self._phase]}")

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_gradient(self, parameter: Tensor) -> None:
        """Called by autograd after each accumulation into `parameter.grad`."""
        self.refuse("backward()", "held")
        index = self._bucket_of[id(parameter)]
        if self._phase == "arrived":
            self._phase = "accumulating"  # another round; its average is added to the existing one
        leaving = self._phase in ("overlapping", "leaving")
        if leaving and index in self._missing and id(parameter) not in self._missing[index]:
            self._phase = "failed"
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient after its first may have been "
                "sent: enter overlap_backward() for the last backward of a step only, or run_train in no_sync(). "
                "Reentrant checkpoints around tied weights do this too: use checkpoint(..., use_reentrant=False)"
            )
        if not leaving:
            self._late.add(index)
        if not is_summed_over_stages(parameter):  # a pipeline adds other stages' gradients to `.grad`
            self._buckets[index].take_gradient(parameter)
        if id(parameter) in self._last:
            self._missing[index].remove(id(parameter))
            self._send_filled()

    def _on_unit(self, index: int) -> None:
        """Called when backward has left the unit of a bucket: gradients that are still missing will not come."""
        if self._phase == "overlapping" and index in self._missing and self._parameters[index] <= self._last:
            self._missing[index].clear()
            self._send_filled()

    def _all_of(self, buckets: Iterable[int]) -> dict[int, set[int]]:
        return {it: {*self._parameters[it], *((_UNIT,) if it in self._of_units else ())} for it in buckets}

    def _send_filled(self) -> None:
        # Buckets are sent in the same order on all ranks, whatever order they fill in.
        while self._waiting and not self._missing[self._waiting[0]]:
            self._send_next()

    def _send_next(self) -> None:
        index = self._waiting.pop(0)
        self._messages[index] = self._send(index)

    def _finish_messages(self) -> None:
        if self._phase == "accumulating":
            # Other ranks may have late gradients in other buckets, so it is all or none.
            self._waiting = [it for it in range(len(self._buckets)) if self._late or it not in self._sent]
        while self._waiting:
            self._send_next()
        self._wait_for_messages()

    def _wait_for_messages(self) -> None:
        for message in self._messages.values():
            message.wait()
        self._messages, self._sent, self._late = {}, set(), set()


def _call(method: "WeakMethod[Any]", argument: Any) -> None:
    """Call the method if its object still exists."""
    bound = method()
    if bound is not None:
        bound(argument)


class UsedParameters:
    """Agrees across ranks on the parameters that a step updates, with a message after the gradients.

    As in torch, an optimizer skips parameters without a gradient.

    A rank that uses all parameters knows the answer without reading it, which would be a wait on an accelerator. On XLA
    nothing is sent: all ranks record one graph, so they have gradients of the same parameters.

    Args:
        parameters: the parameters, the same and in the same order on all ranks.
        groups: the groups whose ranks are combined.
    """

    def __init__(self, parameters: Sequence[Tensor], groups: Sequence[Group]) -> None:
        self._parameters = parameters
        sends = bool(parameters) and not is_lazy_device(parameters[0])
        self._groups = [group for group in groups if sends and group.size > 1]
        self._used_here: Set[int] = set()
        self._pending: Pending[Tensor] | None = None

    def send(self, used_here: Set[int]) -> None:
        """Start sending which parameters (by id) have a gradient here. Called after every gradient was sent."""
        self._used_here = used_here
        if not self._groups:
            return
        if self._pending is not None:  # from an earlier round of the step, which this one includes
            self._pending.wait()
        flags = torch.tensor([id(p) in used_here for p in self._parameters], dtype=torch.uint8)
        flags = flags.to(self._parameters[0].device)
        self._pending = all_reduce_(flags, self._groups[0], op="max", async_op=True)

    def anywhere(self) -> Set[int]:
        """Ids of the parameters that have a gradient on some rank, after the last `send`."""
        if self._pending is None:
            return self._used_here
        flags = self._pending.wait()
        self._pending = None
        for group in self._groups[1:]:
            flags = all_reduce_(flags, group, op="max")
        if len(self._used_here) < len(self._parameters):
            self._used_here = {id(p) for p, flag in zip(self._parameters, flags.tolist(), strict=True) if flag}
        return self._used_here
