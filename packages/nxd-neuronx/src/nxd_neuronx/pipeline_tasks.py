"""A pipeline schedule as the tasks of one rank, step by step, for scripts and tests that read schedules so.

The orders are those of nxd_pipeline's catalog. The runtime plays its own actions, not these tasks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from nxd_pipeline import ActionKind, make_schedule


@dataclass(unsafe_hash=True, repr=False)
class PipelineTask:
    """What a rank does for one microbatch.

    Attributes:
        mb: the microbatch, from 0 on.
        model_chunk: index among the rank's stages.
        graph_break: whether a recorded graph ends behind it.
    """

    mb: int
    model_chunk: int = 0
    graph_break: bool = True

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}_microbatch_{self.mb}_modelchunk_{self.model_chunk}_graphbreak_{self.graph_break}"


class ForwardStepTask(PipelineTask):
    """Compute forward."""


class ForwardPreprocessTask(PipelineTask):
    """Receive the input, or take it from the batch."""


class ForwardPostprocessTask(PipelineTask):
    """Send the output on."""


class BackwardStepTask(PipelineTask):
    """Compute backward."""


class BackwardPreprocessTask(PipelineTask):
    """Receive the output's gradient."""


class BackwardPostprocessTask(PipelineTask):
    """Send the input's gradient back."""


class PostProcessTask:
    """What follows all microbatches.

    Args:
        graph_break: as for `PipelineTask`.
    """

    def __init__(self, graph_break: bool = True) -> None:
        self.mb = -1
        self.model_chunk = -1
        self.graph_break = graph_break


class ReduceGradsTask(PostProcessTask):
    """Average gradients over the replicas."""

    def __repr__(self) -> str:
        return "ReduceGradsTask"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


Task = PipelineTask | PostProcessTask


class PipeSchedule(ABC):
    """The tasks of one rank; iterating gives a list of them for each step.

    Args:
        num_microbatches: number of microbatches of a batch.
        stages: ranks of the pipeline.
        stage_id: this rank's place, from 0 on.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, num_microbatches: int, stages: int, stage_id: int) -> None:
        if num_microbatches < 1 or not 0 <= stage_id < stages:
            raise ValueError(
                f"num_microbatches={num_microbatches}, stages={stages}, stage_id={stage_id}: use at least one "
                "microbatch, and a stage_id from 0 to stages - 1"
            )
        self.num_microbatches = num_microbatches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[Task]]:
        """The tasks of each step."""

    def __iter__(self) -> Iterator[list[Task]]:
        return self.steps()

    @property
    def stage(self) -> int:
        """This rank's place."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self.stages

    @property
    def is_first_stage(self) -> bool:
        """Whether no rank is before this one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether no rank follows."""
        return self.stage_id == self.stages - 1


class InferenceSchedule(PipeSchedule):
    """Forward only, microbatch after microbatch."""

    def steps(self) -> Iterator[list[Task]]:
        """A step for each microbatch."""
        for microbatch in range(self.num_microbatches):
            yield [
                ForwardPreprocessTask(microbatch),
                ForwardStepTask(microbatch),
                ForwardPostprocessTask(microbatch),
            ]


class Train1F1BSchedule(PipeSchedule):
    """One forward, one backward: a step for each of them, and one to reduce gradients.

    After the warm-up an output is sent by the backward step that follows, behind its receive: both neighbors send and
    receive in one order.
    """

    def __init__(self, num_microbatches: int, stages: int, stage_id: int) -> None:
        super().__init__(num_microbatches, stages, stage_id)
        self.num_warmup_steps = min(stages - 1 - stage_id, num_microbatches)

    def steps(self) -> Iterator[list[Task]]:
        """A step for each forward and backward."""
        order = make_schedule("1f1b", self.stages, self.num_microbatches).actions[self.stage_id]
        computed: int | None = None  # its output is not sent yet
        for position, action in enumerate(order):
            tasks: list[Task] = []
            if action.kind is ActionKind.FORWARD:
                tasks += [ForwardPreprocessTask(action.microbatch), ForwardStepTask(action.microbatch)]
                if position >= self.num_warmup_steps:
                    computed = action.microbatch
                elif not self.is_last_stage:
                    tasks.append(ForwardPostprocessTask(action.microbatch))
            else:
                if not self.is_last_stage:
                    tasks.append(BackwardPreprocessTask(action.microbatch))
                    tasks += [] if computed is None else [ForwardPostprocessTask(computed)]
                computed = None
                tasks.append(BackwardStepTask(action.microbatch))
                tasks += [] if self.is_first_stage else [BackwardPostprocessTask(action.microbatch)]
            yield tasks
        yield [ReduceGradsTask()]


class TrainSchedule(PipeSchedule):
    """The same order on a common clock: a step for each tick, empty where a rank waits.

    On rank s the forward of microbatch m is at tick s + 2m, its backward at 2 * stages - 1 - s + 2m. Messages of a
    microbatch leave at the next tick.
    """

    def steps(self) -> Iterator[list[Task]]:
        """A step for each tick."""
        ticks = 2 * (self.num_microbatches + self.stages - 1)
        for tick in range(ticks):
            forward, backward = self._forward_at(tick), self._backward_at(tick)
            sent_forward, sent_backward = self._forward_at(tick - 1), self._backward_at(tick - 1)
            tasks: list[Task] = []
            if sent_backward is not None and not self.is_first_stage:
                tasks.append(BackwardPostprocessTask(sent_backward))
            if forward is not None:
                tasks.append(ForwardPreprocessTask(forward))
            if backward is not None and not self.is_last_stage:
                tasks.append(BackwardPreprocessTask(backward))
            if sent_forward is not None and not self.is_last_stage:
                tasks.append(ForwardPostprocessTask(sent_forward))
            tasks += [] if forward is None else [ForwardStepTask(forward)]
            tasks += [] if backward is None else [BackwardStepTask(backward)]
            tasks += [ReduceGradsTask()] if tick == ticks - 1 else []
            yield tasks

    def _forward_at(self, tick: int) -> int | None:
        return self._microbatch_at(tick - self.stage_id)

    def _backward_at(self, tick: int) -> int | None:
        return self._microbatch_at(tick - (2 * self.stages - 1 - self.stage_id))

    def _microbatch_at(self, ticks_since_first: int) -> int | None:
        microbatch, odd = divmod(ticks_since_first, 2)
        return None if odd or not 0 <= microbatch < self.num_microbatches else microbatch
