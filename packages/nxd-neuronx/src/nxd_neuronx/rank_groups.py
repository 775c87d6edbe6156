"""The ranks of a mesh's groups, and the orders in which hardware lays them out, as scripts name them."""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch.distributed as dist
from nxd_state import Mesh
from nxd_state.mesh import RankGroups
from torch import Tensor


class ParallelGroups(NamedTuple):
    """The ranks of all groups of a mesh, by axis."""

    tp_groups: list[list[int]]
    dp_groups: list[list[int]]
    pp_groups: list[list[int]]
    ep_model_groups: list[list[int]]
    ep_data_groups: list[list[int]]
    cp_groups: list[list[int]]


class PG_Group_Logic(Enum):  # noqa: N801  (the name that scripts import)
    """Rank orders of nxd_state by their names in scripts."""

    LOGIC1 = "row_major"
    LOGIC2 = "row_paired"

    @property
    def func(self) -> Callable[..., ParallelGroups]:
        """What lays out the groups."""
        return ascending_ring_PG_group if self is PG_Group_Logic.LOGIC1 else ascending_descending_ring_PG_group

    @property
    def description(self) -> str:
        """The order in words."""
        return f"rank_order={self.value!r}"

    def __call__(self, *args: Any, **kwargs: Any) -> ParallelGroups:
        """Lay out the groups."""
        return self.func(*args, **kwargs)


def ascending_ring_PG_group(  # noqa: N802  (the name that scripts import)
    lnc_size: int,
    cluster_ranks_nonexp: Tensor,
    cluster_ranks_exp: Tensor,
    tp: int,
    dp: int,
    pp: int,
    ep_model_degree: int,
    ep_data_degree: int,
    cp: int = 1,
) -> ParallelGroups:
    """The groups of ranks that are in a grid.

    Args:
        lnc_size: accepted without effect.
        cluster_ranks_nonexp: `[pp, dp, cp, tp]`, the ranks.
        cluster_ranks_exp: `[pp, dp_exp, ep, tp]`, the same ranks.
        tp: as in the grids, which say it all; so are the other degrees.
        dp: data-parallel degree.
        pp: pipeline stages.
        ep_model_degree: expert-parallel degree.
        ep_data_degree: replicas of each expert.
        cp: context-parallel degree.
    """
    tensor, replicas, stages, contexts = (_groups_along(cluster_ranks_nonexp, dim) for dim in (3, 1, 0, 2))
    experts, expert_replicas = (_groups_along(cluster_ranks_exp, dim) for dim in (2, 1))
    return ParallelGroups(tensor, replicas, stages, experts, expert_replicas, contexts)


def ascending_descending_ring_PG_group(  # noqa: N802  (the name that scripts import)
    lnc_size: int,
    cluster_ranks_nonexp: Tensor,
    cluster_ranks_exp: Tensor,
    tp: int,
    dp: int,
    pp: int,
    ep_model_degree: int,
    ep_data_degree: int,
    cp: int = 1,
) -> ParallelGroups:
    """The groups of the rank order "row_paired"; those of experts as they are in their grid, as in that library.

    Args:
        lnc_size: accepted without effect.
        cluster_ranks_nonexp: all ranks; only their number counts.
        cluster_ranks_exp: `[pp, dp_exp, ep, tp]`, the ranks.
        tp: tensor-parallel degree.
        dp: data-parallel degree.
        pp: pipeline stages.
        ep_model_degree: expert-parallel degree.
        ep_data_degree: replicas of each expert.
        cp: context-parallel degree.

    Raises:
        ValueError: the ranks are not whole nodes of 64.
    """
    paired = groups_of(Mesh(cluster_ranks_nonexp.numel(), pp=pp, cp=cp, tp=tp, order="row_paired"))
    experts, expert_replicas = (_groups_along(cluster_ranks_exp, dim) for dim in (2, 1))
    replicas, stages = (sorted(it) if len(it[0]) == 1 else it for it in (paired.dp_groups, paired.pp_groups))
    return ParallelGroups(paired.tp_groups, replicas, stages, experts, expert_replicas, paired.cp_groups)


def _groups_along(ranks: Tensor, dim: int) -> list[list[int]]:
    groups: list[list[int]] = ranks.movedim(dim, -1).flatten(0, -2).tolist()
    return groups


def groups_of(mesh: Mesh) -> ParallelGroups:
    """The ranks of all groups of a mesh."""
    return ParallelGroups(*(as_lists(mesh.groups(axis)) for axis in ("tp", "dp", "pp", "ep", "dp_exp", "cp")))


def as_lists(groups: RankGroups) -> list[list[int]]:
    """Groups of ranks as scripts have them."""
    return [list(ranks) for ranks in groups]


def get_logic_chosen(lnc_size: int, hardware_type: object, tp: int) -> PG_Group_Logic:
    """How ranks are laid out on some hardware: give its `value` as `rank_order`."""
    is_trn2 = getattr(hardware_type, "name", "").upper() == "TRN2"
    whole_nodes = not dist.is_initialized() or dist.get_world_size() >= 64
    paired = is_trn2 and ((lnc_size, tp) == (1, 64) or ((lnc_size, tp) == (2, 32) and whole_nodes))
    return PG_Group_Logic.LOGIC2 if paired else PG_Group_Logic.LOGIC1
