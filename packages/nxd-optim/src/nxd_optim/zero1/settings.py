"""Arguments of ZeRO-1 and settings of parameter groups: checked, and carried between optimizers.

The documented lists of ranks name groups that the mesh has anyway. `elementwise` checks the optimizer's class.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from nxd_state import Group, active_group, all_gather_object, get_world_group, model_parallel_is_initialized

RankLists = Sequence[Sequence[int]]

_SHARDING_AXES = (("dp", "cp"), ("dp",))
_NORM_AXES = (("tp",), ("pp",), ("pp", "tp"), ("pp", "dp", "cp", "tp"))


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_settings(sources: list[dict[str, Any]], targets: list[dict[str, Any]]) -> None:
    """Give each target group the settings of its source."""
    for source, target in zip(sources, targets, strict=True):
        target.update(settings_of(source))


def check_max_norm(max_norm: float | None) -> float:
    """The norm to clip to, 1.0 if None.

    Raises:
        ValueError: negative or not a number.
    """
    if max_norm is None:
        return 1.0
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm} must be zero or more; pass grad_clipping=False to switch clipping off")
    return float(max_norm)


def check_cap(argument: str, megabytes: float) -> float:
    """The cap on a bucket.

    Raises:
        ValueError: negative.
    """
    if megabytes < 0:
        raise ValueError(f"{argument}={megabytes} must be positive, or 0 for the default")
    return megabytes


def find_sharding_group(sharding_groups: RankLists | None) -> Group:
    """The group of this rank: data times context parallel, which None means, or data parallel alone.

    Raises:
        RuntimeError: there are several ranks but no mesh.
        ValueError: the lists name other groups, do not hold every rank once, or differ between ranks.
    """
    if not model_parallel_is_initialized() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {dist.get_world_size()} ranks, but there is no mesh; call "
            "nxd_state.initialize_model_parallel() before making the optimizer"
        )
    if sharding_groups is None:
        return active_group("dp", "cp")
    ranks = _check_rank_lists("sharding_groups", sharding_groups)
    group = _find(ranks, _SHARDING_AXES)
    if group is None:
        data_and_context, data = (_as_lists(active_group(*axes).replica_groups) for axes in _SHARDING_AXES)
        raise ValueError(
            f"sharding_groups={_as_lists(ranks)} are not the replicas of the mesh; leave them out, or name "
            f"{data_and_context} (data times context parallel) or {data} (data parallel): ranks of other groups hold "
            "different parts of the model, or would drift apart"
        )
    return group


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
            f"grad_norm_groups={_as_lists(ranks)} are not the tensor- or pipeline-parallel groups of "
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
            f"{argument}={_as_lists(ranks)} must name each of the {world_size} ranks once, in lists of one length"
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
