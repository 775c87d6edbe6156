"""Whether ranks that hold the same weights start with the same values: without a common seed they do not.

Replicas hold the same parameters. Tensor-parallel ranks share whole parameters, and copies of shards such as key and
value heads. Weights that start differently stay different: averaged gradients change them by the same amount.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nxd_state.collectives import all_gather_object
from nxd_state.device import is_lazy_device
from nxd_state.group import Group
from nxd_state.parallel_state import active_group, get_world_group, model_parallel_is_initialized, splits_experts
from nxd_state.parameter_marks import is_expert
from nxd_state.same_values import (
    ExpectedEqual,
    are_equal,
    check_details,
    details_of,
    expectations_of_split,
    fingerprints_of,
    has_values,
    summary_of,
)


class StartComparison:
    """Compares the initial values of parameters, of which not all are in memory at the same time.

    Args:
        group: the replicas, where only their ranks compare; the whole mesh's if None.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._group = group
        self._ranks = group or (get_world_group() if model_parallel_is_initialized() else Group.solo("world"))
        self._is_off = self._ranks.size == 1
        self._tensors: list[Tensor] = []
        self._fingerprints: list[tuple[ExpectedEqual, int]] = []

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Note the values of parameters; nothing is sent. On devices that record graphs nothing is compared.

        Args:
            parameters: the same on every rank of a stage and in the same order, over all calls.
        """
        tensors = list(parameters)
        self._is_off |= any(map(is_lazy_device, tensors)) or torch.compiler.is_compiling()
        if self._is_off:
            return
        expectations = list(_expectations_of_replicas(tensors, self._group))
        if self._group is None:
            expectations += expectations_of_split(tensors, active_group("tp"), splits_experts=splits_experts())
        before = len(self._tensors)
        for expected, value in fingerprints_of(tensors, expectations):
            index, *rest = expected.part
            self._fingerprints.append((replace(expected, part=(before + index, *rest)), value))
        self._tensors += tensors

    def check(self) -> None:
        """Raise a ValueError on every rank, naming the first parameter that differs. Called by all ranks."""
        if self._is_off:
            return
        if not are_equal(all_gather_object(summary_of(self._fingerprints), self._ranks)):
            check_details(self._ranks, all_gather_object(details_of(self._tensors, self._fingerprints), self._ranks))


def check_same_start(parameters: Iterable[Tensor], group: Group | None = None) -> None:
    """Raise on every rank unless all ranks that hold the same weights have the same values. Called by all ranks.

    Compares bits, by one small message. On devices that record graphs nothing is compared: reading would cut the graph.

    Args:
        parameters: the same on every rank of a stage and in the same order.
        group: the replicas, where only their ranks call this; the whole mesh's if None.

    Raises:
        ValueError: values differ; it names the first such parameter and the ranks.
    """
    comparison = StartComparison(group)
    comparison.add(parameters)
    comparison.check()


def _expectations_of_replicas(tensors: Sequence[Tensor], group: Group | None) -> Iterator[ExpectedEqual]:
    """Expectations of the data- and context-parallel ranks, or of the ranks of `group`."""
    replicas = group or active_group("dp", "cp")
    for index, tensor in enumerate(tensors):
        if not has_values(tensor):
            continue
        of_split_experts = splits_experts() and is_expert(tensor)
        same = active_group("dp_exp") if of_split_experts and group is None else replicas
        if same.size > 1 and not (of_split_experts and group is not None):
            yield ExpectedEqual((same.axis, same.ranks[0]), (index,), None)
