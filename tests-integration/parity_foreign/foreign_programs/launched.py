"""What a launcher such as torchrun tells a program, for programs that are called as functions."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def as_launched() -> Iterator[None]:
    """Set the environment variables of torchrun in the `with` block, if there are ranks, and forget what is left."""
    before = dict(os.environ)
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(
            RANK=rank,
            LOCAL_RANK=rank,
            GROUP_RANK="0",
            WORLD_SIZE=size,
            LOCAL_WORLD_SIZE=size,
            MASTER_ADDR="localhost",
            MASTER_PORT="1",  # nobody listens: the group is there already
            TORCHELASTIC_RUN_ID="test",
            ACCELERATE_USE_CPU="true",
        )
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def as_launched_for_accelerate() -> Iterator[None]:
    """The same for programs that use Accelerate, whose state of the process is forgotten, too."""
    from accelerate.state import AcceleratorState

    with as_launched():
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
