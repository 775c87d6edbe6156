"""Placement of parameters on ranks: which ranks hold the same ones, and which ranks together hold all of them.

If the mesh splits experts, their parameters are placed differently from those of dense layers. A rank's experts then
get gradients from the tokens of other ranks, too, and fewer ranks hold the same experts than the same dense layers.
Without a mesh, each rank of a job would act as if it were the whole job: see `require_mesh`. The documented lists of
ranks that ZeRO accepts name groups that the mesh already has: see `find_sharding_group`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from nxd_state import (
    Group,
    ShardSpec,
    active_group,
    all_gather_object,
    get_world_group,
    group_among,
    is_lazy_device,
    model_parallel_is_initialized,
    splits_experts,
)
from nxd_state.parameter_marks import is_expert
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """The placement of the parameters of dense layers, or of experts.

    Attributes:
        axis: axis of the shard specs of these parameters.
        replicas: the ranks that hold the same parameters, over which gradients are averaged, and states sharded.
        scale: factor that turns this average into the mean over the replicas of the whole model.
        parts: the ranks that hold all of them together, over which norms are summed.
        copies: the number of `parts` that hold an unsplit parameter.
        mirrors: further ranks over which gradients are averaged: those that have the same part of the states, where
            only some of the replicas share them. None if all replicas do.
    """

    axis: str
    replicas: Group
    scale: float
    parts: Group
    copies: int
    mirrors: Group | None = None

    def check(self, spec: ShardSpec) -> None:
        """Raise a ValueError for a parameter that is sharded along an axis over which norms are not summed."""
        if spec.axis != self.axis:
            raise ValueError(
                f"a parameter of shape {spec.local_shape} is sharded along axis={spec.axis!r}; gradient norms are "
                f"summed over {self.axis!r} and 'pp' only"
            )


def dense_placement(replicas: Group | None = None) -> Placement:
    """Return the placement of dense layers, and of experts unless the mesh splits them.

    Args:
        replicas: the replicas; data times context parallel if None.
    """
    group = replicas if replicas is not None else active_group("dp", "cp")
    return Placement("tp", group, 1.0, active_group("pp", "tp"), active_group("tp").size)


def expert_placement() -> Placement | None:
    """Return the placement of experts; None if the mesh does not split them. The same on all ranks."""
    if not splits_experts():
        return None
    # An expert's gradient is a sum over the tokens of all ranks whose tokens come here.
    replicas = active_group("dp_exp")
    scale = replicas.size / active_group("dp", "cp").size
    return Placement("ep", replicas, scale, active_group("pp", "ep", "etp"), active_group("etp").size)


def placements_of(group: Group | None) -> tuple[Placement, Placement]:
    """Return the placements of dense layers and of experts; both are `group` if that is given.

    Args:
        group: the replicas that a user has chosen; those of the mesh if None.
    """
    dense = dense_placement(group)
    return dense, (expert_placement() if group is None else None) or dense


def sharding_placements(group: Group, shard_group_size: int | None) -> tuple[Placement, Placement]:
    """Return the placements of dense layers and of experts for states that are sharded. Called by all ranks.

    Args:
        group: the replicas of dense layers; if that is data parallel alone, the context-parallel ranks are mirrors.
        shard_group_size: number of neighboring replicas that share states (hybrid sharding), which the others mirror;
            experts then have as many mirrors. None for all replicas.

    Raises:
        ValueError: the number does not divide the replicas.
    """
    dense, experts = dense_placement(group), expert_placement()
    if shard_group_size is None or shard_group_size == group.size:
        if group is active_group("dp") and active_group("cp").size > 1:
            dense = replace(dense, mirrors=active_group("cp"))
        dense = with_messages_apart(dense)
        return dense, dense if experts is None else with_messages_apart(experts)
    if group is not active_group("dp", "cp") or shard_group_size < 1 or group.size % shard_group_size:
        raise ValueError(
            f"shard_group_size={shard_group_size} must divide the {group.size} replicas (data times context parallel)"
        )
    dense = _split_replicas(dense, shard_group_size)
    if experts is None:
        return dense, dense
    return dense, _split_replicas(experts, expert_shard_group_size(group.size, experts.replicas.size, shard_group_size))


def expert_shard_group_size(replicas: int, expert_replicas: int, shard_group_size: int) -> int:
    """Return how many replicas of an expert share states, where `shard_group_size` of the dense layers' replicas do.

    So that both have as many mirrors; at least one.
    """
    return max(1, expert_replicas * shard_group_size // replicas)


def with_messages_apart(placement: Placement) -> Placement:
    """Return a placement whose replicas have a group of their own if an axis that sends inside layers has theirs.

    Gradients are sent while backward goes on, and on a rank that lacks some they are sent later than on others. Called
    by all ranks.
    """
    group = placement.replicas
    inside = [active_group(axis).replica_groups for axis in ("ep", "cp")]
    if group.size == 1 or is_lazy_device() or group.replica_groups not in inside:
        return placement
    return replace(placement, replicas=group_among(group.replica_groups, messages="sharding"))


def _split_replicas(placement: Placement, size: int) -> Placement:
    """Return a placement whose replicas are cut into runs of `size` that mirror each other."""
    replicas = placement.replicas.replica_groups
    if len(replicas[0]) % size:
        raise ValueError(
            f"shard_group_size leaves {size} of the {len(replicas[0])} replicas of an expert to share states, which "
            "must divide them; choose another size"
        )
    mirrors = [ranks[index::size] for ranks in replicas for index in range(size)]
    return replace(placement, replicas=neighbors(placement.replicas, size), mirrors=group_among(mirrors))


def neighbors(group: Group, size: int) -> Group:
    """Return this rank's run of `size` neighboring ranks of a group, which it divides. Called by all ranks.

    Its messages overlap those of the layers, so it is not the group of experts or of context parallelism.
    """
    runs = [it[start : start + size] for it in group.replica_groups for start in range(0, len(it), size)]
    return group_among(runs, messages="sharding")


def placement_among(placements: Sequence[Placement], parameter: Tensor) -> Placement:
    """Return the placement of a parameter among those of dense layers and, last, of experts."""
    return placements[-1] if is_expert(parameter) else placements[0]


def placement_of(parameter: Tensor) -> Placement:
    """Return the placement of a parameter."""
    experts = expert_placement() if is_expert(parameter) else None
    return experts if experts is not None else dense_placement()


def ranks_with_gradients() -> tuple[Group, ...]:
    """Return the further groups in which a rank may lack gradients, because its experts had no tokens."""
    return () if expert_placement() is None else (active_group("ep"),)


def require_mesh() -> None:
    """Check that the ranks of this job have a mesh.

    Raises:
        RuntimeError: torch.distributed runs several ranks, but there is no mesh.
    """
    if not model_parallel_is_initialized() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {dist.get_world_size()} ranks, but there is no mesh; call "
            "nxd_state.initialize_model_parallel() first: with its defaults all ranks are data-parallel replicas"
        )


def check_same_parameters(parameters: Sequence[Tensor], group: Group) -> None:
    """Raise on every rank unless all passed parameters of the same shapes and dtypes in the same order."""
    text = repr([(tuple(p.shape), p.dtype) for p in parameters])
    mine = (len(parameters), sum(p.numel() for p in parameters), hashlib.sha256(text.encode()).hexdigest())
    descriptions = all_gather_object(mine, group)
    for rank, description in zip(group.ranks, descriptions, strict=True):
        if description != descriptions[0]:
            raise ValueError(
                f"rank {rank} passed {description[0]} parameters of {description[1]} elements, rank {group.ranks[0]} "
                f"passed {descriptions[0][0]} of {descriptions[0][1]}, or order, shapes or dtypes differ; pass the "
                "same parameters (with the same requires_grad) in the same order on every rank"
            )


RankLists = Sequence[Sequence[int]]

_SHARDING_AXES = (("dp", "cp"), ("dp",))
_NORM_AXES = (("tp",), ("pp",), ("pp", "tp"), ("pp", "dp", "cp", "tp"))


def find_sharding_group(sharding_groups: RankLists | None) -> Group:
    """Return this rank's group: data times context parallel, which is also the default, or data parallel alone.

    Raises:
        RuntimeError: there are several ranks but no mesh.
        ValueError: the lists name other groups, do not hold every rank once, or differ between ranks.
    """
    require_mesh()
    if sharding_groups is None:
        return active_group("dp", "cp")
    ranks = _check_rank_lists("sharding_groups", sharding_groups)
    group = _find(ranks, _SHARDING_AXES)
    if group is None:
        data_and_context, data = (_as_lists(active_group(*axes).replica_groups) for axes in _SHARDING_AXES)
        raise ValueError(
            f"sharding_groups={_as_lists(ranks)} are not the replicas of the mesh; leave them out, or pass "
            f"{data_and_context} (data times context parallel) or {data} (data parallel): ranks of other groups hold "
            "different parts of the model, or would drift apart"
        )
    return group


def check_grad_norm_groups(grad_norm_groups: RankLists | None) -> None:
    """Check the documented lists, which have no effect: norms are summed over all ranks that hold parts of the model.

    Raises:
        ValueError: the lists do not name groups of the mesh.
    """
    if grad_norm_groups is None:
        return
    ranks = _check_rank_lists("grad_norm_groups", grad_norm_groups)
    if _find(ranks, _NORM_AXES) is None and len(ranks[0]) > 1:
        raise ValueError(
            f"grad_norm_groups={_as_lists(ranks)} are not the tensor- or pipeline-parallel groups of "
            "the mesh; leave them out: the mesh determines which ranks hold which part of the model"
        )


def _check_rank_lists(argument: str, groups: RankLists) -> tuple[tuple[int, ...], ...]:
    world = get_world_group() if model_parallel_is_initialized() else Group.solo("world")
    ranks = tuple(tuple(group) for group in groups)
    if len(set(all_gather_object(ranks, world))) > 1:
        raise ValueError(f"{argument} differs between the ranks; pass the lists of all groups on every rank")
    lengths = {len(group) for group in ranks}
    if sorted(rank for group in ranks for rank in group) != list(range(world.size)) or len(lengths) != 1:
        raise ValueError(
            f"{argument}={_as_lists(ranks)} must name each of the {world.size} ranks once, in lists of equal length"
        )
    return ranks


def _find(ranks: tuple[tuple[int, ...], ...], candidates: Sequence[tuple[str, ...]]) -> Group | None:
    wanted = {frozenset(group) for group in ranks}
    for axes in candidates:
        group = active_group(*axes)
        if {frozenset(replicas) for replicas in group.replica_groups} == wanted:
            return group
    return None


def _as_lists(groups: RankLists) -> list[list[int]]:
    return [list(group) for group in groups]
