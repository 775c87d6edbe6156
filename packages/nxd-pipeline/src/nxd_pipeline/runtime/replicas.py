"""The average of gradients over the replicas of a model, where no optimizer is known that makes it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from nxd_state import Group, active_group, all_reduce, model_parallel_is_initialized, records_graphs, splits_experts
from torch import Tensor


@contextmanager
def averaged_over_replicas(parameters: Iterable[Tensor], only_experts: bool = False) -> Iterator[None]:
    """Average gradients over the data- and context-parallel ranks at the end of the block; called by all of them.

    A parameter with a gradient on some of them counts as zero on the others. Gradients of experts that the mesh splits
    are sums over the tokens of all these ranks, and become the mean over them; what such a parameter had before the
    block is kept beside it, and added: it is such a mean already.

    Args:
        parameters: the same on all of these ranks, in the same order.
        only_experts: leave those of dense layers to a later block, which averages all that they have then.
    """
    if not model_parallel_is_initialized() or active_group("dp", "cp").size == 1:
        yield
        return
    trained = [it for it in parameters if it.requires_grad]
    replicas = active_group("dp", "cp")
    experts = [it for it in trained if splits_experts() and getattr(it, "expert_model_parallel", False)]
    earlier = [it.grad for it in experts]
    for parameter in experts:
        parameter.grad = None
    yield
    among = set(experts)
    if not only_experts:
        _average([it for it in trained if it not in among], replicas)
    if experts:
        same_experts = active_group("dp_exp")
        _average(experts, same_experts, scale=same_experts.size / replicas.size)
    for parameter, gradient in zip(experts, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad


@torch.no_grad()
def _average(parameters: Sequence[Tensor], replicas: Group, scale: float = 1.0) -> None:
    if not parameters:
        return
    has_gradient = [it.grad is not None for it in parameters]
    if not records_graphs(parameters[0]):  # where all record one graph, and reading a value would cut it
        flags = torch.tensor(has_gradient, dtype=torch.int32, device=parameters[0].device)
        has_gradient = all_reduce(flags, replicas, op="max").bool().tolist()
    for parameter, is_wanted in zip(parameters, has_gradient, strict=True):
        if is_wanted:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient.copy_(all_reduce(gradient, replicas, op="avg") * scale)
            parameter.grad = gradient
