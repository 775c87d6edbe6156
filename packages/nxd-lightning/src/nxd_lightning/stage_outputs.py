"""Sends the output of a pipeline's last stage to the ranks of all stages."""

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import all_gather_object, broadcast, get_device, get_group
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class _Layout:
    """A placeholder for a tensor, which is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def output_of_last_stage(output: Any) -> Any:
    """Return the last stage's output on every rank of its pipeline. Called by all of them.

    Args:
        output: on the last stage tensors, in tuples, lists, dicts or transformers outputs, and other values that can be
            pickled; elsewhere anything, such as None. Without a pipeline it is returned.

    Returns:
        The same structure, with tensors on this rank's device.

    Raises:
        TypeError: on every rank: a value cannot be pickled.
    """
    stages = get_group("pp")
    if stages.size == 1:
        return output
    last = stages.size - 1
    leaves, structure = tree_flatten(output if stages.rank == last else None)
    described = [_Layout(tuple(it.shape), it.dtype) if isinstance(it, Tensor) else it for it in leaves]
    try:
        message, failure = pickle.dumps((described, structure)), None
    except Exception as error:  # pickling may raise anything, and all ranks must be told
        message, failure = b"", error
    received, failed = all_gather_object((message, None if failure is None else str(failure)), stages)[last]
    if failed is not None:
        raise TypeError(
            f"the last stage's output cannot be sent to the other stages: {failed}; return tensors and plain "
            "values, or override predict_step"
        ) from failure
    layouts, structure = pickle.loads(received)  # of a rank of this job, which runs the same script
    values = [
        _sent(leaves[index] if stages.rank == last else None, it) if isinstance(it, _Layout) else it
        for index, it in enumerate(layouts)
    ]
    return tree_unflatten(values, structure)


def _sent(tensor: Tensor | None, layout: _Layout) -> Tensor:
    stages = get_group("pp")
    if tensor is None:
        mine = torch.empty(layout.shape, dtype=layout.dtype, device=get_device())
    else:
        mine = tensor.detach().to(get_device()).contiguous()
    return broadcast(mine, stages, source=stages.size - 1)
