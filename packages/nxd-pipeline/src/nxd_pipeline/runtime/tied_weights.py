"""Weights that stages on several ranks share: each rank has a copy, and the copies get the sum of their gradients.

Equal gradients are not enough to keep copies bitwise equal: replicas average them in buckets whose contents, and so
the order of sums, differ between stages, and ZeRO updates them in parts of different sizes. So the first copy is the
weight, and the others are set to its values before use.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from nxd_state import (
    Group,
    Receive,
    Send,
    all_gather_object,
    batch_isend_irecv,
    is_lazy_device,
    transport_device,
    whole_parameters,
)
from nxd_state.parameter_marks import mark_tied_over_stages
from torch import Tensor, nn

from nxd_pipeline.partition.stage import Stage


@dataclass(frozen=True)
class TiedWeight:
    """A parameter of this rank that other ranks of the pipeline hold, too.

    Attributes:
        module: a module of this rank that has the parameter.
        name: name of the parameter in `module`.
        pipeline_ranks: the ranks that hold it, ascending; the first holds the copy that is saved and counted.
    """

    module: nn.Module
    name: str
    pipeline_ranks: tuple[int, ...]

    @property
    def parameter(self) -> nn.Parameter:
        """This rank's copy, read from its module, which may wait for values that are still arriving."""
        parameter: nn.Parameter = getattr(self.module, self.name)
        return parameter


