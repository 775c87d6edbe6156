"""The ranks of a job, for packages that build on this one: this rank, its groups, and collectives.

Everything is re-exported from nxd_state, which documents it.
"""

from nxd_state import (
    active_group,
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    destroy_model_parallel,
    device_type,
    get_device,
    get_group,
    get_mesh,
    get_world_group,
    is_host,
    model_parallel_is_initialized,
    records_graphs,
    seed_model_parallel,
    step_boundary,
    widest_float,
)

__all__ = [
    "model_parallel_is_initialized",
    "destroy_model_parallel",
    "get_mesh",
    "get_group",
    "active_group",
    "get_world_group",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "barrier",
    "device_type",
    "get_device",
    "is_host",
    "records_graphs",
    "widest_float",
    "step_boundary",
    "seed_model_parallel",
]
