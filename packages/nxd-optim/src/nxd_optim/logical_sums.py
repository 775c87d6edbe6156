"""Sums over the elements of logical tensors of which each rank holds parts.

A rank adds what its parts contribute, and one message for all tensors adds the ranks. Tensors that no two ranks share
are summed here alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, prod

import torch
from nxd_state import Group, active_group, all_gather_object, all_reduce_, get_shard_spec, splits_experts
from nxd_state.parameter_marks import is_expert
from torch import Tensor

from nxd_optim.flat_shards import StateShard
from nxd_optim.updated_parts import UpdatedRange


@dataclass(frozen=True, order=True)
class LogicalKey:
    """Names a logical tensor on all ranks that hold parts of it.

    Attributes:
        parameter: index of the parameter, the same on all ranks.
        name: name of the logical tensor, as in `ShardPiece`.
        ep_rank: the expert-parallel rank that holds it, for experts without shard metadata; otherwise 0.
    """

    parameter: int
    name: str
    ep_rank: int = 0


@dataclass(frozen=True, eq=False)
class LogicalPart:
    """One box of a logical tensor that this rank updates.

    Attributes:
        key: the logical tensor.
        shard: the box, with its values.
        copies: number of ranks that update these elements.
    """

    key: LogicalKey
    shard: StateShard
    copies: int


def logical_parts(index: int, it: UpdatedRange, tensor: Tensor) -> list[LogicalPart]:
    """Return a tensor of the weight's shape as parts of logical tensors, which share its memory.

    Args:
        index: index of the parameter, the same on all ranks.
        it: the weight.
        tensor: the tensor.
    """
    shards = it.shards_of(tensor)
    if get_shard_spec(it.parameter) is not None:
        return [LogicalPart(LogicalKey(index, shard.name), shard, shard.copies) for shard in shards]
    is_split_by_experts = splits_experts() and is_expert(it.parameter)
    copies = active_group("etp" if is_split_by_experts else "tp").size
    key = LogicalKey(index, "", active_group("ep").rank if is_split_by_experts else 0)
    return [LogicalPart(key, shard, copies) for shard in shards]


class LogicalSums:
    """Sums of squares over logical tensors: of weights and updates, and of gradients by row and by column.

    Rows and columns are those of the last two dims; tensors with fewer dims have none.

    Args:
        shapes: shapes of the logical tensors, the same on all ranks of the group.
        group: the ranks to add; None for tensors that this rank holds whole.
        like: a tensor of the dtype and device of the sums.
    """

    def __init__(self, shapes: Mapping[LogicalKey, tuple[int, ...]], group: Group | None, like: Tensor) -> None:
        self._shapes, self._group = dict(shapes), group
        self._positions = {key: position for position, key in enumerate(shapes)}
        factored = {key: shape for key, shape in shapes.items() if len(shape) > 1}
        places = [(key, of(shape)) for key, shape in factored.items() for of in (row_shape, column_shape)]
        sizes = [len(shapes), *(prod(shape) for _, shape in places)]
        self._first = like.new_zeros(sum(sizes))  # all that is added before the updates are known
        self._weights, *sums = self._first.split(sizes)
        views = [it.view(shape) for it, (_, shape) in zip(sums, places, strict=True)]
        self._rows = dict(zip(factored, views[::2], strict=True))
        self._columns = dict(zip(factored, views[1::2], strict=True))
        self._updates = like.new_zeros(len(shapes))

    def add_weight(self, part: LogicalPart) -> None:
        """Add the squares of a part's weights."""
        self._weights[self._positions[part.key]] += self._share(part, self._norm(part.shard.tensor))

    def add_gradient(self, part: LogicalPart) -> None:
        """Add the squares of a part's gradient to the sums of its rows and columns, if it has them."""
        if part.key in self._rows:
            *stack, rows, columns = part.shard.box.slices
            every = slice(None)
            for sums, box, dim in (
                (self._rows[part.key], (*stack, rows, every), -1),
                (self._columns[part.key], (*stack, every, columns), -2),
            ):
                sums[box] += self._share(part, self._norm(part.shard.tensor, dim))

    def add_update(self, part: LogicalPart, update: Tensor) -> None:
        """Add the squares of a part's update."""
        self._updates[self._positions[part.key]] += self._share(part, self._norm(update))

    def add_weights_and_gradients_of_ranks(self) -> None:
        """Add the ranks' sums over weights and gradients, in one message. Called by all ranks."""
        if self._shapes and self._group is not None:
            all_reduce_(self._first, self._group)

    def add_updates_of_ranks(self) -> None:
        """Add the ranks' sums over updates, in one message. Called by all ranks."""
        if self._shapes and self._group is not None:
            all_reduce_(self._updates, self._group)

    def row_means(self, key: LogicalKey) -> Tensor:
        """Return the mean square of each row of a gradient, `[..., rows, 1]`."""
        return self._rows[key] / self._shapes[key][-1]

    def column_means(self, key: LogicalKey) -> Tensor:
        """Return the mean square of each column of a gradient, `[..., 1, columns]`."""
        return self._columns[key] / self._shapes[key][-2]

    def sizes(self) -> dict[LogicalKey, tuple[float, float, int]]:
        """Return for each tensor the sums over weights and updates, and the number of elements."""
        sums = zip(self._weights.tolist(), self._updates.tolist(), strict=True)
        return {key: (*both, prod(self._shapes[key])) for key, both in zip(self._shapes, sums, strict=True)}

    def _share(self, part: LogicalPart, norms: Tensor) -> Tensor:
        """Return the squares of norms, divided by the number of ranks that add them."""
        squares = norms.square_()
        return squares if self._group is None else squares.div_(part.copies)

    def _norm(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        return torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None, dtype=self._first.dtype)


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a value for each row of a logical tensor."""
    return (*shape[:-1], 1)


def column_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a value for each column of a logical tensor."""
    return (*shape[:-2], 1, shape[-1])


