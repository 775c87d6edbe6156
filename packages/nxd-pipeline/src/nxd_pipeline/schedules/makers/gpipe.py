"""GPipe: all forwards, then all backwards. Simple, and every microbatch's activations live at once."""

from nxd_pipeline.schedules.action import ActionKind
from nxd_pipeline.schedules.makers.order import Order, check_sizes, looped_placement
from nxd_pipeline.schedules.schedule import Schedule


def gpipe(pipeline_size: int, num_microbatches: int, *, virtual_pipeline_size: int = 1) -> Schedule:
    """All forwards, stage after stage, then all backwards (Huang et al. 2019, "GPipe").

    With several stages per rank, each stage goes through all microbatches at once (Lamy-Poirier 2023, "Breadth-First
    Pipeline Parallelism"). A rank keeps `num_microbatches * virtual_pipeline_size` activations.
    """
    check_sizes(pipeline_size, num_microbatches, virtual_pipeline_size)
    rank_of_stage = looped_placement(pipeline_size, virtual_pipeline_size)
    orders = []
    for rank in range(pipeline_size):
        stages = range(rank, len(rank_of_stage), pipeline_size)
        order = Order(num_microbatches)
        for stage in stages:
            order.add(ActionKind.FORWARD, stage, times=num_microbatches)
        for stage in reversed(stages):
            order.add(ActionKind.BACKWARD, stage, times=num_microbatches)
        orders.append(order.actions())
    return Schedule("gpipe", num_microbatches, rank_of_stage, tuple(orders))
