"""Schedules by name, as configurations give them."""

from collections.abc import Callable
from dataclasses import dataclass

from nxd_pipeline.schedules.makers.dualpipe_v import dualpipe_v
from nxd_pipeline.schedules.makers.forward_only import inference
from nxd_pipeline.schedules.makers.gpipe import gpipe
from nxd_pipeline.schedules.makers.interleaved import interleaved_one_forward_one_backward
from nxd_pipeline.schedules.makers.one_forward_one_backward import one_forward_one_backward
from nxd_pipeline.schedules.makers.zero_bubble_h1 import zero_bubble_h1
from nxd_pipeline.schedules.makers.zero_bubble_v import zero_bubble_v
from nxd_pipeline.schedules.schedule import Schedule


@dataclass(frozen=True)
class _Entry:
    make: Callable[..., Schedule]
    stages_per_rank: int | None  # None: any number
    default_stages_per_rank: int


_CATALOG = {
    "gpipe": _Entry(gpipe, None, 1),
    "1f1b": _Entry(one_forward_one_backward, 1, 1),
    "interleaved": _Entry(interleaved_one_forward_one_backward, None, 2),
    "zb-h1": _Entry(zero_bubble_h1, 1, 1),
    "zb-v": _Entry(zero_bubble_v, 2, 2),
    "dualpipe-v": _Entry(dualpipe_v, 2, 2),
    "inference": _Entry(inference, None, 1),
}

SCHEDULE_NAMES = tuple(_CATALOG)


def make_schedule(
    name: str, pipeline_size: int, num_microbatches: int, *, virtual_pipeline_size: int | None = None
) -> Schedule:
    """The order of computation that the method `name` prescribes, without messages.

    Args:
        name: one of `SCHEDULE_NAMES`.
        pipeline_size: pipeline-parallel ranks.
        num_microbatches: any number from 1 on; few leave large bubbles.
        virtual_pipeline_size: stages per rank; None for 2 with `interleaved`, `zb-v` and `dualpipe-v`, else 1.

    Raises:
        ValueError: the name is not known, a size is not positive, or the method has another number of stages per rank.
    """
    if name not in _CATALOG:
        raise ValueError(f"schedule {name!r} is not known; use one of {', '.join(SCHEDULE_NAMES)}")
    entry = _CATALOG[name]
    stages_per_rank = entry.default_stages_per_rank if virtual_pipeline_size is None else virtual_pipeline_size
    if entry.stages_per_rank is None:
        return entry.make(pipeline_size, num_microbatches, virtual_pipeline_size=stages_per_rank)
    if stages_per_rank != entry.stages_per_rank:
        fitting = [other for other, it in _CATALOG.items() if it.stages_per_rank in (None, stages_per_rank)]
        raise ValueError(
            f"schedule {name!r} has virtual_pipeline_size={entry.stages_per_rank}, not {stages_per_rank}; leave it "
            f"out, or use one of {', '.join(fitting)}"
        )
    return entry.make(pipeline_size, num_microbatches)
