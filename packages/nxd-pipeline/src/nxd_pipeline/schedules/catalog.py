"""Schedules by name, and the pure functions that make them.

Forwards and backwards are listed in the order in which each rank computes them; each method cites its paper.
Messages are added by `insert_communication`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from nxd_pipeline.schedules.schedule import Action, ActionKind, Schedule

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


class Order:
    """Builds one rank's list of actions, each for the next microbatch of its stage.

    Microbatches from `num_microbatches` on are counted but omitted. A valid schedule stays valid without a microbatch,
    so patterns for many microbatches also work for few.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.actions: list[Action] = []
        self._num_microbatches = num_microbatches
        backwards = Counter[int]()
        self._counts = {F: Counter[int](), B: backwards, I: backwards, W: Counter[int]()}  # by kind and stage

    def add(self, kind: ActionKind, *stages: int, times: int = 1) -> "Order":
        """Add the next microbatch of each of `stages` in turn, `times` times."""
        for stage in stages * times:
            microbatch = self._counts[kind][stage]
            if microbatch < self._num_microbatches:
                self.actions.append(Action(kind, stage, microbatch))
            self._counts[kind][stage] += 1
            if kind is B:
                self._counts[W][stage] += 1
        return self

    def forwards(self, stage: int) -> int:
        """Return the number of forwards of a stage so far."""
        return self._counts[F][stage]

    def weights_left(self, stage: int) -> int:
        """Return the number of microbatches of a stage that have gradients of inputs but not yet of weights."""
        return self._counts[I][stage] - self._counts[W][stage]


def _schedule(name: str, placement: tuple[int, ...], num_microbatches: int, order: Callable[[int], Order]) -> Schedule:
    """Make a schedule from a function of the rank that returns its order."""
    actions = tuple(tuple(order(rank).actions) for rank in range(max(placement) + 1))
    return Schedule(name, num_microbatches, placement, actions)


def looped_placement(pipeline_size: int, virtual_pipeline_size: int = 1) -> tuple[int, ...]:
    """Place stage s on rank s % pipeline_size."""
    return tuple(range(pipeline_size)) * virtual_pipeline_size


def v_placement(pipeline_size: int) -> tuple[int, ...]:
    """Place two stages per rank, down and up again: the first and the last stage share rank 0."""
    return (*range(pipeline_size), *reversed(range(pipeline_size)))


def check_sizes(pipeline_size: int, num_microbatches: int, virtual_pipeline_size: int = 1) -> None:
    """Raise a ValueError for sizes that no schedule supports."""
    sizes = {
        "pipeline_size": pipeline_size,
        "num_microbatches": num_microbatches,
        "virtual_pipeline_size": virtual_pipeline_size,
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} is not a positive number; use 1 or more")


def gpipe(pipeline_size: int, num_microbatches: int, *, virtual_pipeline_size: int = 1) -> Schedule:
    """All forwards, stage after stage, then all backwards (Huang et al. 2019, "GPipe").

    With several stages per rank, each stage goes through all microbatches at once (Lamy-Poirier 2023, "Breadth-First
    Pipeline Parallelism"). A rank keeps `num_microbatches * virtual_pipeline_size` activations.
    """
    check_sizes(pipeline_size, num_microbatches, virtual_pipeline_size)
    placement = looped_placement(pipeline_size, virtual_pipeline_size)

    def order(rank: int) -> Order:
        stages, order = range(rank, len(placement), pipeline_size), Order(num_microbatches)
        for stage in stages:
            order.add(F, stage, times=num_microbatches)
        for stage in reversed(stages):
            order.add(B, stage, times=num_microbatches)
        return order

    return _schedule("gpipe", placement, num_microbatches, order)


