"""The optimizer's states as boxes of logical tensors: the form that checkpoints keep and every layout can load.

The caller handles names of parameters, files, and filling the tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from nxd_state import Box, get_shard_spec
from torch import Tensor

from nxd_optim.load_states import give_states, state_tensor
from nxd_optim.zero1.buckets import Parts
from nxd_optim.zero1.flat_bucket import OwnRange
from nxd_optim.zero1.logical_pieces import pieces_of_flat_range, whole_spec

MASTER_KEY = "master_weight"

StoredKeys = Callable[[Tensor], Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]


@dataclass(frozen=True, eq=False)
class StateShard:
    """One box of one state of a logical tensor.

    Attributes:
        name: of the logical tensor, as of the parameter's `ShardPiece`; "" is the parameter's own.
        logical_shape: shape of the whole logical tensor.
        box: the elements that this rank owns.
        tensor: their state, of the box's shape; shares memory with the optimizer.
    """

    name: str
    logical_shape: tuple[int, ...]
    box: Box
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class StateTensor:
    """One state of one parameter, of which this rank owns some elements.

    Attributes:
        parameter: the model's.
        key: such as "exp_avg", or "master_weight".
        shards: the elements owned, if the state has one value per element. Every element has one owner among the
            ranks that share states; padding of the parameter has none.
        scalar: the state, if it has one value for the parameter, such as "step". All its owners hold the same.
    """

    parameter: Tensor
    key: str
    shards: tuple[StateShard, ...] = ()
    scalar: Tensor | None = None


def logical_state(parts: Parts, *, with_masters: bool) -> list[StateTensor]:
    """All states of this rank.

    Raises:
        ValueError: a state is neither a tensor nor a number.
    """
    found = []
    for bucket, base in parts:
        for own in bucket.ranges:
            if with_masters and bucket.has_masters and not bucket.has_stale_master(own.parameter):
                found.append(StateTensor(own.parameter, MASTER_KEY, shards=_shards(own, own.weight.detach())))
            for key, value in base.state.get(own.weight, {}).items():
                tensor = state_tensor(value, key, f"a parameter of shape {tuple(own.parameter.shape)}")
                if tensor.shape == own.weight.shape:
                    found.append(StateTensor(own.parameter, key, shards=_shards(own, tensor)))
                else:
                    found.append(StateTensor(own.parameter, key, scalar=tensor))
    return found


def _shards(own: OwnRange, flat: Tensor) -> tuple[StateShard, ...]:
    return shards_of_range(own.parameter, own.start, own.stop, flat)


def allocate_state(parts: Parts, stored: StoredKeys, *, with_masters: bool) -> None:
    """Give every owned range zeros for the states that `stored` says there are of its parameter.

    Master weights that are not among them, or not wanted, are marked to be taken from the parameters.
    """
    for bucket, base in parts:
        bucket.mark_masters_stale(p for p in bucket.parameters if not (with_masters and MASTER_KEY in stored(p)))
        give_states(base, {own.weight: _zeros(own, stored(own.parameter)) for own in bucket.ranges})


def _zeros(own: OwnRange, stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """For each state; of a parameter that is a scalar, all have one element, as its range does."""
    is_scalar = not own.parameter.dim()
    return {
        key: torch.zeros_like(own.weight, dtype=dtype, requires_grad=False)
        if shape or is_scalar
        else torch.zeros((), dtype=dtype)
        for key, (dtype, shape) in stored.items()
        if key != MASTER_KEY
    }


def shards_of_range(parameter: Tensor, start: int, stop: int, flat: Tensor) -> tuple[StateShard, ...]:
    """The boxes of logical tensors that elements `start` to `stop` of a parameter, in C order, lie in.

    Args:
        parameter: with its `ShardSpec`, if it has one.
        start: first element.
        stop: one past the last.
        flat: what there is for these elements, 1-d; the shards are views of it.
    """
    spec = get_shard_spec(parameter) or whole_spec(parameter.shape, copies=1)
    pieces = pieces_of_flat_range(spec, start, stop)
    return tuple(StateShard(piece.name, piece.logical_shape, piece.logical, piece.view(flat)) for piece in pieces)
