"""Getters of this rank's place in the mesh and of its process groups; the documented ones come first.

The others are what scripts for NeuronX Distributed import besides. They raise a RuntimeError without a mesh.
"""

import os
from collections.abc import Sequence

import torch.distributed as dist

from nxd_state.group import Group
from nxd_state.parallel_state import get_group, group_among, model_parallel_is_initialized
from nxd_state.script_world import rank_of_job


def _group(axes: tuple[str, ...], as_list: bool) -> dist.ProcessGroup | list[list[int]]:
    return _replica_groups(*axes) if as_list else _process_group(get_group(*axes))


def get_tensor_model_parallel_size() -> int:
    """Ranks that split each layer."""
    return get_group("tp").size


def get_tensor_model_parallel_rank() -> int:
    """This rank's index in its tensor-parallel group."""
    return get_group("tp").rank


def get_tensor_model_parallel_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The tensor-parallel process group, or with `as_list` the ranks of all groups of this axis."""
    return _group(("tp",), as_list)


def get_pipeline_model_parallel_size() -> int:
    """Number of pipeline stages."""
    return get_group("pp").size


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage."""
    return get_group("pp").rank


def get_pipeline_model_parallel_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The pipeline process group, or with `as_list` the ranks of all groups of this axis."""
    return _group(("pp",), as_list)


def get_data_parallel_size() -> int:
    """Number of model replicas: pass it to a DistributedSampler as `num_replicas`."""
    return get_group("dp").size


def get_data_parallel_rank() -> int:
    """This rank's replica: pass it to a DistributedSampler as `rank`."""
    return get_group("dp").rank


def get_data_parallel_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The data-parallel process group, or with `as_list` the ranks of all groups of this axis."""
    return _group(("dp",), as_list)


def get_context_parallel_size() -> int:
    """Ranks that split each sequence."""
    return get_group("cp").size


def get_context_parallel_rank() -> int:
    """This rank's index in its context-parallel group."""
    return get_group("cp").rank


def get_expert_model_parallel_size() -> int:
    """Ranks that split the experts of a layer."""
    return get_group("ep").size


def get_expert_model_parallel_rank() -> int:
    """This rank's index in its expert-parallel group."""
    return get_group("ep").rank


def get_expert_tensor_parallel_size() -> int:
    """Ranks that split each expert."""
    return get_group("etp").size


def get_expert_tensor_parallel_rank() -> int:
    """This rank's index among those that split its experts."""
    return get_group("etp").rank


# The tensor-parallel guide spells these two differently.
get_tensor_parallel_size = get_tensor_model_parallel_size
get_data_parallel_world_size = get_data_parallel_size


def get_tensor_model_parallel_replica_groups() -> list[list[int]]:
    """The ranks of all tensor-parallel groups."""
    return _replica_groups("tp")


def get_data_parallel_replica_groups() -> list[list[int]]:
    """The ranks of all data-parallel groups."""
    return _replica_groups("dp")


def get_pipeline_model_parallel_replica_groups() -> list[list[int]]:
    """The ranks of all pipelines."""
    return _replica_groups("pp")


def get_context_model_parallel_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The context-parallel process group, or with `as_list` the ranks of all groups of this axis."""
    return _group(("cp",), as_list)


def get_context_model_parallel_replica_groups() -> list[list[int]]:
    """The ranks of all context-parallel groups."""
    return _replica_groups("cp")


def get_context_model_parallel_src_tgt_pairs() -> list[list[int]]:
    """The (source, target) pairs of this rank's context-parallel ring: each rank sends to the next."""
    ranks = get_group("cp").ranks
    return [[source, target] for source, target in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]


def get_expert_model_parallel_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The expert-parallel process group, or with `as_list` the ranks of all groups of this axis."""
    return _group(("ep",), as_list)


def get_expert_model_parallel_replica_groups() -> list[list[int]]:
    """The ranks of all expert-parallel groups."""
    return _replica_groups("ep")


def get_expert_data_parallel_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The process group that holds the same experts, or with `as_list` the ranks of all such groups."""
    return _group(("dp_exp",), as_list)


def get_expert_data_parallel_replica_groups() -> list[list[int]]:
    """The ranks of all groups that hold the same experts."""
    return _replica_groups("dp_exp")


def get_expert_data_parallel_size() -> int:
    """Number of replicas of each expert."""
    return get_group("dp_exp").size


def get_expert_data_parallel_rank() -> int:
    """This rank's replica of its experts."""
    return get_group("dp_exp").rank


