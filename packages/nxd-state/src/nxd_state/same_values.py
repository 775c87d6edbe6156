"""Whether ranks that should hold the same values do: expectations, and fingerprints by which the ranks compare them.

Tensor-parallel ranks compare their initial weights at the first steps of torch's own optimizers. `same_start` compares
them on request. Nothing here needs the mesh.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from nxd_state.device import has_float64, is_lazy_device
from nxd_state.group import Group
from nxd_state.parameter_marks import is_expert, is_tensor_parallel
from nxd_state.script_world import rank_of_job, store_of_job
from nxd_state.shard_spec import Box, get_shard_spec
from nxd_state.sharded_values import owned_range
from nxd_state.store_messages import read_message

_WORDS = 1024  # added up side by side, so that a fingerprint also depends on the order of values
_CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class ExpectedEqual:
    """An expectation that some ranks hold equal values.

    Attributes:
        held_by: the axis, and the first rank of those ranks.
        part: the index of the parameter; for a copied part of a shard also its name and offset.
        box: the part of this rank's tensor; None for all of it.
    """

    held_by: tuple[str, int]
    part: tuple[Any, ...]
    box: Box | None


Details = dict[str, tuple[str, int, tuple[int, ...], int]]  # by expectation: axis, parameter, shape and fingerprint


def expectations_of_split(tensors: Sequence[Tensor], split: Group, *, splits_experts: bool) -> Iterator[ExpectedEqual]:
    """Expectations of tensor-parallel ranks: whole parameters, and copies of shards; without experts that are split."""
    held_by = (split.axis, split.ranks[0])
    for index, tensor in enumerate(tensors):
        if split.size == 1 or not has_values(tensor) or (splits_experts and is_expert(tensor)):
            continue
        spec = get_shard_spec(tensor)
        if not is_split(tensor):
            yield ExpectedEqual(held_by, (index,), None)
        for piece in spec.pieces if spec is not None and spec.axis == split.axis else ():
            if piece.copies > 1:
                yield ExpectedEqual(held_by, (index, piece.name, piece.logical.offset), piece.local)


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor has values to compare; those of parameters sharded over replicas were compared before."""
    return owned_range(tensor) is None and not (tensor.is_meta or is_traceable_wrapper_subclass(tensor))


def is_split(tensor: Tensor) -> bool:
    """Whether ranks hold parts of the tensor."""
    return get_shard_spec(tensor) is not None or is_tensor_parallel(tensor)


def fingerprints_of(
    tensors: Sequence[Tensor], expectations: Iterable[ExpectedEqual]
) -> list[tuple[ExpectedEqual, int]]:
    """A number for this rank's values of each expectation."""
    return [(expected, _fingerprint(tensors[expected.part[0]], expected.box)) for expected in expectations]


def summary_of(fingerprints: Iterable[tuple[ExpectedEqual, int]]) -> dict[str, str]:
    """A hash of all whole parameters, and one of the copied parts at each offset: they are copies of the same ranks."""
    hashes: dict[str, Any] = {}
    for expected, value in fingerprints:
        offset = expected.part[2:]
        hashes.setdefault(f"{expected.held_by}{offset}", hashlib.sha256()).update(f"{expected.part}{value}".encode())
    return {key: digest.hexdigest()[:16] for key, digest in hashes.items()}


def are_equal(summaries: Iterable[Mapping[str, str]]) -> bool:
    """Whether the summaries have equal hashes under equal names."""
    first: dict[str, str] = {}
    return all(first.setdefault(key, value) == value for summary in summaries for key, value in summary.items())


def details_of(tensors: Sequence[Tensor], fingerprints: Iterable[tuple[ExpectedEqual, int]]) -> Details:
    """The details from which `check_details` finds the first parameter that differs."""
    details: Details = {}
    for expected, value in fingerprints:
        axis, index = expected.held_by[0], expected.part[0]
        details[f"{expected.held_by}{expected.part}"] = (axis, index, tuple(tensors[index].shape), value)
    return details


def details_from(fields: Any) -> Details:
    """Details parsed from JSON."""
    return {
        expected: (str(axis), int(index), tuple(shape), int(value))
        for expected, (axis, index, shape, value) in fields.items()
    }