@dataclass(frozen=True)
class SharedShapes:
    """The shapes of the logical tensors of which a group's ranks hold parts.

    Attributes:
        shared: tensors of which several ranks hold different parts, the same on all ranks of the group.
        own: tensors that this rank holds whole.
        dtype: the widest dtype of the ranks' weights, at least float32.
    """

    shared: dict[LogicalKey, tuple[int, ...]]
    own: dict[LogicalKey, tuple[int, ...]]
    dtype: torch.dtype

    @classmethod
    def find(cls, parts: Iterable[LogicalPart], num_parameters: int, group: Group) -> "SharedShapes":
        """Find them. Called by all ranks of the group.

        Args:
            parts: the parts of this rank.
            num_parameters: number of parameters that the ranks share.
            group: the ranks that together hold the logical tensors whole.

        Raises:
            ValueError: the ranks have different numbers of parameters, or do not hold all elements of a tensor.
        """
        held: dict[LogicalKey, float] = {}
        counted: dict[LogicalKey, int] = {}
        shapes: dict[LogicalKey, tuple[int, ...]] = {}
        dtype = torch.float32
        for it in parts:
            shapes[it.key] = it.shard.logical_shape
            counted[it.key] = counted.get(it.key, 0) + it.shard.box.numel
            held[it.key] = held.get(it.key, 0.0) + it.shard.box.numel / it.copies
            dtype = torch.promote_types(dtype, it.shard.tensor.dtype)
        mine = (num_parameters, dtype, {key: (shapes[key], counted[key], held[key]) for key in shapes})
        of_ranks = all_gather_object(mine, group)
        numbers = [number for number, _, _ in of_ranks]
        if len(set(numbers)) > 1:
            raise ValueError(
                f"the ranks {list(group.ranks)}, which hold parts of the same parameters, have {numbers} of them; give "
                "the optimizer the same ones on all of them"
            )
        shared: dict[LogicalKey, tuple[int, ...]] = {}
        for key in sorted({key for _, _, found in of_ranks for key in found}):
            holders = [found[key] for _, _, found in of_ranks if key in found]
            shape, total = holders[0][0], sum(part for _, _, part in holders)
            if all(count == prod(shape) for _, count, _ in holders):
                continue
            if not isclose(total, prod(shape), rel_tol=1e-9):
                raise ValueError(
                    f"{group} holds {total:g} of the {prod(shape)} elements of logical tensor {key.name!r} of shape "
                    f"{shape}, counting copies once; the parameter's ShardSpec must say which part each rank has"
                )
            shared[key] = shape
        for _, other, _ in of_ranks:
            dtype = torch.promote_types(dtype, other)
        return cls(shared, {key: shape for key, shape in shapes.items() if key not in shared}, dtype)
