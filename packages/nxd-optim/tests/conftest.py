"""What several test files need: a model's gradients from one process, and the messages that ranks exchange."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nxd_state.shared_memory import SharedMemoryTransport

ALL_REDUCES = ((dist, "all_reduce"), (SharedMemoryTransport, "all_reduce_"))


@contextmanager
def _recorded_messages(events=None):
    """Adds ("message", number of elements, dtype) to a list for each all-reduce, whatever carries it."""
    events = [] if events is None else events

    def recording(original):
        def all_reduce(*args, **kwargs):
            tensor = next(value for value in args if isinstance(value, torch.Tensor))
            events.append(("message", tensor.numel(), tensor.dtype))
            return original(*args, **kwargs)

        return all_reduce

    with ExitStack() as patches:
        for owner, name in ALL_REDUCES:
            patches.enter_context(mock.patch.object(owner, name, recording(getattr(owner, name))))
        yield events


@pytest.fixture
def recorded_messages():
    """A context manager for the functions that ranks run."""
    return _recorded_messages


def _set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.fixture
def set_gradients():
    """A function that gives parameters random gradients, the same for the same seed."""
    return _set_gradients
