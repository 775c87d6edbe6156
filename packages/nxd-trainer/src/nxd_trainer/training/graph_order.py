"""One order of a run's tensors on all ranks, for XLA, whose graphs list their results in the order they were made in.

A checkpoint is read in another order on each rank, and what is filled in place counts as made then. Were it left so,
the ranks would record, and compile, graphs that differ in nothing but the order of their results.
"""

from collections.abc import Iterator

import torch
from nxd_optim import NeuronZero1Optimizer
from nxd_state import get_device, step_boundary
from torch import Tensor

from nxd_trainer.training.run_state import RunState


@torch.no_grad()
def renew_in_order(state: RunState) -> None:
    """Make weights and optimizer states anew, one after the other, by way of the host; elsewhere nothing happens."""
    if get_device().type != "xla":
        return
    step_boundary()  # what was loaded is there then, and no part of the next step's graph
    for tensor in _tensors(state):
        tensor.data = tensor.detach().cpu().to(tensor.device)


def _tensors(state: RunState) -> Iterator[Tensor]:
    yield from state.model.parameters()
    if isinstance(state.optimizer.optimizer, NeuronZero1Optimizer):
        for bucket, base in state.optimizer.optimizer.parts():
            for own in bucket.ranges:
                yield own.weight
                yield from _on_xla(base.state.get(own.weight, {}))
        return
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            yield from _on_xla(state.optimizer.state.get(parameter, {}))


def _on_xla(values: dict[str, Tensor]) -> Iterator[Tensor]:
    return (value for value in values.values() if value.device.type == "xla")