def check_details(ranks: Group, details: Sequence[Details]) -> None:
    """Raise the same error on every rank of a group unless their fingerprints are equal."""
    held: dict[str, tuple[int, int]] = {}
    for rank, expectations in zip(ranks.ranks, details, strict=True):
        for expected, (axis, index, shape, value) in expectations.items():
            first_rank, first = held.setdefault(expected, (rank, value))
            if value != first:
                raise ValueError(_message(axis, index, shape, first_rank, rank))


@torch.no_grad()
def _fingerprint(tensor: Tensor, box: Box | None) -> int:
    """A 64-bit number that depends on each bit of the values; the same on every device."""
    values = tensor.detach() if box is None else tensor.detach()[box.slices]
    data = values.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros(_WORDS, dtype=torch.int64)
    for chunk in data.split(_CHUNK_BYTES):
        part = chunk if has_float64(chunk.device) else chunk.cpu()  # devices without it lack int64 as well
        words = torch.nn.functional.pad(part, (0, -len(part) % (8 * _WORDS))).view(torch.int64)
        total = total * 3 + words.view(-1, _WORDS).sum(0).cpu()
    return int((total * (2 * torch.arange(_WORDS) + 1)).sum())


def _message(axis: str, index: int, shape: tuple[int, ...], first: int, other: int) -> str:
    own_parts = ", or, if each is to have a part of its own, say so by set_shard_spec" if axis in ("tp", "ep") else ""
    return (
        f"ranks {first} and {other} start from different weights: parameter {index} of shape {shape} must be the same "
        f"on all ranks of a {axis!r} group; call torch.manual_seed(seed) with one seed on every rank before the model "
        f"is made, or load one checkpoint on all ranks before the first step{own_parts}"
    )


_KEYS = "nxd_state/first_steps"


def compare_at_first_steps(split: Group, *, splits_experts: bool) -> RemovableHandle:
    """Have tensor-parallel ranks compare the weights that they share when torch optimizers begin to change weights.

    For layers in a trainer that has neither a `GradientReducer` nor a ZeRO optimizer. An optimizer without any split
    parameter is skipped: the ranks may not share its model. Called by all ranks of a mesh.

    Args:
        split: the tensor-parallel group.
        splits_experts: whether the mesh places experts differently from the other layers.
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
        # Counted in the store because keys of an earlier mesh remain there.
        self._mesh = store_of_job().add(f"{_KEYS}/meshes_of_rank_{rank_of_job()}", 1)
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
        if any(map(is_lazy_device, tensors)) or not any(map(is_split, tensors)):
            self._compared.add(optimizer)
        elif _changes_weights(optimizer):  # asked last: to read a rate that lies on XLA would cut the graph
            self._write(optimizer, tensors)

    def _write(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        shapes = hashlib.sha256(repr([None if is_split(it) else it.shape for it in tensors]).encode()).hexdigest()[:16]
        self._alike[shapes] += 1
        key = self._written[optimizer] = f"{_KEYS}/{self._mesh}/{shapes}/{self._alike[shapes]}"
        fingerprints = fingerprints_of(
            tensors, expectations_of_split(tensors, self._split, splits_experts=self._splits_experts)
        )
        store, rank = store_of_job(), rank_of_job()
        store.set(f"{key}/details_of_{rank}", json.dumps(details_of(tensors, fingerprints)))
        # Returns once the store has it, which `set` does not: a rank that this one meets later finds it.
        store.compare_set(f"{key}/summary_of_{rank}", "", json.dumps(summary_of(fingerprints)))

    def _read(self, optimizer: Optimizer) -> None:
        key, store, ranks = self._written[optimizer], store_of_job(), self._split
        summaries = [f"{key}/summary_of_{rank}" for rank in ranks.ranks]
        if not store.check(summaries):
            return
        self._compared.add(optimizer)
        if not are_equal([read_message(it, store.get(it), dict) for it in summaries]):
            details = [f"{key}/details_of_{rank}" for rank in ranks.ranks]
            check_details(ranks, [read_message(it, store.get(it), details_from) for it in details])


def _changes_weights(optimizer: Optimizer) -> bool:
    """Whether its step changes weights; at a rate of zero (a warm-up, or making states to load) it does not."""
    return any(group.get("lr", 1) != 0 for group in optimizer.param_groups)
