"""ZB-V: two stages per rank in the shape of a V and the backward split in two: no bubble, in the memory of 1F1B."""

from nxd_pipeline.schedules.action import Action, ActionKind
from nxd_pipeline.schedules.makers.order import Order, check_sizes, v_placement
from nxd_pipeline.schedules.schedule import Schedule

F, I, W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741


def zero_bubble_v(pipeline_size: int, num_microbatches: int) -> Schedule:
    """No rank waits once it has begun, where forward and both backwards take equally long.

    From Qi et al. 2023, "Zero Bubble Pipeline Parallelism". Rank i holds stages i and 2 * pipeline_size - 1 - i, and
    keeps at most `2 * pipeline_size` activations of such half-size stages, what 1F1B's first rank keeps. Fewer than
    `2 * pipeline_size - 1` microbatches leave bubbles.
    """
    check_sizes(pipeline_size, num_microbatches)
    orders = (_rank_order(rank, pipeline_size, num_microbatches) for rank in range(pipeline_size))
    return Schedule("zb-v", num_microbatches, v_placement(pipeline_size), tuple(orders))


def _rank_order(rank: int, pipeline_size: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * pipeline_size - 1 - rank
    length = max(num_microbatches, 2 * pipeline_size - 1)
    order = Order(num_microbatches)
    # Warm-up: forwards until the first microbatch comes back up, then its two stages in turn.
    order.add(F, down, times=2 * (pipeline_size - rank) - 1)
    order.add(F, up, down, times=rank)
    for _ in range(pipeline_size - rank):
        order.add(F, up).add(I, up).add(W, up)
    # Steady: each rank computes all the time.
    while order.forwards(up) < length:
        if order.forwards(down) < length:
            order.add(F, down)
        order.add(I, down).add(W, down)
        order.add(F, up).add(I, up).add(W, up)
    # The end: gradients of inputs first while others wait for them, then the gradients of weights left.
    order.add(I, down, up, times=rank)
    for _ in range(pipeline_size - rank):
        order.add(I, down).add(W, down)
    order.add(W, up, times=order.weights_left(up))
    order.add(W, down, times=order.weights_left(down))
    return order.actions()
