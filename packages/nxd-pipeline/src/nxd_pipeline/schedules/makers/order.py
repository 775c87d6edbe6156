"""What makers share: where stages live, a list that counts microbatches by itself, and the check of their arguments."""

from collections import Counter

from nxd_pipeline.schedules.action import Action, ActionKind


class Order:
    """One rank's growing list of actions, each of them for the next microbatch of its stage.

    Microbatches from `num_microbatches` on are counted but left out. Leaving a microbatch out of a schedule that works
    gives a schedule that works, so patterns that need many microbatches serve for few.
    """

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._weights: Counter[int] = Counter()
        self._actions: list[Action] = []

    def add(self, kind: ActionKind, *stages: int, times: int = 1) -> "Order":
        """The next microbatch of each of `stages` in turn, `times` over."""
        for _ in range(times):
            for stage in stages:
                if kind is ActionKind.FORWARD:
                    counter = self._forwards
                elif kind is ActionKind.BACKWARD_WEIGHT:
                    counter = self._weights
                else:
                    counter = self._backwards
                if counter[stage] < self._num_microbatches:
                    self._actions.append(Action(kind, stage, counter[stage]))
                counter[stage] += 1
                if kind is ActionKind.BACKWARD:
                    self._weights[stage] += 1
        return self

    def forwards(self, stage: int) -> int:
        """How many forwards of that stage have been added."""
        return self._forwards[stage]

    def weights_left(self, stage: int) -> int:
        """How many gradients of that stage's weights wait to be added after those of its inputs."""
        return self._backwards[stage] - self._weights[stage]

    def actions(self) -> tuple[Action, ...]:
        """All that was added and not left out."""
        return tuple(self._actions)


def looped_placement(pipeline_size: int, virtual_pipeline_size: int = 1) -> tuple[int, ...]:
    """Stage s on rank s % pipeline_size."""
    return tuple(range(pipeline_size)) * virtual_pipeline_size


def v_placement(pipeline_size: int) -> tuple[int, ...]:
    """Two stages per rank, down and up again: the first and the last stage share rank 0."""
    return (*range(pipeline_size), *reversed(range(pipeline_size)))


def check_sizes(pipeline_size: int, num_microbatches: int, virtual_pipeline_size: int = 1) -> None:
    """Raises ValueError for what no schedule can do."""
    sizes = {
        "pipeline_size": pipeline_size,
        "num_microbatches": num_microbatches,
        "virtual_pipeline_size": virtual_pipeline_size,
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} is not a positive number; use 1 or more")
