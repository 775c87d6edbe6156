"""A job of several ranks needs a mesh: without one, each rank would take itself for the whole job."""

import torch.distributed as dist
from nxd_state import model_parallel_is_initialized


def require_mesh() -> None:
    """Check that somebody has said what the ranks of this job do.

    Raises:
        RuntimeError: torch.distributed runs several ranks, but there is no mesh.
    """
    if not model_parallel_is_initialized() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {dist.get_world_size()} ranks, but no mesh says what they do; call "
            "nxd_state.initialize_model_parallel() first: with its defaults all ranks are data-parallel replicas"
        )
