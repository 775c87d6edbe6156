"""Checks the arguments of ZeRO-1. The documented lists of ranks name groups that the mesh already has.

`nxd_optim.elementwise` checks the optimizer's class.
"""

from collections.abc import Sequence

from nxd_state import Group, active_group, all_gather_object, get_world_group, model_parallel_is_initialized

from nxd_optim.bucket_sender import DEFAULT_BUCKET_BYTES
from nxd_optim.placement import require_mesh

RankLists = Sequence[Sequence[int]]

_SHARDING_AXES = (("dp", "cp"), ("dp",))
_NORM_AXES = (("tp",), ("pp",), ("pp", "tp"), ("pp", "dp", "cp", "tp"))


def check_max_norm(max_norm: float | None) -> float:
    """Return the norm to clip to, 1.0 if None.

    Raises:
        ValueError: it is negative or not a number.
    """
    if max_norm is None:
        return 1.0
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm} must be zero or more; pass grad_clipping=False to switch clipping off")
    return float(max_norm)


def check_caps(all_gather_mb: float, reduce_scatter_mb: float) -> None:
    """Raise a ValueError if a maximum size of messages is negative."""
    given = {"bucket_cap_mb_all_gather": all_gather_mb, "bucket_cap_mb_reduce_scatter": reduce_scatter_mb}
    for argument, megabytes in given.items():
        if megabytes < 0:
            raise ValueError(f"{argument}={megabytes} must be positive, or 0 for the default")


def bucket_bytes(all_gather_mb: float, reduce_scatter_mb: float, replicas: int) -> int:
    """Return the maximum size of a bucket, of which a replica sends its part on gathering."""
    cap = reduce_scatter_mb * 2**20 or DEFAULT_BUCKET_BYTES
    if all_gather_mb:
        cap = min(cap, all_gather_mb * 2**20 * replicas)
    return int(cap)


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
            f"{argument}={_as_lists(ranks)} must name each of the {world.size} ranks once, in lists of one length"
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