def get_zero1_sharding_groups() -> list[list[int]]:
    """The ranks of all groups that hold the same weights, over which ZeRO splits optimizer states."""
    return _replica_groups("dp", "cp")


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first rank of this tensor-parallel group."""
    return get_group("tp").ranks[0]


def get_data_parallel_src_rank() -> int:
    """The global rank of the first rank of this data-parallel group."""
    return get_group("dp").ranks[0]


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; after the last comes the first."""
    group = get_group("pp")
    return group.ranks[(group.rank + 1) % group.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the stage before; before the first comes the last."""
    group = get_group("pp")
    return group.ranks[group.rank - 1]


def get_pipeline_model_parallel_sr_group(parity: bool | None = None) -> list[list[int]]:
    """The pairs of ranks that send to each other in all pipelines.

    Args:
        parity: only the pairs that begin at an even stage (False) or at an odd one (True); all if None.
    """
    size = get_group("pp").size
    first, step = (0, 1) if parity is None else (int(parity), 2)
    return [
        [ranks[stage], ranks[(stage + 1) % size]]
        for ranks in _replica_groups("pp")
        for stage in range(first, size, step)
    ]


def get_next_rank_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The process group of this stage and the next, or with `as_list` the pairs of all ranks of this parity.

    The first call of it or of `get_prev_rank_group` creates the groups: every rank of the pipeline must call one.
    """
    return _neighbours(get_group("pp").rank, as_list=as_list)


def get_next_rank_replica_groups() -> list[list[int]]:
    """The pairs of each stage of this parity and the next."""
    return get_pipeline_model_parallel_sr_group(bool(get_group("pp").rank % 2))


def get_prev_rank_group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]]:
    """The process group of this stage and the one before, or with `as_list` such pairs; see `get_next_rank_group`."""
    group = get_group("pp")
    return _neighbours((group.rank - 1) % group.size, as_list=as_list)


def get_prev_rank_replica_groups() -> list[list[int]]:
    """The pairs of the stage before each stage of this parity, and it."""
    return get_pipeline_model_parallel_sr_group(not get_group("pp").rank % 2)


def create_pg_with_ranks(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of some stages of this rank's pipeline; None on the other stages. Called by these stages.

    Args:
        ranks: indices of the stages, the same on all ranks.

    Raises:
        ValueError: there is no such stage.
    """
    pipeline = get_group("pp")
    wrong = [stage for stage in ranks if not 0 <= stage < pipeline.size]
    if wrong:
        raise ValueError(f"ranks={list(ranks)}: stage {wrong[0]} does not exist; use 0..{pipeline.size - 1}")
    if pipeline.rank not in ranks:
        return None
    return _process_group(group_among([[group[stage] for stage in ranks] for group in pipeline.replica_groups]))


def rmsg(msg: str) -> str:
    """Prefix a message with this rank's place: `[rank_3_pp1_tp1_dp0_cp0] msg`; -1 along all axes without a mesh."""
    axes = ("pp", "tp", "dp", "cp")
    place = {axis: get_group(axis).rank if model_parallel_is_initialized() else -1 for axis in axes}
    rank = rank_of_job() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return f"[rank_{rank}_{'_'.join(f'{axis}{index}' for axis, index in place.items())}] {msg}"


def rmsg_ep(msg: str) -> str:
    """Prefix a message with this rank's place, experts included: `[pp1|ep0|tp1|dp0] msg`."""
    place = "|".join(f"{axis}{get_group(axis).rank}" for axis in ("pp", "ep", "tp", "dp"))
    return f"[{place}] {msg}"


def get_rank_info_str() -> str:
    """This rank's place, for file names: `DP_0_TP_1_PP_1`."""
    if not model_parallel_is_initialized():
        return "model_parallel_uninitialized"
    return "_".join(f"{axis.upper()}_{get_group(axis).rank}" for axis in ("dp", "tp", "pp"))


def _neighbours(first_stage: int, *, as_list: bool) -> dist.ProcessGroup | list[list[int]]:
    pipeline = get_group("pp")
    if as_list:
        return get_pipeline_model_parallel_sr_group(bool(first_stage % 2))
    if pipeline.size == 1:
        return _process_group(pipeline)
    wanted = None
    # All pairs in one order, or ranks would wait for each other in a ring.
    for stage in range(pipeline.size):
        pair = {stage, (stage + 1) % pipeline.size}
        if pipeline.rank in pair:
            made = group_among([[ranks[it] for it in sorted(pair)] for ranks in pipeline.replica_groups])
            wanted = made if stage == first_stage else wanted
    assert wanted is not None
    return _process_group(wanted)


def _replica_groups(*axes: str) -> list[list[int]]:
    return [list(ranks) for ranks in get_group(*axes).replica_groups]


def _process_group(group: Group) -> dist.ProcessGroup:
    if group.process_group is None:
        raise RuntimeError(
            f"{group} has no process group because this rank is its only member; check group.size > 1 first"
        )
    return group.process_group
