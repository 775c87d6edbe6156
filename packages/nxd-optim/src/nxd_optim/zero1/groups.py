"""The ranks over which states are sharded, and the documented lists of ranks that name them."""

from collections.abc import Sequence

import torch.distributed as dist
from nxd_state import Group, active_group, all_gather_object, get_world_group, model_parallel_is_initialized
from nxd_state.process_groups import new_process_group

RankLists = Sequence[Sequence[int]]

_SHARDING_AXES = (("dp", "cp"), ("dp",))
_NORM_AXES = (("tp",), ("pp",), ("pp", "tp"), ("pp", "dp", "cp", "tp"))


def find_sharding_group(sharding_groups: RankLists | None) -> Group:
    """The group of this rank: data times context parallel if None, a group of the mesh if one is named, else a new one.

    Raises:
        RuntimeError: there are several ranks but no mesh.
        ValueError: the lists do not hold every rank once, differ in length, or differ between ranks.
    """
    if not model_parallel_is_initialized() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {dist.get_world_size()} ranks, but no mesh says what they do; call "
            "nxd_state.initialize_model_parallel() before making the optimizer"
        )
    if sharding_groups is None:
        return active_group("dp", "cp")
    ranks = _check_rank_lists("sharding_groups", sharding_groups)
    replicas = [set(group) for group in active_group("dp", "cp").replica_groups]
    for group in ranks:
        if not any(set(group) <= each for each in replicas):
            raise ValueError(
                f"sharding_groups: ranks {list(group)} hold different parts of the model; the replicas are "
                f"{[sorted(each) for each in replicas]}, so share states within these"
            )
    return _find(ranks, _SHARDING_AXES) or _make(ranks)


def check_grad_norm_groups(grad_norm_groups: RankLists | None) -> None:
    """Accept the documented lists: whatever they name, norms are summed over all ranks that hold parts of the model.

    Raises:
        ValueError: no group of the mesh is meant.
    """
    if grad_norm_groups is None:
        return
    ranks = _check_rank_lists("grad_norm_groups", grad_norm_groups)
    if _find(ranks, _NORM_AXES) is None and len(ranks[0]) > 1:
        raise ValueError(
            f"grad_norm_groups={[list(group) for group in ranks]} are not the tensor- or pipeline-parallel groups of "
            "the mesh; leave them out: which ranks hold which part of the model is known from the mesh"
        )


def _check_rank_lists(argument: str, groups: RankLists) -> tuple[tuple[int, ...], ...]:
    world_size = get_world_group().size if model_parallel_is_initialized() else 1
    ranks = tuple(tuple(group) for group in groups)
    if model_parallel_is_initialized() and len(set(all_gather_object(ranks, get_world_group()))) > 1:
        raise ValueError(f"{argument} differ between the ranks; give every rank the lists of all groups")
    lengths = {len(group) for group in ranks}
    if sorted(rank for group in ranks for rank in group) != list(range(world_size)) or len(lengths) != 1:
        raise ValueError(
            f"{argument}={[list(group) for group in ranks]} must name each of the {world_size} ranks once, in lists "
            "of one length"
        )
    return ranks


def _find(ranks: tuple[tuple[int, ...], ...], candidates: Sequence[tuple[str, ...]]) -> Group | None:
    wanted = {frozenset(group) for group in ranks}
    for axes in candidates:
        group = active_group(*axes)
        if {frozenset(replicas) for replicas in group.replica_groups} == wanted:
            return group
    return None


def _make(ranks: tuple[tuple[int, ...], ...]) -> Group:
    me = get_world_group().rank
    made = [new_process_group(group, None) for group in ranks]
    index = next(index for index, group in enumerate(ranks) if me in group)
    process_group = made[index]
    assert process_group is not None
    return Group(
        axis="zero1",
        ranks=ranks[index],
        rank=ranks[index].index(me),
        replica_groups=ranks,
        process_group=process_group,
        name=process_group.group_name,
    )
