"""What scripts ask of their process: its device, its random streams, the ranks of its host, the border of a step."""

import os
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from nxd_state import (
    get_rng_state,
    get_world_group,
    initialize_model_parallel,
    is_host,
    model_parallel_is_initialized,
    records_graphs,
    rng_stream,
    set_rng_state,
    step_boundary,
)
from torch import Tensor


class RngTracker:
    """Leads to the streams of nxd_state, which `model_parallel_xla_manual_seed` seeds."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from this tensor-parallel rank's own stream inside the `with` block.

        Raises:
            RuntimeError: the streams are not seeded.
        """
        return rng_stream("tp")

    def get_states(self) -> dict[str, dict[str, Tensor]]:
        """State of every stream, to be saved."""
        return get_rng_state()

    def set_states(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Restore a state of `get_states`."""
        set_rng_state(states)


_TRACKER = RngTracker()


def get_xla_rng_tracker() -> RngTracker:
    """The one tracker of this process, on any device."""
    return _TRACKER


def get_local_world_size() -> int:
    """Ranks on this host: what the launcher says, else all of them."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return get_world_group().size if model_parallel_is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def initialize_fallback_parallel_state(device: torch.device | None = None) -> None:
    """Create a mesh of one rank unless there is a mesh. Layers here work as plain ones without it."""
    if not model_parallel_is_initialized():
        initialize_model_parallel()


def is_pjrt_device() -> bool:
    """Whether this process computes through PJRT, the runtime interface of XLA devices."""
    return records_graphs()


def cpu_mode() -> bool:
    """Whether this process computes on the CPU."""
    return is_host()


def mark_step() -> None:
    """End the recorded graph, where the device records one; does nothing elsewhere."""
    if records_graphs():
        step_boundary()


def master_print(msg: object) -> None:
    """Print on rank 0, or on the only one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(msg, flush=True)
