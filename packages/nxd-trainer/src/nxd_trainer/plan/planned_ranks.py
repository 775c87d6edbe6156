"""Ranks that are planned for and do not exist: one process takes the place of the first of them.

Layers ask for their tensor-parallel group and get one of the planned size, whose collectives move nothing. It is
torch's own "fake" transport that does this; nothing else in the package knows of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on the meta device, before torch 2.13
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the transport "fake")
from nxd_state import destroy_model_parallel, initialize_model_parallel, model_parallel_is_initialized


@contextmanager
def planned_ranks(tensor_parallel_size: int) -> Iterator[None]:
    """Inside, this process is the first rank of a tensor-parallel group of that size.

    Raises:
        RuntimeError: the process has real ranks already.
        ValueError: the size is not positive.
    """
    if dist.is_initialized() or model_parallel_is_initialized():
        raise RuntimeError(
            "a plan is made in a process without ranks of its own, but torch.distributed is initialised here; plan "
            "before, or in another process"
        )
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size={tensor_parallel_size} must be 1 or more")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=tensor_parallel_size)
    try:
        initialize_model_parallel(tensor_parallel_size)
        yield
    finally:
        destroy_model_parallel()
        dist.destroy_process_group()
