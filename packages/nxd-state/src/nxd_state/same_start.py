"""Whether ranks that hold the same weights start with the same values: without a common seed they do not.

Replicas hold the same parameters. Tensor-parallel ranks share whole parameters, and copies of shards such as key and
value heads. Weights that start differently stay different: averaged gradients change them by the same amount.
"""

from collections.abc import Iterable, Iterator, Sequence

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


def check_same_start(parameters: Iterable[Tensor], group: Group | None = None) -> None:
    """Raise on every rank unless all ranks that hold the same weights have the same values. Called by all ranks.

    Compares bits, by one small message. On devices that record graphs nothing is compared: reading would cut the graph.

    Args:
        parameters: the same on every rank of a stage and in the same order.
        group: the replicas, where only their ranks call this; the whole mesh's if None.

    Raises:
        ValueError: values differ; it names the first such parameter and the ranks.
    """
    ranks = group or (get_world_group() if model_parallel_is_initialized() else Group.solo("world"))
    tensors = list(parameters)
    if ranks.size == 1 or any(map(is_lazy_device, tensors)) or torch.compiler.is_compiling():
        return
    expectations = list(_expectations_of_replicas(tensors, group))
    if group is None:
        expectations += expectations_of_split(tensors, active_group("tp"), splits_experts=splits_experts())
    fingerprints = fingerprints_of(tensors, expectations)
    if not are_equal(all_gather_object(summary_of(fingerprints), ranks)):
        check_details(ranks, all_gather_object(details_of(tensors, fingerprints), ranks))


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
