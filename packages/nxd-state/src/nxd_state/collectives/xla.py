"""Collectives as operations of the graph that torch-xla records: they run with the rest of it, at the step's boundary.

Each names the replica groups of the whole axis, never this rank: so every rank records the same graph. Layouts are not
pinned, which the compiler may then choose. Callers have checked their arguments and handled groups of one. torch-xla's
own reductions do nothing in a process that is alone; which groups are is known here, so its C++ is asked directly.

Stages of a pipeline record different graphs, and a device that runs one with a collective waits until all of its ranks
run theirs. What goes between stages is therefore a graph of its own, the same on all ranks that take part.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nxd_state.collectives.messages import Receive, Send
from nxd_state.device import step_boundary
from nxd_state.group import Group

_PIN_LAYOUT = False


@torch.no_grad()
def all_reduce(tensor: Tensor, group: Group, op: str) -> Tensor:
    """Sum, or what `op` says."""
    kind, scale = _reduction(op, group)
    with _own_graph_between_stages(group):
        return _xla_model().torch_xla._XLAC._xla_all_reduce(kind, tensor, scale, _groups(group), _PIN_LAYOUT)


@torch.no_grad()
def all_reduce_(tensor: Tensor, group: Group, op: str) -> None:
    """Reduce into `tensor`."""
    tensor.copy_(all_reduce(tensor, group, op))


@torch.no_grad()
def all_reduce_coalesced_(tensors: list[Tensor], group: Group, op: str) -> None:
    """Reduce into each of the tensors, of one dtype, by one operation."""
    kind, scale = _reduction(op, group)
    with _own_graph_between_stages(group):
        _xla_model().torch_xla._XLAC._xla_all_reduce_inplace(kind, tensors, scale, _groups(group), _PIN_LAYOUT)


@torch.no_grad()
def all_gather(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Gather along `dim`."""
    with _own_graph_between_stages(group):
        return _xla_model().all_gather(tensor, dim=dim, groups=_groups(group), pin_layout=_PIN_LAYOUT)


@torch.no_grad()
def reduce_scatter(tensor: Tensor, group: Group, dim: int, op: str) -> Tensor:
    """Reduce, and keep this rank's part along `dim`."""
    kind, scale = _reduction(op, group)
    with _own_graph_between_stages(group):
        return _xla_model().reduce_scatter(
            kind,
            tensor,
            scale=scale,
            scatter_dim=dim,
            shard_count=group.size,
            groups=_groups(group),
            pin_layout=_PIN_LAYOUT,
        )


@torch.no_grad()
def all_to_all(tensor: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """Exchange along `split_dim`, concatenate along `concat_dim`."""
    groups = _groups(group)
    with _own_graph_between_stages(group):
        return _xla_model().all_to_all(tensor, split_dim, concat_dim, group.size, groups, pin_layout=_PIN_LAYOUT)


@torch.no_grad()
def broadcast(tensor: Tensor, group: Group, source: int) -> Tensor:
    """The sum of the source's tensor and the others' zeros: the source is told apart by data, not by its graph."""
    is_source = group.rank_tensor(tensor) == source
    whole = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    return all_reduce(torch.where(is_source, whole, torch.zeros_like(whole)), group, "sum").to(tensor.dtype)


@torch.no_grad()
def exchange(messages: Sequence[Send | Receive], group: Group) -> None:
    """Send, and receive into the tensors given; each message is a permute that both its ends run as a graph.

    All ranks take theirs in one order, by the ends, so that none waits for another in a circle.
    """
    step_boundary()
    for source, destination, tensor in sorted(((*_ends(it, group), it.tensor) for it in messages), key=_by_ends):
        pairs = [[ranks[source], ranks[destination]] for ranks in group.replica_groups]
        carried = _xla_model().collective_permute(tensor.detach(), pairs)
        step_boundary()
        if destination == group.rank:
            tensor.copy_(carried)


def _ends(message: Send | Receive, group: Group) -> tuple[int, int]:
    if isinstance(message, Send):
        return group.rank, message.destination
    return message.source, group.rank


def _by_ends(message: tuple[int, int, Tensor]) -> tuple[int, int]:
    return message[:2]


@contextmanager
def _own_graph_between_stages(group: Group) -> Iterator[None]:
    if group.crosses_stages:
        step_boundary()
    yield
    if group.crosses_stages:
        step_boundary()


def _reduction(op: str, group: Group) -> tuple[str, float]:
    """XLA's name of the reduction, and what its result is multiplied by."""
    return ("sum", 1.0 / group.size) if op == "avg" else (op, 1.0)


def _groups(group: Group) -> list[list[int]]:
    return [list(ranks) for ranks in group.replica_groups]


def _xla_model() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")
