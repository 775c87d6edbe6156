"""DualPipe-V: forwards of one of a rank's two stages beside backwards of the other, to hide each other's messages."""

from nxd_pipeline.schedules.action import Action, ActionKind
from nxd_pipeline.schedules.makers.order import Order, check_sizes, v_placement
from nxd_pipeline.schedules.schedule import Schedule

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


def dualpipe_v(pipeline_size: int, num_microbatches: int) -> Schedule:
    """DualPipe with a V-shaped placement (DeepSeek-AI 2024, "DeepSeek-V3"; cut in half by Qi et al. 2025).

    Rank i holds stages i and 2 * pipeline_size - 1 - i and keeps at most `2 * pipeline_size + 1` activations of such
    half-size stages. In the middle, forwards of one stage alternate with whole backwards of the other; only at the
    ends is the backward split. Made for `num_microbatches >= 2 * pipeline_size`; fewer leave bubbles.
    """
    check_sizes(pipeline_size, num_microbatches)
    orders = (_rank_order(rank, pipeline_size, num_microbatches) for rank in range(pipeline_size))
    return Schedule("dualpipe-v", num_microbatches, v_placement(pipeline_size), tuple(orders))


def _rank_order(rank: int, pipeline_size: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * pipeline_size - 1 - rank
    behind = pipeline_size - 1 - rank  # ranks further down the V
    steady = max(num_microbatches, 2 * pipeline_size) - 2 * pipeline_size + rank + 1
    order = Order(num_microbatches)
    # Warm-up: forwards, then gradients of the first microbatches as soon as these come back up.
    order.add(F, down, times=2 * behind)
    order.add(F, down, up, times=rank + 1)
    for _ in range(behind):
        order.add(I, up).add(W, up).add(F, up)
    # Steady: a forward of one stage beside a backward of the other.
    for _ in range(steady):
        order.add(F, down).add(B, up).add(F, up).add(B, down)
    # The end: no new microbatches; from the middle of the last pairs on, weights wait until nobody waits for inputs.
    for _ in range(behind):
        order.add(B, up).add(F, up).add(B, down)
    waiting: list[int] = []
    for number, stage in enumerate((up, down) * (rank + 1)):
        if number <= rank:
            order.add(B, stage)
        else:
            order.add(I, stage)
            waiting.append(stage)
    for _ in range(behind):
        order.add(W, waiting.pop(0)).add(I, down)
        waiting.append(down)
    for stage in waiting:
        order.add(W, stage)
    return order.actions()
