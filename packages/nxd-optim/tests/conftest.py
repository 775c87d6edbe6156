"""What several test files need: a model's gradients from one process, and the messages that ranks exchange."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist


@contextmanager
def _recorded_messages(events=None):
    """Adds ("message", number of elements, dtype) to a list for each all-reduce that torch.distributed is given."""
    events = [] if events is None else events
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        events.append(("message", tensor.numel(), tensor.dtype))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield events
    finally:
        dist.all_reduce = original


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
