"""The average of gradients over the replicas of a model, where no optimizer is known that makes it."""

from collections.abc import Iterable

import torch
from nxd_state import active_group, all_reduce, model_parallel_is_initialized, records_graphs, splits_experts
from torch import Tensor, nn


@torch.no_grad()
def average_over_replicas(parameters: Iterable[Tensor]) -> None:
    """Average gradients over the data- and context-parallel ranks, parameter by parameter; called by all of them.

    A parameter with a gradient on some of them counts as zero on the others. Not for models of which the mesh splits
    experts: what the gradients of these are depends on whoever steps them.

    Args:
        parameters: the same on all of these ranks, in the same order.
    """
    if not model_parallel_is_initialized() or active_group("dp", "cp").size == 1:
        return
    replicas = active_group("dp", "cp")
    averaged = [it for it in parameters if it.requires_grad]
    if not averaged:
        return
    has_gradient = [it.grad is not None for it in averaged]
    if not records_graphs(averaged[0]):  # where all record one graph, and reading a value would cut it
        flags = torch.tensor(has_gradient, dtype=torch.int32, device=averaged[0].device)
        has_gradient = all_reduce(flags, replicas, op="max").bool().tolist()
    for parameter, is_wanted in zip(averaged, has_gradient, strict=True):
        if is_wanted:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient.copy_(all_reduce(gradient, replicas, op="avg"))
            parameter.grad = gradient


def has_split_experts(layers: Iterable[nn.Module]) -> bool:
    """Whether the mesh splits experts of layers; asked of the whole model, the same on all ranks."""
    if not model_parallel_is_initialized() or not splits_experts():
        return False
    return any(getattr(it, "expert_model_parallel", False) for layer in layers for it in layer.parameters())
