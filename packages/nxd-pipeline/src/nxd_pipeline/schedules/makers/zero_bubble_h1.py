"""ZB-H1: 1F1B with the backward split in two, so that gradients of weights fill what would be bubbles."""

from nxd_pipeline.schedules.action import ActionKind
from nxd_pipeline.schedules.makers.order import Order, check_sizes, looped_placement
from nxd_pipeline.schedules.schedule import Schedule


def zero_bubble_h1(pipeline_size: int, num_microbatches: int) -> Schedule:
    """About a third of 1F1B's bubble in the memory of its first rank.

    The order is that of 1F1B (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). Rank i computes gradients of weights
    i microbatches after those of inputs, so each rank keeps at most `min(pipeline_size, num_microbatches)` activations.
    """
    check_sizes(pipeline_size, num_microbatches)
    orders = []
    for stage in range(pipeline_size):
        warm_up = min(pipeline_size - 1 - stage, num_microbatches)
        order = Order(num_microbatches)
        order.add(ActionKind.FORWARD, stage, times=warm_up)
        for microbatch in range(num_microbatches):
            order.add(ActionKind.FORWARD, stage).add(ActionKind.BACKWARD_INPUT, stage)
            if microbatch >= stage:
                order.add(ActionKind.BACKWARD_WEIGHT, stage)
        order.add(ActionKind.BACKWARD_WEIGHT, stage, times=min(stage, num_microbatches))
        orders.append(order.actions())
    return Schedule("zb-h1", num_microbatches, looped_placement(pipeline_size), tuple(orders))
