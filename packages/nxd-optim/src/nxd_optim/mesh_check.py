"""Checks that a job of several ranks has a mesh: without one, each rank would act as if it were the whole job."""

import torch.distributed as dist
from nxd_state import model_parallel_is_initialized


def require_mesh() -> None:
    """Check that the ranks of this job have been laid out as a mesh.

    Raises:
        RuntimeError: torch.distributed runs several ranks, but there is no mesh.
    """
    if not model_parallel_is_initialized() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {dist.get_world_size()} ranks, but no mesh says what they do; call "
            "nxd_state.initialize_model_parallel() first: with its defaults all ranks are data-parallel replicas"
        )