def one_forward_one_backward(pipeline_size: int, num_microbatches: int) -> Schedule:
    """Forwards to warm up, one forward and one backward in turn, then the backwards left (Narayanan et al. 2019).

    Rank i warms up with `min(pipeline_size - 1 - i, num_microbatches)` forwards ("PipeDream", with the flush of
    "PipeDream-Flush") and keeps at most `min(pipeline_size - i, num_microbatches)` activations.
    """
    check_sizes(pipeline_size, num_microbatches)

    def order(stage: int) -> Order:
        warm_up = min(pipeline_size - 1 - stage, num_microbatches)
        order = Order(num_microbatches).add(F, stage, times=warm_up)
        for _ in range(num_microbatches - warm_up):
            order.add(F, stage).add(B, stage)
        return order.add(B, stage, times=warm_up)

    return _schedule("1f1b", looped_placement(pipeline_size), num_microbatches, order)


def interleaved_one_forward_one_backward(
    pipeline_size: int, num_microbatches: int, *, virtual_pipeline_size: int = 2
) -> Schedule:
    """1F1B's bubble divided by the number of stages per rank, for more messages and activations.

    Groups of `pipeline_size` microbatches go through a rank's stages in turn (Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"). Rank i warms up with
    `2 * (pipeline_size - 1 - i) + (virtual_pipeline_size - 1) * group` forwards and keeps one more activation.
    If `num_microbatches` is not a multiple of `pipeline_size`, groups are larger: the bubble stays as small, but a
    larger group's activations are kept. With one stage per rank this is 1F1B.
    """
    check_sizes(pipeline_size, num_microbatches, virtual_pipeline_size)
    if virtual_pipeline_size == 1:
        return one_forward_one_backward(pipeline_size, num_microbatches)
    placement = looped_placement(pipeline_size, virtual_pipeline_size)
    groups = group_sizes(pipeline_size, num_microbatches)

    def order(rank: int) -> Order:
        stages = range(rank, len(placement), pipeline_size)
        forwards, backwards = _in_groups(stages, groups), _in_groups(stages[::-1], groups)
        warm_up = min(2 * (pipeline_size - 1 - rank) + (virtual_pipeline_size - 1) * groups[0], len(forwards))
        order = Order(num_microbatches).add(F, *forwards[:warm_up])
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order.add(F, forward).add(B, backward)
        return order.add(B, *backwards[len(forwards) - warm_up :])

    return _schedule("interleaved", placement, num_microbatches, order)


