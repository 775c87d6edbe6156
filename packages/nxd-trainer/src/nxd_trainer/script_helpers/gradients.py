"""Reductions of gradients that scripts without `initialize_parallel_optimizer` call themselves."""

from collections.abc import Iterable

import torch
from nxd_optim import reduce_sequence_parallel_gradients
from nxd_state import all_reduce_, get_group
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def bucket_allreduce_gradients(grads_list: Iterable[Tensor]) -> None:
    """Average gradients over the replicas, in place: one message for each dtype.

    Args:
        grads_list: the same, in the same order, on every replica.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in grads_list:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce_(flat, get_group("dp"), op="avg")
        for gradient, values in zip(gradients, flat.split([it.numel() for it in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))


def allreduce_sequence_parallel_gradients(optimizer: Optimizer) -> None:
    """Add up, over the tensor-parallel ranks, the gradients of an optimizer's sequence-parallel parameters."""
    reduce_sequence_parallel_gradients(
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
    )
