"""What an optimizer updates of parameters whose parts are on several ranks, for optimizers with a joint step.

Such an optimizer has one instance for each bucket of ZeRO. Before their steps, the instances together compute what
needs more than the elements that this rank updates; see `Muon.joint_step`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nxd_state import Group, ShardSpec, active_group, get_shard_spec, group_among, splits_experts
from nxd_state.parameter_marks import is_expert
from torch import Tensor

from nxd_optim.flat_shards import StateShard, shards_of_range


@dataclass(frozen=True, eq=False)
class UpdatedRange:
    """Elements of a parameter that an optimizer updates.

    Attributes:
        parameter: the model's parameter, of which only shape, `ShardSpec` and marks are read.
        start: first element, in C order.
        stop: one past the last element.
        weight: these elements, flat, or the parameter itself.
    """

    parameter: Tensor
    start: int
    stop: int
    weight: Tensor

    def shards_of(self, tensor: Tensor) -> tuple[StateShard, ...]:
        """Return a tensor of the weight's shape as boxes of logical tensors, which share its memory."""
        if tensor.shape != self.parameter.shape or self.stop - self.start < self.parameter.numel():
            return shards_of_range(self.parameter, self.start, self.stop, tensor)
        spec = get_shard_spec(self.parameter) or ShardSpec.whole(self.parameter.shape)
        return tuple(
            StateShard(it.name, it.logical_shape, it.logical, tensor[it.local.slices], it.copies) for it in spec.pieces
        )


@dataclass(frozen=True, eq=False)
class UpdatedParts:
    """What one optimizer updates of parameters that ranks share.

    Attributes:
        parameters: the parameters, in the same order on all ranks that share them.
        ranges: this rank's parts.
        replicas: the ranks of which each updates a part; a group of one if this rank updates them whole.
    """

    parameters: Sequence[Tensor]
    ranges: Sequence[UpdatedRange]
    replicas: Group


def ranks_that_share(parameter: Tensor, replicas: Group, *, whole_stacks: bool = False) -> Group:
    """Return the ranks that update parts of the same matrices: replicas times those that split a layer.

    Args:
        parameter: a parameter.
        replicas: the ranks of which each updates a part of it.
        whole_stacks: whether ranks with other experts of the same stack of matrices are counted as well.
    """
    if not (splits_experts() and is_expert(parameter)):
        return _join(replicas, active_group("tp"))
    ranks = _join(replicas, active_group("etp"))
    return _join(ranks, active_group("ep")) if whole_stacks else ranks


def _join(first: Group, second: Group) -> Group:
    """Return this rank's group of all ranks that are connected by groups of two axes."""
    if first.size == 1 or second.size == 1:
        return second if first.size == 1 else first
    together: dict[int, set[int]] = {}
    for ranks in (*first.replica_groups, *second.replica_groups):
        joined = set(ranks).union(*(together.get(rank, ()) for rank in ranks))
        together |= dict.fromkeys(joined, joined)
    groups = {tuple(sorted(ranks)) for ranks in together.values()}
    return group_among(sorted(groups))
