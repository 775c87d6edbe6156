"""Interleaved 1F1B: several stages per rank, so that the pipeline fills and drains in shorter steps."""

from collections.abc import Sequence

from nxd_pipeline.schedules.action import ActionKind
from nxd_pipeline.schedules.makers.one_forward_one_backward import one_forward_one_backward
from nxd_pipeline.schedules.makers.order import Order, check_sizes, looped_placement
from nxd_pipeline.schedules.schedule import Schedule


def interleaved_one_forward_one_backward(
    pipeline_size: int, num_microbatches: int, *, virtual_pipeline_size: int = 2
) -> Schedule:
    """1F1B's bubble divided by the number of stages per rank, for more messages and activations.

    Groups of `pipeline_size` microbatches go through a rank's stages in turn (Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"). Rank i warms up with
    `2 * (pipeline_size - 1 - i) + (virtual_pipeline_size - 1) * group` forwards and keeps one more activation.
    Where `num_microbatches` is no multiple of `pipeline_size`, groups are larger: as small a bubble, for the
    activations of a larger group. With one stage per rank this is 1F1B.
    """
    check_sizes(pipeline_size, num_microbatches, virtual_pipeline_size)
    if virtual_pipeline_size == 1:
        return one_forward_one_backward(pipeline_size, num_microbatches)
    rank_of_stage = looped_placement(pipeline_size, virtual_pipeline_size)
    groups = group_sizes(pipeline_size, num_microbatches)
    orders = []
    for rank in range(pipeline_size):
        stages = range(rank, len(rank_of_stage), pipeline_size)
        forwards = _in_groups(stages, groups)
        backwards = _in_groups(stages[::-1], groups)
        warm_up = min(2 * (pipeline_size - 1 - rank) + (virtual_pipeline_size - 1) * groups[0], len(forwards))
        order = Order(num_microbatches)
        order.add(ActionKind.FORWARD, *forwards[:warm_up])
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order.add(ActionKind.FORWARD, forward).add(ActionKind.BACKWARD, backward)
        order.add(ActionKind.BACKWARD, *backwards[len(forwards) - warm_up :])
        orders.append(order.actions())
    return Schedule("interleaved", num_microbatches, rank_of_stage, tuple(orders))


def group_sizes(pipeline_size: int, num_microbatches: int) -> list[int]:
    """Microbatches in as many groups of at least `pipeline_size` as they allow, larger groups first; else in one."""
    groups = max(1, num_microbatches // pipeline_size)
    size, larger = divmod(num_microbatches, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def _in_groups(stages: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The stage of each turn: a group of microbatches on one stage after the other, then the next group."""
    return [stage for group in groups for stage in stages for _ in range(group)]
