"""The mesh of ranks, groups, collectives, devices, random numbers and shard metadata of the nxd packages."""

from nxd_state.collectives import (
    Pending,
    Receive,
    Send,
    abort_group,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_,
    all_reduce_coalesced_,
    all_to_all,
    barrier,
    batch_isend_irecv,
    broadcast,
    irecv,
    isend,
    recv,
    reduce_scatter,
    send,
)
from nxd_state.collectives.debug import CollectiveMismatch
from nxd_state.collectives.shared import shared_memory_bytes
from nxd_state.device import device_type, get_device, step_boundary
from nxd_state.group import Group
from nxd_state.mesh import Mesh
from nxd_state.meta_init import allocate_meta_tensor, seed_of_module
from nxd_state.move_model import move_model_to_device
from nxd_state.neuron import extracting_graphs, neuron_settings, prepare_neuron
from nxd_state.neuron_errors import DeviceError
from nxd_state.parallel_state import (
    active_group,
    destroy_model_parallel,
    get_context_parallel_rank,
    get_context_parallel_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_size,
    get_data_parallel_world_size,
    get_expert_model_parallel_rank,
    get_expert_model_parallel_size,
    get_group,
    get_mesh,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_size,
    get_tensor_parallel_size,
    get_world_group,
    initialize_model_parallel,
    model_parallel_is_initialized,
    subgroup,
)
from nxd_state.process_groups import transport_device
from nxd_state.rng import get_rng_state, rng_stream, seed_model_parallel, set_rng_state
from nxd_state.shard_spec import (
    Box,
    ShardPiece,
    ShardSpec,
    check_shard_specs,
    copy_parameter_attributes,
    fuse_along,
    get_shard_spec,
    set_partition_attributes,
    set_shard_spec,
    shard_along,
)
from nxd_state.shared_memory import SharedMemoryError
from nxd_state.transfers import read_later, send_to_device

__version__ = "0.1.0"

__all__ = [
    # the mesh
    "Mesh",
    "Group",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "destroy_model_parallel",
    "get_mesh",
    "get_group",
    "active_group",
    "subgroup",
    "get_world_group",
    "get_tensor_model_parallel_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_group",
    "get_tensor_parallel_size",
    "get_pipeline_model_parallel_size",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_group",
    "get_data_parallel_size",
    "get_data_parallel_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_group",
    "get_context_parallel_size",
    "get_context_parallel_rank",
    "get_expert_model_parallel_size",
    "get_expert_model_parallel_rank",
    # collectives
    "Pending",
    "CollectiveMismatch",
    "SharedMemoryError",
    "shared_memory_bytes",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced_",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "Send",
    "Receive",
    "abort_group",
    "barrier",
    "all_gather_object",
    # shard metadata
    "Box",
    "ShardPiece",
    "ShardSpec",
    "shard_along",
    "fuse_along",
    "set_shard_spec",
    "get_shard_spec",
    "set_partition_attributes",
    "copy_parameter_attributes",
    "check_shard_specs",
    # devices and random numbers
    "device_type",
    "get_device",
    "transport_device",
    "step_boundary",
    "send_to_device",
    "read_later",
    "DeviceError",
    "prepare_neuron",
    "neuron_settings",
    "extracting_graphs",
    "move_model_to_device",
    "allocate_meta_tensor",
    "seed_of_module",
    "seed_model_parallel",
    "rng_stream",
    "get_rng_state",
    "set_rng_state",
]