class TiedWeights:
    """The tied weights of one pipeline rank."""

    def __init__(self, stages: Sequence[Stage], rank_of_stage: Sequence[int], group: Group) -> None:
        """Find, by identity, the parameters that stages on several ranks use.

        All ranks must pass stages of the same model. The first rank's values are sent to the other copies, which are
        marked as `shared`, so that a gradient norm counts the weight once; all are marked as `summed_over_stages`, so
        that an optimizer that accumulates gradients elsewhere leaves theirs in `.grad` until it sends them.

        Args:
            stages: stages of the whole model.
            rank_of_stage: the pipeline rank of each stage.
            group: the pipeline-parallel group.
        """
        holders: dict[nn.Parameter, set[int]] = {}
        places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
        for stage, rank in zip(stages, rank_of_stage, strict=True):
            for module in stage.module.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    holders.setdefault(parameter, set()).add(rank)
                    if rank == group.rank:
                        places.setdefault(parameter, (module, name))
        self._group = group
        self._device = transport_device(group)  # for messages about weights; weights stay on their device
        self.weights = tuple(
            TiedWeight(*places[parameter], tuple(sorted(ranks)))
            for parameter, ranks in holders.items()
            if len(ranks) > 1 and group.rank in ranks
        )
        self._begin(self.weights)

    def add(self, places: Mapping[str, tuple[nn.Module, str]]) -> None:
        """Tie parameters that were added to modules which several ranks hold, such as adapters. Called by all ranks.

        Args:
            places: this rank's parameters by their name in the whole model: their module, and their name there.
        """
        tied = {weight.parameter for weight in self.weights}
        names_of_ranks = all_gather_object(sorted(places), self._group)
        added = []
        for name in sorted(places):
            ranks = tuple(rank for rank, names in enumerate(names_of_ranks) if name in names)
            weight = TiedWeight(*places[name], ranks)
            if len(ranks) > 1 and weight.parameter not in tied:
                added.append(weight)
        self.weights = (*self.weights, *added)
        self._begin(added)

    def _begin(self, weights: Sequence[TiedWeight]) -> None:
        for weight in weights:
            mark_tied_over_stages(weight.parameter, is_copy=self._group.rank != weight.pipeline_ranks[0])
        self._send_first(weight for weight in weights if not weight.parameter.is_meta)

    def synchronize(self) -> None:
        """Set all copies of trained weights to the values of the first. Called by all ranks of the pipeline.

        Raises:
            ValueError: a weight is frozen on only some of its ranks.
        """
        self._check_frozen_alike()
        trained = [weight for weight in self.weights if weight.parameter.requires_grad]
        with whole_parameters([weight.parameter for weight in trained], changed=True):
            self._send_first(trained)

    def _send_first(self, weights: Iterable[TiedWeight]) -> None:
        messages: list[Send | Receive] = []
        received: list[tuple[Tensor, Tensor]] = []
        for weight in weights:
            copy = weight.parameter.detach()
            first, *others = weight.pipeline_ranks
            if self._group.rank == first:
                messages += [Send(copy.contiguous(), rank) for rank in others]
            else:
                received.append((copy, torch.empty_like(copy, memory_format=torch.contiguous_format)))
                messages.append(Receive(received[-1][1], first))
        self._wait_for(messages)
        for copy, values in received:
            copy.copy_(values)

    @contextmanager
    def gradients_summed(self) -> Iterator[None]:
        """Add to each copy's gradient the sum of the gradients that the body adds to all copies.

        A weight that no rank uses in the body keeps a gradient of None, so that optimizers skip it; except on XLA,
        where it gets zeros, as all steps are to be the same graph.
        """
        before = [_take_gradient(weight.parameter) for weight in self.weights]
        yield
        for weight, gradient, is_used in zip(self.weights, before, self._used_by_any_rank(), strict=True):
            if weight.parameter.requires_grad and is_used:
                self._sum(weight, gradient)

    def _used_by_any_rank(self) -> list[bool]:
        """Whether a rank that holds a weight has a gradient of it, for each of the weights."""
        if is_lazy_device():
            return [True] * len(self.weights)
        is_used = [weight.parameter.grad is not None for weight in self.weights]
        for _, there in self._answers_of_peers(is_used):
            is_used = [is_used[number] or there.get(number, False) for number in range(len(is_used))]
        return is_used

    def _check_frozen_alike(self) -> None:
        """Raise if ranks disagree about which weights are trained: they would wait for messages that never come."""
        is_trained = [weight.parameter.requires_grad for weight in self.weights]
        for peer, there in self._answers_of_peers(is_trained):
            if any(is_trained[number] != answer for number, answer in there.items()):
                raise ValueError(
                    f"a tied weight is frozen on only one of the pipeline ranks {self._group.rank} and {peer}; the "
                    "copies have different names (see tied_names): set requires_grad to the same value on both"
                )

    def _answers_of_peers(self, own: Sequence[bool]) -> list[tuple[int, dict[int, bool]]]:
        """Send a yes or no for each of the weights to the ranks that hold it, too.

        Returns:
            Each of these ranks, and its answers by the numbers of the weights that it holds.
        """
        peers = sorted({rank for weight in self.weights for rank in weight.pipeline_ranks} - {self._group.rank})
        messages: list[Send | Receive] = []
        received: list[tuple[int, list[int], Tensor]] = []
        for peer in peers:
            shared = [number for number, weight in enumerate(self.weights) if peer in weight.pipeline_ranks]
            answers = torch.tensor([own[number] for number in shared], device=self._device)
            received.append((peer, shared, torch.empty_like(answers)))
            messages += [Send(answers, peer), Receive(received[-1][-1], peer)]
        self._wait_for(messages)
        return [(peer, dict(zip(shared, answers.tolist(), strict=True))) for peer, shared, answers in received]

    def _wait_for(self, messages: Sequence[Send | Receive]) -> None:
        for pending in batch_isend_irecv(messages, self._group):
            pending.wait()

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
        """Return the tensors of all ranks that hold the weight, in the order of ranks."""
        mine = tensor.detach().contiguous()
        copies = [mine if rank == self._group.rank else torch.empty_like(mine) for rank in weight.pipeline_ranks]
        messages: list[Send | Receive] = []
        for rank, copy in zip(weight.pipeline_ranks, copies, strict=True):
            if rank != self._group.rank:
                messages += [Send(mine, rank), Receive(copy, rank)]
        self._wait_for(messages)
        return copies


def _take_gradient(parameter: Tensor) -> Tensor | None:
    """Return a copy of the gradient and set it to zero in its memory, which may be a bucket's."""
    if parameter.grad is None:
        return None
    gradient = parameter.grad.clone()
    parameter.grad.zero_()
    return gradient
