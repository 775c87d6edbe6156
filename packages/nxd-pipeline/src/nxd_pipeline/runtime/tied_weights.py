"""Weights that stages on several ranks share: each rank has a copy, and the copies get the sum of their gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from nxd_state import Group, Receive, Send, batch_isend_irecv
from torch import Tensor, nn

from nxd_pipeline.partition.stage import Stage


@dataclass(frozen=True)
class TiedWeight:
    """A parameter of this rank that other ranks of the pipeline hold, too.

    Attributes:
        parameter: this rank's copy.
        pipeline_ranks: the ranks that hold it, ascending; the first holds the copy that is saved and counted.
    """

    parameter: nn.Parameter
    pipeline_ranks: tuple[int, ...]


class TiedWeights:
    """The tied weights of one pipeline rank."""

    def __init__(self, stages: Sequence[Stage], rank_of_stage: Sequence[int], group: Group) -> None:
        """Finds, by identity, the parameters that stages on several ranks use.

        All ranks must build it from the same model. The first rank's values go to the other copies, which are marked
        as `shared`, so that a gradient norm counts the weight once.

        Args:
            stages: those of the whole model.
            rank_of_stage: the pipeline rank of each stage.
            group: the pipeline-parallel group.
        """
        holders: dict[nn.Parameter, set[int]] = {}
        for stage, rank in zip(stages, rank_of_stage, strict=True):
            for parameter in stage.module.parameters():
                holders.setdefault(parameter, set()).add(rank)
        self._group = group
        self.weights = tuple(
            TiedWeight(parameter, tuple(sorted(ranks)))
            for parameter, ranks in holders.items()
            if len(ranks) > 1 and group.rank in ranks
        )
        for weight in self.weights:
            weight.parameter.shared = group.rank != weight.pipeline_ranks[0]  # type: ignore[attr-defined]
            if not weight.parameter.is_meta:
                copies = self._exchange(weight, weight.parameter.detach())
                weight.parameter.detach().copy_(copies[0])

    @contextmanager
    def gradients_summed(self) -> Iterator[None]:
        """Adds to each copy's gradient what the body adds to the gradient of all copies."""
        before = [_take_gradient(weight.parameter) for weight in self.weights]
        yield
        for weight, gradient in zip(self.weights, before, strict=True):
            if weight.parameter.requires_grad:
                self._sum(weight, gradient)

    def _sum(self, weight: TiedWeight, before: Tensor | None) -> None:
        made = weight.parameter.grad
        copies = self._exchange(weight, torch.zeros_like(weight.parameter) if made is None else made)
        total = copies[0].clone()
        for copy in copies[1:]:  # in the order of ranks, so that all copies get the same bits
            total += copy
        if before is not None:
            total += before
        if made is None:
            weight.parameter.grad = total
        else:
            made.copy_(total)

    def _exchange(self, weight: TiedWeight, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks that hold the weight, in their order."""
        mine = tensor.detach().contiguous()
        copies = [mine if rank == self._group.rank else torch.empty_like(mine) for rank in weight.pipeline_ranks]
        messages: list[Send | Receive] = []
        for rank, copy in zip(weight.pipeline_ranks, copies, strict=True):
            if rank != self._group.rank:
                messages += [Send(mine, rank), Receive(copy, rank)]
        for pending in batch_isend_irecv(messages, self._group):
            pending.wait()
        return copies


def _take_gradient(parameter: Tensor) -> Tensor | None:
    """A copy of the gradient, which is zero afterwards; it stays in its memory, which may be a bucket's."""
    if parameter.grad is None:
        return None
    gradient = parameter.grad.clone()
    parameter.grad.zero_()
    return gradient
