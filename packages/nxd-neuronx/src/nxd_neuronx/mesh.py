"""The mesh functions of NeuronX Distributed that nxd_state does not have.

Subgroups of an axis (copies of heads, shuffled tokens, a draft model) are runs of consecutive ranks; they are created
when they are initialized and dropped by the next `initialize_model_parallel`.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import nxd_state
import torch.distributed as dist
from nxd_state import Mesh, get_mesh, subgroup
from nxd_state.mesh import RankGroups


class ParallelGroups(NamedTuple):
    """The ranks of all groups of a mesh, by axis."""

    tp_groups: list[list[int]]
    dp_groups: list[list[int]]
    pp_groups: list[list[int]]
    ep_model_groups: list[list[int]]
    ep_data_groups: list[list[int]]
    cp_groups: list[list[int]]


def groups_of(mesh: Mesh) -> ParallelGroups:
    """Return the ranks of all groups of a mesh."""
    return ParallelGroups(*(as_lists(mesh.groups(axis)) for axis in ("tp", "dp", "pp", "ep", "dp_exp", "cp")))


def as_lists(groups: RankGroups) -> list[list[int]]:
    """Convert groups of ranks to lists."""
    return [list(ranks) for ranks in groups]


_logger = logging.getLogger(__name__)
_run_sizes: dict[str, tuple[Mesh, int]] = {}  # of the subgroups, with the mesh that they belong to
_aot_mode = False


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
    **options: Any,
) -> ParallelGroups | None:
    """`nxd_state.initialize_model_parallel`, with the arguments of NeuronX Distributed.

    Args:
        tensor_model_parallel_size: number of ranks that split each layer.
        pipeline_model_parallel_size: number of pipeline stages.
        context_parallel_size: number of ranks that split each sequence.
        expert_model_parallel_size: number of ranks that split the experts of a layer.
        skip_collective_init: accepted without effect: no collective runs at initialization.
        lnc_size: accepted without effect: `rank_order` sets the layout of ranks.
        mesh_only: whether to return the ranks of all groups instead of creating them.
        **options: `rank_order`, `timeout` and `store` of `nxd_state.initialize_model_parallel`.

    Raises:
        RuntimeError: already initialized.
        ValueError: degrees that do not divide the world size.
    """
    if lnc_size != 1:
        _logger.info("lnc_size has no effect here: rank_order determines the layout of ranks")
    if not mesh_only:
        nxd_state.initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            expert_model_parallel_size,
            context_parallel_size=context_parallel_size,
            **options,
        )
        return None
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return groups_of(
        Mesh(
            world_size,
            pp=pipeline_model_parallel_size,
            cp=context_parallel_size,
            tp=tensor_model_parallel_size,
            ep=expert_model_parallel_size,
            order=options.get("rank_order", "row_major"),
        )
    )


def get_world_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """Return the process group of all ranks; with `as_list`, a list with one list of all ranks."""
    group = nxd_state.get_world_group()
    return as_lists(group.replica_groups) if as_list else cast(dist.ProcessGroup, group.process_group)


def initialize_kv_group(kv_shared_group_size: int = 1, sequential_ranks_in_group: bool = False) -> None:
    """Create the groups of consecutive ranks that hold the same key and value heads.

    Layers of nxd_layers do not need these groups.

    Args:
        kv_shared_group_size: number of copies of each head; must divide the tensor-parallel degree.
        sequential_ranks_in_group: accepted without effect; the ranks are always consecutive.

    Raises:
        ValueError: the size does not divide the degree, or differs from that of existing groups.
    """
    _initialize_runs("kv_shared", "tp", kv_shared_group_size)


def get_kv_shared_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """Return the process group that shares key and value heads; with `as_list`, the ranks of all these groups."""
    return _runs("kv_shared", "tp", as_list=as_list)


def destroy_kv_group() -> None:
    """Drop these groups, so that groups of another size can be initialized."""
    _run_sizes.pop("kv_shared", None)


def initialize_token_shuffle_group(token_shuffle_group_size: int = 1) -> None:
    """Create the groups of replicas that shuffle tokens.

    Args:
        token_shuffle_group_size: number of replicas in each group; must divide the data-parallel degree.

    Raises:
        ValueError: the size does not divide the degree, or differs from that of existing groups.
    """
    _initialize_runs("token_shuffle", "dp", token_shuffle_group_size)


def get_token_shuffle_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """Return the process group that shuffles tokens; with `as_list`, the ranks of all these groups."""
    return _runs("token_shuffle", "dp", as_list=as_list)


def get_token_shuffle_group_size() -> int:
    """Return the number of replicas that shuffle tokens."""
    return _run_size("token_shuffle")


def destroy_token_shuffle_group() -> None:
    """Drop these groups, so that groups of another size can be initialized."""
    _run_sizes.pop("token_shuffle", None)


def initialize_speculative_draft_group(group_size: int = 1) -> None:
    """Create the groups of ranks that run a draft model.

    Args:
        group_size: number of ranks in each group; must divide the tensor-parallel degree.

    Raises:
        ValueError: the size does not divide the degree, or differs from that of existing groups.
    """
    _initialize_runs("speculative_draft", "tp", group_size)


def get_speculative_draft_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """Return the process group that runs a draft model; with `as_list`, the ranks of all these groups."""
    return _runs("speculative_draft", "tp", as_list=as_list)


def get_expert_parallel_rank_from_global_rank(rank: int, expert_parallel_group: dist.ProcessGroup) -> int:
    """Return the index of a global rank in its expert-parallel group, which may be another one of the axis.

    Raises:
        ValueError: no group of the axis has this rank.
    """
    group = nxd_state.group_of(expert_parallel_group)
    for ranks in group.replica_groups:
        if rank in ranks:
            return ranks.index(rank)
    raise ValueError(f"rank {rank} is in no group of {group}; use one of {as_lists(group.replica_groups)}")


def get_experts_for_expert_parallel_rank(
    expert_parallel_rank: int,
    total_number_of_experts: int,
    expert_model_parallel_size: int,
    expert_distribution: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Return the experts of a rank: an equal run of consecutive ones, or those of `expert_distribution`.

    Raises:
        ValueError: the degree does not divide the experts, the rank is out of range, or the distribution does not name
            each expert once.
    """
    each, rest = divmod(total_number_of_experts, expert_model_parallel_size)
    if rest or not 0 <= expert_parallel_rank < expert_model_parallel_size:
        raise ValueError(
            f"expert_parallel_rank={expert_parallel_rank} of {expert_model_parallel_size} cannot hold an equal share "
            f"of {total_number_of_experts} experts; use a degree that divides them, and a rank below it"
        )
    if not expert_distribution:
        return list(range(expert_parallel_rank * each, (expert_parallel_rank + 1) * each))
    named = sorted(expert for experts in expert_distribution for expert in experts)
    if len(expert_distribution) != expert_model_parallel_size or named != list(range(total_number_of_experts)):
        raise ValueError(
            f"expert_distribution={list(map(list, expert_distribution))} must have {expert_model_parallel_size} lists "
            f"that name each expert of 0..{total_number_of_experts - 1} once"
        )
    return list(expert_distribution[expert_parallel_rank])


