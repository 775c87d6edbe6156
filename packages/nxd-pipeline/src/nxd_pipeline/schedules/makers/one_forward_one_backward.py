"""1F1B, with one stage per rank: as short as GPipe, with activations for as many microbatches as there are ranks."""

from nxd_pipeline.schedules.action import ActionKind
from nxd_pipeline.schedules.makers.order import Order, check_sizes, looped_placement
from nxd_pipeline.schedules.schedule import Schedule


def one_forward_one_backward(pipeline_size: int, num_microbatches: int) -> Schedule:
    """Forwards to warm up, one forward and one backward in turn, then the backwards left (Narayanan et al. 2019).

    Rank i warms up with `min(pipeline_size - 1 - i, num_microbatches)` forwards ("PipeDream", with the flush of
    "PipeDream-Flush") and keeps at most `min(pipeline_size - i, num_microbatches)` activations.
    """
    check_sizes(pipeline_size, num_microbatches)
    orders = []
    for stage in range(pipeline_size):
        warm_up = min(pipeline_size - 1 - stage, num_microbatches)
        order = Order(num_microbatches)
        order.add(ActionKind.FORWARD, stage, times=warm_up)
        for _ in range(num_microbatches - warm_up):
            order.add(ActionKind.FORWARD, stage).add(ActionKind.BACKWARD, stage)
        order.add(ActionKind.BACKWARD, stage, times=warm_up)
        orders.append(order.actions())
    return Schedule("1f1b", num_microbatches, looped_placement(pipeline_size), tuple(orders))
