"""The documented getters of this rank's place in the mesh and of its process groups."""

import torch.distributed as dist

from nxd_state.parallel_state import get_group


def _group(axes: tuple[str, ...], as_list: bool) -> dist.ProcessGroup | list[list[int]]:
    group = get_group(*axes)
    if as_list:
        return [list(ranks) for ranks in group.replica_groups]
    if group.process_group is None:
        raise RuntimeError(f"{group} has no process group behind it")
    return group.process_group


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


# The tensor-parallel guide spells these two differently.
get_tensor_parallel_size = get_tensor_model_parallel_size
get_data_parallel_world_size = get_data_parallel_size
