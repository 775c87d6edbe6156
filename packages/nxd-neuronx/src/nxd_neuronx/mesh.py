"""The mesh as scripts for NeuronX Distributed make and ask it: what nxd_state has no use for, on top of its groups.

Groups of parts of an axis (copies of heads, shuffled tokens, a draft model) are runs of consecutive ranks, made when
they are initialized and forgotten by the next `initialize_model_parallel`.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any, cast

import nxd_state
import torch.distributed as dist
from nxd_state import Mesh, get_mesh, subgroup

from nxd_neuronx.rank_groups import ParallelGroups, as_lists, groups_of

_logger = logging.getLogger(__name__)
_run_sizes: dict[str, tuple[Mesh, int]] = {}  # of the groups of parts, with the mesh that they were made for
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
    """`nxd_state.initialize_model_parallel`, with the arguments of scripts for NeuronX Distributed.

    Args:
        tensor_model_parallel_size: ranks that split each layer.
        pipeline_model_parallel_size: pipeline stages.
        context_parallel_size: ranks that split each sequence.
        expert_model_parallel_size: ranks that split the experts of a layer.
        skip_collective_init: accepted without effect: no collective runs beforehand here.
        lnc_size: accepted without effect: `rank_order` says how ranks are laid out.
        mesh_only: make no groups, and return their ranks.
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
    """The process group of all ranks, or with `as_list` these ranks, as the one group of a list."""
    group = nxd_state.get_world_group()
    return as_lists(group.replica_groups) if as_list else cast(dist.ProcessGroup, group.process_group)


def initialize_kv_group(kv_shared_group_size: int = 1, sequential_ranks_in_group: bool = False) -> None:
    """Make the groups of ranks that hold the same key and value heads, which are neighbors here on any hardware.

    Layers of nxd_layers need none: they find their copies by themselves.

    Args:
        kv_shared_group_size: copies of each head; divides the tensor-parallel degree.
        sequential_ranks_in_group: accepted without effect; copies are always on neighbors.

    Raises:
        ValueError: a size that does not divide, or another than before.
    """
    _initialize_runs("kv_shared", "tp", kv_shared_group_size)


def get_kv_shared_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The process group that holds the same key and value heads, or with `as_list` the ranks of all such groups."""
    return _runs("kv_shared", "tp", as_list=as_list)


def destroy_kv_group() -> None:
    """Forget the size of these groups, so that another can be initialized."""
    _run_sizes.pop("kv_shared", None)


def initialize_token_shuffle_group(token_shuffle_group_size: int = 1) -> None:
    """Make the groups of replicas that shuffle tokens among them.

    Args:
        token_shuffle_group_size: replicas in each; divides the data-parallel degree.

    Raises:
        ValueError: a size that does not divide, or another than before.
    """
    _initialize_runs("token_shuffle", "dp", token_shuffle_group_size)


def get_token_shuffle_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The process group that shuffles tokens, or with `as_list` the ranks of all such groups."""
    return _runs("token_shuffle", "dp", as_list=as_list)


def get_token_shuffle_group_size() -> int:
    """Replicas that shuffle tokens among them."""
    return _run_size("token_shuffle")


def destroy_token_shuffle_group() -> None:
    """Forget the size of these groups, so that another can be initialized."""
    _run_sizes.pop("token_shuffle", None)


def initialize_speculative_draft_group(group_size: int = 1) -> None:
    """Make the groups of ranks that run a draft model.

    Args:
        group_size: ranks in each; divides the tensor-parallel degree.

    Raises:
        ValueError: a size that does not divide, or another than before.
    """
    _initialize_runs("speculative_draft", "tp", group_size)


def get_speculative_draft_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The process group that runs a draft model, or with `as_list` the ranks of all such groups."""
    return _runs("speculative_draft", "tp", as_list=as_list)


def arrange_kv_groups(
    num_tensor_model_parallel_groups: int = 1,
    tensor_model_parallel_size: int = 1,
    kv_shared_group_size: int = 1,
    sequential_ranks_in_group: bool = False,
    hardware_type: object = None,
) -> list[list[int]]:
    """The ranks that hold the same heads: neighbors, or evenly spread over each tensor-parallel group.

    Args:
        num_tensor_model_parallel_groups: number of groups.
        tensor_model_parallel_size: ranks in each.
        kv_shared_group_size: ranks that hold the same heads.
        sequential_ranks_in_group: neighbors. So they are on trn2 anyway.
        hardware_type: hardware type, whose name contains trn2 or not.
    """
    neighbours = sequential_ranks_in_group or getattr(hardware_type, "name", "").upper() == "TRN2"
    groups = []
    for first in range(0, num_tensor_model_parallel_groups * tensor_model_parallel_size, tensor_model_parallel_size):
        ranks, num_groups = range(tensor_model_parallel_size), tensor_model_parallel_size // kv_shared_group_size
        runs = [ranks[start * kv_shared_group_size :][:kv_shared_group_size] for start in range(num_groups)]
        spread = [ranks[start::num_groups] for start in range(num_groups)]
        groups += [[first + rank for rank in group] for group in (runs if neighbours else spread)]
    return groups


def get_expert_parallel_rank_from_global_rank(rank: int, expert_parallel_group: dist.ProcessGroup) -> int:
    """The index of a global rank in its expert-parallel group, this rank's or another of the axis.

    Raises:
        ValueError: it is in none.
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
    """The experts that a rank holds: its equal part of them in their order, or what a distribution says.

    Raises:
        ValueError: sizes that do not divide, no such rank, or a distribution that does not name each expert once.
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
    """Accept the mode in which models are created only for their shapes; use the device "meta" for that."""
    global _aot_mode  # noqa: PLW0603  (a script sets it for the process)
    if mode:
        _logger.info("set_aot_mode has no effect here: make layers on the meta device to draw no weights")
    _aot_mode = mode


def get_aot_mode() -> bool:
    """What `set_aot_mode` was told."""
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