def set_aot_mode(mode: bool) -> None:
    """Store the mode in which models are built for their shapes only; the "meta" device does that here."""
    global _aot_mode  # noqa: PLW0603  (a script sets it for the process)
    if mode:
        _logger.info("set_aot_mode has no effect here: make layers on the meta device to draw no weights")
    _aot_mode = mode


def get_aot_mode() -> bool:
    """Return the mode set by `set_aot_mode`."""
    return _aot_mode


def _initialize_runs(name: str, axis: str, size: int) -> None:
    known = _run_sizes.get(name)
    if known is not None and known[0] is get_mesh() and known[1] != size:
        raise ValueError(
            f"the {name} groups have {known[1]} ranks, not {size}; destroy them first, or use one size in all layers"
        )
    subgroup(axis, size)
    _run_sizes[name] = (get_mesh(), size)


def _run_size(name: str) -> int:
    known = _run_sizes.get(name)
    if known is None or known[0] is not get_mesh():
        initialize = "initialize_kv_group" if name == "kv_shared" else f"initialize_{name}_group"
        raise RuntimeError(f"there are no {name} groups; call {initialize}() first")
    return known[1]


def _runs(name: str, axis: str, *, as_list: bool) -> dist.ProcessGroup | list[list[int]]:
    group = subgroup(axis, _run_size(name))
    if as_list:
        return as_lists(group.replica_groups)
    if group.process_group is None:
        raise RuntimeError(f"{group} has no process group: each of the {name} groups has one rank")
    return group.process_group
