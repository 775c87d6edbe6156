"""Tensor-parallel ranks compare what they start from at the first steps of torch's own optimizers.

Nothing here needs the mesh, which starts it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nxd_state.device import records_graphs
from nxd_state.group import Group
from nxd_state.same_values import (
    agree,
    check_details,
    claims_of_split,
    details_from,
    details_of,
    fingerprints_of,
    is_split,
    summary_of,
)
from nxd_state.store_messages import read_message

_KEYS = "nxd_state/first_steps"


def compare_at_first_steps(split: Group, *, splits_experts: bool) -> RemovableHandle:
    """From now on tensor-parallel ranks compare what they have alike when torch optimizers begin to change weights.

    For layers in a trainer that has neither a `GradientReducer` nor a ZeRO-1 optimizer. An optimizer without any split
    parameter is not looked at: it may be of a model that the ranks do not share. Called by all ranks of a mesh.

    Args:
        split: the tensor-parallel ranks.
        splits_experts: whether experts lie on the ranks in another way than the other layers.
    """
    return register_optimizer_step_pre_hook(_FirstSteps(split, splits_experts))


class _FirstSteps:
    """Compares through the job's store, in which no rank waits for another.

    At an optimizer's first step a rank writes what it starts from, and at a later one, usually the second, reads what
    the others have written, once all have. A step may be one rank's alone: a GradScaler leaves out those of ranks
    with infinite gradients.
    """

    def __init__(self, split: Group, splits_experts: bool) -> None:
        self._split, self._splits_experts = split, splits_experts
        # Counted in the store, as it is there that keys of an earlier mesh are left.
        self._mesh = _get_default_store().add(f"{_KEYS}/meshes_of_rank_{dist.get_rank()}", 1)
        self._alike: Counter[str] = Counter()  # optimizers, by the shapes of their parameters
        self._written: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()  # under which key
        self._compared: WeakSet[Optimizer] = WeakSet()

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling() or optimizer in self._compared:
            return
        if optimizer in self._written:
            self._read(optimizer)
            return
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(map(records_graphs, tensors)) or not any(map(is_split, tensors)):
            self._compared.add(optimizer)
        elif _changes_weights(optimizer):  # asked last: to read a rate that lies on XLA would cut the graph
            self._write(optimizer, tensors)

    def _write(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        shapes = hashlib.sha256(repr([None if is_split(it) else it.shape for it in tensors]).encode()).hexdigest()[:16]
        self._alike[shapes] += 1
        key = self._written[optimizer] = f"{_KEYS}/{self._mesh}/{shapes}/{self._alike[shapes]}"
        fingerprints = fingerprints_of(
            tensors, claims_of_split(tensors, self._split, splits_experts=self._splits_experts)
        )
        store, rank = _get_default_store(), dist.get_rank()
        store.set(f"{key}/details_of_{rank}", json.dumps(details_of(tensors, fingerprints)))
        # Returns once the store has it, which `set` does not: a rank that this one meets later finds it.
        store.compare_set(f"{key}/summary_of_{rank}", "", json.dumps(summary_of(fingerprints)))

    def _read(self, optimizer: Optimizer) -> None:
        key, store, ranks = self._written[optimizer], _get_default_store(), self._split
        summaries = [f"{key}/summary_of_{rank}" for rank in ranks.ranks]
        if not store.check(summaries):
            return
        self._compared.add(optimizer)
        if not agree([read_message(it, store.get(it), dict) for it in summaries]):
            details = [f"{key}/details_of_{rank}" for rank in ranks.ranks]
            check_details(ranks, [read_message(it, store.get(it), details_from) for it in details])


def _changes_weights(optimizer: Optimizer) -> bool:
    """Whether its step does; those at a rate of zero begin a warm-up, or make states that a checkpoint is to fill."""
    return any(group.get("lr", 1) != 0 for group in optimizer.param_groups)
