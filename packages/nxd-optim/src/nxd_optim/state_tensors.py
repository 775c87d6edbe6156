"""The states of an optimizer as logical tensors, for checkpoints that load at any layout.

A state has one value per element, and is cut like the weight; or one value per parameter, such as a step count. States
with one value per row or column of a logical tensor are those of optimizers with `factored_shapes`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from nxd_state import Box, get_shard_spec
from torch import Tensor
from torch.optim import Optimizer

from nxd_optim.flat_shards import StateShard
from nxd_optim.updated_parts import UpdatedRange

StoredStates = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape by key


@dataclass(frozen=True, eq=False)
class StateTensor:
    """One state of one parameter, of which this rank owns some elements.

    Attributes:
        parameter: the model's parameter.
        key: key of the state, such as "exp_avg", or "master_weight".
        shards: the elements owned, if the state has one value per element. Every element has one owner among the
            ranks that share states; padding of the parameter has none. A state of rows or columns is whole on each rank
            that owns elements of its logical tensor.
        scalar: the state, if it has one value for the parameter, such as "step"; the same on all its owners.
    """

    parameter: Tensor
    key: str
    shards: tuple[StateShard, ...] = ()
    scalar: Tensor | None = None


def states_of_part(optimizer: Optimizer, it: UpdatedRange, states: Mapping[str, Tensor]) -> list[StateTensor]:
    """Return the states of one weight, which share memory with the optimizer.

    Args:
        optimizer: the optimizer of the weight.
        it: the weight.
        states: its states by the optimizer's keys.
    """
    found = []
    for own_key, tensor in states.items():
        key = own_key.partition(":")[0]
        if key in _factored_shapes(optimizer):
            names = {factored_key(key, it.parameter, name): name for name in _logical_names(it.parameter)}
            shape = tuple(tensor.shape)
            shard = StateShard(names[own_key], shape, Box((0,) * len(shape), shape), tensor)
            found.append(StateTensor(it.parameter, key, shards=(shard,)))
        elif tensor.shape == it.weight.shape:
            found.append(StateTensor(it.parameter, own_key, shards=it.shards_of(tensor)))
        else:
            found.append(StateTensor(it.parameter, own_key, scalar=tensor))
    return found


def zeros_of_part(optimizer: Optimizer, it: UpdatedRange, stored: StoredStates) -> dict[str, Tensor]:
    """Return zeros for the stored states of one weight, by the optimizer's keys.

    All states of a parameter that is a scalar have the weight's shape.

    Args:
        optimizer: the optimizer of the weight.
        it: the weight.
        stored: the stored states.
    """
    zeros: dict[str, Tensor] = {}
    for key, (dtype, shape) in stored.items():
        factored_shape = _factored_shapes(optimizer).get(key)
        if factored_shape is not None:
            held = {shard.name: shard.logical_shape for shard in it.shards_of(it.weight.detach())}
            for name, logical_shape in held.items():
                own_key = factored_key(key, it.parameter, name)
                zeros[own_key] = torch.zeros(factored_shape(logical_shape), dtype=dtype, device=it.weight.device)
        elif shape or not it.parameter.dim():
            zeros[key] = torch.zeros_like(it.weight, dtype=dtype, requires_grad=False)
        else:
            zeros[key] = torch.zeros((), dtype=dtype)
    return zeros


def factored_key(key: str, parameter: Tensor, name: str) -> str:
    """Return the optimizer's key for a state of rows or columns: that of torch, unless a parameter has several.

    Args:
        key: torch's key, such as "row_var".
        parameter: the parameter.
        name: name of its logical tensor, as in `ShardPiece`.
    """
    return key if len(_logical_names(parameter)) == 1 else f"{key}:{name}"


def _logical_names(parameter: Tensor) -> list[str]:
    spec = get_shard_spec(parameter)
    return [""] if spec is None else list(spec.logical_shapes)


def _factored_shapes(optimizer: Optimizer) -> Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Return by key the function from a logical tensor's shape to that of its state, for states of rows or columns."""
    return getattr(optimizer, "factored_shapes", {})
