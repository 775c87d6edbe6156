"""Averages a pipeline's gradients over the replicas: by an optimizer, or here if no optimizer does it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol
from weakref import ref

import torch
from nxd_state import (
    active_group,
    all_reduce,
    check_same_start,
    is_lazy_device,
    model_parallel_is_initialized,
    splits_experts,
)
from nxd_state.parameter_marks import is_expert
from torch import Tensor, nn


class GradientSync(Protocol):
    """An object that averages gradients over the replicas of a model, such as an optimizer of nxd_optim."""

    def backward_of(self, parameters: Sequence[Tensor], last: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a block for a backward of a `run_train`, in which gradients may be sent.

        Args:
            parameters: the parameters to whose gradients it adds.
            last: those that get their last gradient in it.
        """

    def synchronize(self) -> None:
        """Wait until all gradients are averaged."""

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward, by which the object later divides the gradients."""


class GradientSyncs:
    """The objects that average the gradients of one pipeline; none of them is kept alive.

    Args:
        model: the whole model.
        optimizer_averages: whether an optimizer averages the gradients after `run_train`.
    """

    def __init__(self, model: nn.Module, *, optimizer_averages: bool) -> None:
        self._known: list[tuple[ref[GradientSync], set[int]]] = []  # with the ids of their parameters
        self._is_on = True
        self._optimizer_averages = optimizer_averages
        self._splits_experts = _has_split_experts(model)
        self._has_compared = False

    def add(self, sync: GradientSync, parameters: Iterable[Tensor]) -> None:
        """Let `sync` average the gradients of these parameters, replacing an earlier one."""
        own = {id(parameter) for parameter in parameters}
        for known, theirs in self._known:
            if known() is sync:
                own |= theirs
        self._known = [
            (known, theirs) for known, theirs in self._known if known() not in (None, sync) and theirs.isdisjoint(own)
        ]
        self._known.append((ref(sync), own))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a block in which nothing is averaged."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def active(self) -> list[GradientSync]:
        """Return those that average the gradients of the next run."""
        return [sync for it, _ in self._known if (sync := it()) is not None] if self._is_on else []

    def backward_of(self, parameters: Sequence[Tensor], last: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return the block of the only active object; several would send in an order that may differ between ranks."""
        syncs = self.active()
        return syncs[0].backward_of(parameters, last) if len(syncs) == 1 else nullcontext()

    def synchronize(self) -> None:
        """Wait until all gradients of the run are averaged."""
        for sync in self.active():
            sync.synchronize()

    def loss_scale(self) -> float:
        """Return the factor of losses before backward, also if nothing is averaged yet.

        Raises:
            ValueError: the optimizers of one model scale losses differently.
        """
        scales = {sync.loss_scale for it, _ in self._known if (sync := it()) is not None}
        if len(scales) > 1:
            raise ValueError(
                f"the optimizers of this model scale its loss by {sorted(scales)}, but it has one loss; use one "
                "optimizer, or optimizers without loss scaling"
            )
        return scales.pop() if scales else 1.0

    def must_average(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the next run must average gradients itself; the first such run compares the weights.

        Args:
            parameters: this rank's parameters.

        Raises:
            ValueError: the mesh splits experts, or ranks that should hold the same weights have different ones.
        """
        if self._optimizer_averages or not self._is_on or self.active():
            return False
        if self._splits_experts:
            raise ValueError(
                "no optimizer averages the gradients of experts, which are sums over the tokens of all their ranks; "
                "use initialize_parallel_optimizer, or NxDPPModel(use_optimizer_wrapper=True) and "
                "an optimizer or GradientReducer of nxd_optim"
            )
        if not self._has_compared:  # before a stage can fail: only its pipeline learns of that
            check_same_start(parameters)
            self._has_compared = True
        return True


@torch.no_grad()
def average_over_replicas(parameters: Iterable[Tensor]) -> None:
    """Average gradients over the data- and context-parallel ranks, parameter by parameter; called by all of them.

    A parameter with a gradient on some of them counts as zero on the others. Not for models whose experts the mesh
    splits: only an optimizer averages these correctly.

    Args:
        parameters: the parameters, in the same order on all of these ranks.
    """
    if not model_parallel_is_initialized() or active_group("dp", "cp").size == 1:
        return
    replicas = active_group("dp", "cp")
    averaged = [it for it in parameters if it.requires_grad]
    if not averaged:
        return
    has_gradient = [it.grad is not None for it in averaged]
    if not is_lazy_device(averaged[0]):  # there all ranks record one graph, and reading a value would cut it
        flags = torch.tensor(has_gradient, dtype=torch.int32, device=averaged[0].device)
        has_gradient = all_reduce(flags, replicas, op="max").bool().tolist()
    for parameter, is_wanted in zip(averaged, has_gradient, strict=True):
        if is_wanted:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient.copy_(all_reduce(gradient, replicas, op="avg"))
            parameter.grad = gradient


def _has_split_experts(model: nn.Module) -> bool:
    """Whether the mesh splits experts of the model; the same on all ranks."""
    if not model_parallel_is_initialized() or not splits_experts():
        return False
    return any(map(is_expert, model.parameters()))