def group_sizes(pipeline_size: int, num_microbatches: int) -> list[int]:
    """Return the sizes of as many groups of at least `pipeline_size` microbatches as possible, larger ones first."""
    groups = max(1, num_microbatches // pipeline_size)
    size, larger = divmod(num_microbatches, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def _in_groups(stages: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Return the stage of each step: each group of microbatches goes through all stages before the next group."""
    return [stage for group in groups for stage in stages for _ in range(group)]


def zero_bubble_h1(pipeline_size: int, num_microbatches: int) -> Schedule:
    """A third of 1F1B's bubble, approximately, with the memory of its first rank.

    The order is that of 1F1B (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). Rank i computes gradients of weights
    i microbatches after those of inputs, so each rank keeps at most `min(pipeline_size, num_microbatches)` activations.
    """
    check_sizes(pipeline_size, num_microbatches)

    def order(stage: int) -> Order:
        warm_up = min(pipeline_size - 1 - stage, num_microbatches)
        order = Order(num_microbatches).add(F, stage, times=warm_up)
        for microbatch in range(num_microbatches):
            order.add(F, stage).add(I, stage)
            if microbatch >= stage:
                order.add(W, stage)
        return order.add(W, stage, times=min(stage, num_microbatches))

    return _schedule("zb-h1", looped_placement(pipeline_size), num_microbatches, order)


def zero_bubble_v(pipeline_size: int, num_microbatches: int) -> Schedule:
    """No rank waits once it has begun, if forward and both halves of a backward take equally long.

    From Qi et al. 2023, "Zero Bubble Pipeline Parallelism". Rank i holds stages i and 2 * pipeline_size - 1 - i, and
    keeps at most `2 * pipeline_size` activations of such half-size stages, what 1F1B's first rank keeps. Fewer than
    `2 * pipeline_size - 1` microbatches leave bubbles.
    """
    check_sizes(pipeline_size, num_microbatches)
    order = partial(_zero_bubble_v_order, pipeline_size=pipeline_size, num_microbatches=num_microbatches)
    return _schedule("zb-v", v_placement(pipeline_size), num_microbatches, order)


def _zero_bubble_v_order(rank: int, pipeline_size: int, num_microbatches: int) -> Order:
    down, up = rank, 2 * pipeline_size - 1 - rank
    length = max(num_microbatches, 2 * pipeline_size - 1)
    order = Order(num_microbatches)
    # Warm-up: forwards until the first microbatch comes back up, then its two stages in turn.
    order.add(F, down, times=2 * (pipeline_size - rank) - 1)
    order.add(F, up, down, times=rank)
    for _ in range(pipeline_size - rank):
        order.add(F, up).add(I, up).add(W, up)
    # Steady state: each rank computes all the time.
    while order.forwards(up) < length:
        if order.forwards(down) < length:
            order.add(F, down)
        order.add(I, down).add(W, down)
        order.add(F, up).add(I, up).add(W, up)
    # Cool-down: gradients of inputs first, which others wait for, then the remaining gradients of weights.
    order.add(I, down, up, times=rank)
    for _ in range(pipeline_size - rank):
        order.add(I, down).add(W, down)
    order.add(W, up, times=order.weights_left(up))
    return order.add(W, down, times=order.weights_left(down))


def dualpipe_v(pipeline_size: int, num_microbatches: int) -> Schedule:
    """DualPipe with a V-shaped placement (DeepSeek-AI 2024, "DeepSeek-V3"; cut in half by Qi et al. 2025).

    Rank i holds stages i and 2 * pipeline_size - 1 - i and keeps at most `2 * pipeline_size + 1` activations of such
    half-size stages. In the middle, forwards of one stage alternate with whole backwards of the other; only at the
    ends is the backward split. Made for `num_microbatches >= 2 * pipeline_size`; fewer leave bubbles.
    """
    check_sizes(pipeline_size, num_microbatches)
    order = partial(_dualpipe_v_order, pipeline_size=pipeline_size, num_microbatches=num_microbatches)
    return _schedule("dualpipe-v", v_placement(pipeline_size), num_microbatches, order)


def _dualpipe_v_order(rank: int, pipeline_size: int, num_microbatches: int) -> Order:
    down, up = rank, 2 * pipeline_size - 1 - rank
    behind = pipeline_size - 1 - rank  # ranks further down the V
    steady = max(num_microbatches, 2 * pipeline_size) - 2 * pipeline_size + rank + 1
    order = Order(num_microbatches)
    # Warm-up: forwards, then gradients of the first microbatches as soon as these come back up.
    order.add(F, down, times=2 * behind)
    order.add(F, down, up, times=rank + 1)
    for _ in range(behind):
        order.add(I, up).add(W, up).add(F, up)
    # Steady state: a forward of one stage beside a backward of the other.
    for _ in range(steady):
        order.add(F, down).add(B, up).add(F, up).add(B, down)
    # Cool-down: no new microbatches; from the middle on, gradients of weights are computed after those of inputs.
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
    return order.add(W, *waiting)


def inference(pipeline_size: int, num_microbatches: int, *, virtual_pipeline_size: int = 1) -> Schedule:
    """The forwards of all microbatches, with stage s on rank s % pipeline_size; no rank keeps activations."""
    training = interleaved_one_forward_one_backward(
        pipeline_size, num_microbatches, virtual_pipeline_size=virtual_pipeline_size
    )
    return replace(forward_only(training), name="inference")


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a training schedule, in its order and on its ranks, to evaluate the model it trains.

    Messages are omitted; `insert_communication` adds them.
    """
    return replace(
        schedule,
        name=f"{schedule.name}, forward only",
        actions=tuple(
            tuple(action for action in actions if action.kind is ActionKind.FORWARD) for actions in schedule.actions
        ),
    )


@dataclass(frozen=True)
class _Method:
    make: Callable[..., Schedule]
    stages_per_rank: int | None  # None: any number
    default_stages_per_rank: int


_CATALOG = {
    "gpipe": _Method(gpipe, None, 1),
    "1f1b": _Method(one_forward_one_backward, 1, 1),
    "interleaved": _Method(interleaved_one_forward_one_backward, None, 2),
    "zb-h1": _Method(zero_bubble_h1, 1, 1),
    "zb-v": _Method(zero_bubble_v, 2, 2),
    "dualpipe-v": _Method(dualpipe_v, 2, 2),
    "inference": _Method(inference, None, 1),
}

SCHEDULE_NAMES = tuple(_CATALOG)
TrainingSchedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
TRAINING_SCHEDULES: tuple[TrainingSchedule, ...] = get_args(TrainingSchedule)


def stages_per_rank(name: str) -> int | None:
    """Return the number of stages per rank of a schedule in `SCHEDULE_NAMES`; None for any number."""
    return _CATALOG[name].stages_per_rank


def default_stages_per_rank(name: str) -> int:
    """Return the default number of stages per rank of a schedule in `SCHEDULE_NAMES`."""
    return _CATALOG[name].default_stages_per_rank


def make_schedule(
    name: str, pipeline_size: int, num_microbatches: int, *, virtual_pipeline_size: int | None = None
) -> Schedule:
    """Make a schedule by name, without messages.

    Args:
        name: one of `SCHEDULE_NAMES`.
        pipeline_size: number of pipeline ranks.
        num_microbatches: number of microbatches; few leave large bubbles.
        virtual_pipeline_size: stages per rank; None for 2 with `interleaved`, `zb-v` and `dualpipe-v`, else 1.

    Raises:
        ValueError: the name is unknown, a size is not positive, or the schedule has other stages per rank.
    """
    if name not in _CATALOG:
        raise ValueError(f"unknown schedule {name!r}; use one of {', '.join(SCHEDULE_NAMES)}")
    entry = _CATALOG[name]
    per_rank = entry.default_stages_per_rank if virtual_pipeline_size is None else virtual_pipeline_size
    if entry.stages_per_rank is None:
        return entry.make(pipeline_size, num_microbatches, virtual_pipeline_size=per_rank)
    if per_rank != entry.stages_per_rank:
        fitting = [other for other, it in _CATALOG.items() if it.stages_per_rank in (None, per_rank)]
        raise ValueError(
            f"schedule {name!r} has virtual_pipeline_size={entry.stages_per_rank}, not {per_rank}; remove "
            f"it, or use one of {', '.join(fitting)}"
        )
    return entry.make(pipeline_size, num_microbatches)


def choose_schedule(
    schedule: str | Schedule | None, pipeline_size: int, num_microbatches: int, virtual_pipeline_size: int
) -> Schedule:
    """Return the schedule of a pipeline.

    Args:
        schedule: a name, or a schedule; None for 1F1B, interleaved if there are several stages per rank.
        pipeline_size: number of pipeline ranks.
        num_microbatches: number of microbatches of a batch.
        virtual_pipeline_size: number of stages per rank; may be 1 for a given schedule.

    Raises:
        ValueError: as for `make_schedule`, or the given schedule has other sizes.
    """
    if schedule is None:
        schedule = "1f1b" if virtual_pipeline_size == 1 else "interleaved"
    if isinstance(schedule, str):
        return make_schedule(schedule, pipeline_size, num_microbatches, virtual_pipeline_size=virtual_pipeline_size)
    if (schedule.num_ranks, schedule.num_microbatches) != (pipeline_size, num_microbatches):
        raise ValueError(
            f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} "
            f"microbatches; this pipeline has {pipeline_size} ranks and num_microbatches={num_microbatches}"
        )
    if virtual_pipeline_size not in (1, schedule.num_stages / pipeline_size):
        raise ValueError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages on {pipeline_size} ranks, which is not "
            f"virtual_pipeline_size={virtual_pipeline_size}; remove it, the schedule defines it"
        )
    return schedule
