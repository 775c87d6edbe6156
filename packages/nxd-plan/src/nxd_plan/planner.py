"""Makes the plan: tries all layouts of a job, ranks those that fit by step time, and says why the others do not.

Profiles depend on the tensor-parallel degree alone, stages and schedules on few degrees. Each is made once, so the work
does not grow with the number of ranks.
"""

from dataclasses import dataclass, field, replace

from nxd_pipeline import Schedule
from nxd_state import Mesh, ParallelDegrees

from nxd_plan.layout import (
    ON_XLA,
    FixedDegrees,
    Layout,
    Rejected,
    TrainingJob,
    context_parallel_sizes,
    expert_degrees,
    layouts_on,
    local_length,
    pipeline_parallel_sizes,
    sequence_parallel_choices,
    tensor_parallel_sizes,
)
from nxd_plan.memory import RankMemory, rank_memories
from nxd_plan.profile import Profile, Profiler, planned_ranks
from nxd_plan.stages import StageParts, StagePlanner
from nxd_plan.step_time import (
    Communication,
    StepTime,
    check_heads,
    communication,
    pipeline_seconds,
    planned_schedule,
    shortest_pipeline,
    stage_times,
    step_time,
)
from nxd_plan.zero_choices import zero_choices, zero_mistake

USABLE_MEMORY = 0.9  # the rest goes to the runtime and to fragmentation


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits.

    Attributes:
        layout: the layout.
        memories: the memory of each pipeline rank.
        communication: bytes sent, by axis.
        time: the time of a step.
    """

    layout: Layout
    memories: tuple[RankMemory, ...]
    communication: Communication
    time: StepTime

    @property
    def memory(self) -> RankMemory:
        """The memory of the pipeline rank that needs the most."""
        return max(self.memories, key=lambda memory: memory.peak)


@dataclass(frozen=True)
class TooLarge:
    """A layout that needs more memory than a device has."""

    layout: Layout
    memory: RankMemory


@dataclass(frozen=True)
class Plan:
    """The result of planning a job.

    Attributes:
        job: the job that was planned.
        best: the fastest layouts that fit, fastest first.
        num_fitting: number of layouts that fit.
        too_large: layouts that need too much memory, each with the smallest microbatch size that does not fit.
        rejected: layouts that are not possible.
    """

    job: TrainingJob
    best: tuple[PlannedLayout, ...]
    num_fitting: int
    too_large: tuple[TooLarge, ...]
    rejected: tuple[Rejected, ...]

    @property
    def usable_bytes(self) -> float:
        """The bytes of a device's memory that tensors can use."""
        return self.job.device.memory_bytes * USABLE_MEMORY


@dataclass
class _Candidate:
    """A layout that fits, before its schedule is simulated."""

    layout: Layout
    mesh: Mesh
    stages: list[StageParts]
    profile: Profile
    schedule: Schedule
    memories: list[RankMemory]


@dataclass
class _Search:
    job: TrainingJob
    fixed: FixedDegrees
    candidates: list[_Candidate] = field(default_factory=list)
    too_large: list[TooLarge] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    _known: set[Layout] = field(default_factory=set)  # too large at any microbatch size not tried yet

    def add_too_large(self, layout: Layout, memory: RankMemory) -> None:
        """Note a layout that does not fit; microbatch sizes are tried in ascending order."""
        self.too_large.append(TooLarge(layout, memory))
        self._known.add(_of_any_microbatches(layout))

    def is_known_too_large(self, layout: Layout) -> bool:
        """Whether the layout did not fit with smaller microbatches."""
        return _of_any_microbatches(layout) in self._known


def _of_any_microbatches(layout: Layout) -> Layout:
    return replace(layout, microbatch_size=0, num_microbatches=0)


def make_plan(job: TrainingJob, fixed: FixedDegrees | None = None, *, top: int = 10) -> Plan:
    """Try every layout of a job.

    Args:
        job: the job to plan.
        fixed: the degrees fixed in advance.
        top: number of fastest layouts to return.

    Raises:
        RuntimeError: torch.distributed is already initialized in this process.
        ValueError: `top` is not positive.
    """
    if top < 1:
        raise ValueError(f"top={top} must be 1 or more")
    search = _Search(job, fixed or FixedDegrees())
    planner = StagePlanner(job.model)
    for size in tensor_parallel_sizes(job, search.fixed):
        try:
            ParallelDegrees(size).on(job.num_devices)
        except ValueError as error:
            search.rejected.append(Rejected(f"TP {size}", str(error)))
            continue
        try:
            degrees_of_experts = expert_degrees(job, search.fixed, size)
        except ValueError as error:
            search.rejected.append(Rejected(f"TP {size}", str(error)))
            continue
        for degrees in degrees_of_experts:
            with planned_ranks(degrees, has_static_shapes=job.device.name in ON_XLA):
                for context_size in context_parallel_sizes(job, search.fixed, degrees):
                    _try_sizes(search, planner, replace(degrees, cp=context_size))
    best = _quickest(search, _model_flops(job), top) if search.candidates else []
    return Plan(
        job, tuple(best), len(search.candidates), tuple(search.too_large), tuple(dict.fromkeys(search.rejected))
    )


def _try_sizes(search: _Search, planner: StagePlanner, degrees: ParallelDegrees) -> None:
    job = search.job
    if degrees.cp > 1:
        try:
            job.model.check_context()
        except ValueError as error:
            search.rejected.append(Rejected(f"CP {degrees.cp}", str(error)))
            return
    profiler = Profiler(job.model, job.dtype, local_length(job.sequence_length, degrees))
    choices = []
    for sequence_parallel in sequence_parallel_choices(search.fixed, degrees.tp):
        try:
            parameters = planner.parameters(profiler.model(sequence_parallel))
            choices.append(sequence_parallel)
        except ValueError as error:
            of_experts = f", EP {degrees.ep}" if degrees.ep > 1 and not sequence_parallel else ""
            search.rejected.append(Rejected(f"TP {degrees.tp}{' + SP' * sequence_parallel}{of_experts}", str(error)))
            if not sequence_parallel:  # the model cannot be split at all
                return
    if not choices:
        return
    for pipeline_size in pipeline_parallel_sizes(job, search.fixed, degrees):
        try:
            on_all = replace(degrees, pp=pipeline_size).on(job.num_devices)
            schedule = planned_schedule(job.schedule, pipeline_size, pipeline_size)
            stages = planner.stages(schedule.num_stages, parameters)
        except ValueError as error:
            search.rejected.append(Rejected(f"TP {degrees.tp} x PP {pipeline_size}", str(error)))
            continue
        for layout in layouts_on(job, search.fixed, on_all, choices):
            if isinstance(layout, Rejected):
                search.rejected.append(layout)
            elif mistake := zero_mistake(job, search.fixed, layout.degrees):
                search.rejected.append(Rejected(layout.degrees.describe(), mistake))
            else:
                _try_layout(search, layout, stages, profiler)


def _try_layout(search: _Search, layout: Layout, stages: list[StageParts], profiler: Profiler) -> None:
    """Try a layout with the stages of ZeRO, until one fits."""
    job, degrees = search.job, layout.degrees
    choices = [
        [it for it in alternatives if not search.is_known_too_large(it)]
        for alternatives in _with_zero(job, search.fixed, layout)
    ]
    if not any(choices):
        return
    try:
        schedule = planned_schedule(job.schedule, degrees.pp, min(layout.num_microbatches, 2 * degrees.pp))
    except ValueError as error:
        search.rejected.append(Rejected(str(layout), str(error)))
        return
    try:
        profile = profiler.profile(
            sequence_parallel=degrees.sequence_parallel,
            checkpointing=layout.checkpointing,
            microbatch_size=layout.microbatch_size,
        )
    except ValueError as error:
        if degrees.tp == 1:  # the model runs in no layout
            raise
        search.rejected.append(Rejected(f"TP {degrees.tp}", str(error)))
        return
    if degrees.cp > 1 and job.device.name in ON_XLA:
        try:
            check_heads(profile, degrees.cp)
        except ValueError as error:
            search.rejected.append(Rejected(str(layout), str(error)))
            return
    for alternatives in choices:
        for alternative in alternatives:
            memories = rank_memories(alternative, stages, profile, schedule, job.dtype.itemsize)
            most = max(memories, key=lambda memory: memory.peak)
            if most.peak <= job.device.memory_bytes * USABLE_MEMORY:
                search.candidates.append(_Candidate(alternative, degrees.mesh(), stages, profile, schedule, memories))
                break
            search.add_too_large(alternative, most)


def _with_zero(job: TrainingJob, fixed: FixedDegrees, layout: Layout) -> list[list[Layout]]:
    return [
        [
            replace(layout, degrees=replace(layout.degrees, zero_stage=stage, shard_group_size=group))
            for stage, group in choices
        ]
        for choices in zero_choices(job, fixed, layout.degrees, layout.num_microbatches)
    ]


def _quickest(search: _Search, model_flops: float, top: int) -> list[PlannedLayout]:
    """Return the `top` fastest layouts; a schedule is simulated only if its layout might be among them."""
    job = search.job
    bounded = sorted(
        ((_timed(job, candidate, model_flops, simulated=False), candidate) for candidate in search.candidates),
        key=lambda it: (it[0].time.seconds, it[0].layout),
    )
    found: list[PlannedLayout] = []
    for bound, candidate in bounded:
        if len(found) >= top and bound.time.seconds >= found[top - 1].time.seconds:
            break
        found.append(_timed(job, candidate, model_flops, simulated=True))
        found.sort(key=lambda it: it.time.seconds)
    return found[:top]


def _timed(job: TrainingJob, candidate: _Candidate, model_flops: float, *, simulated: bool) -> PlannedLayout:
    """Return a candidate with its step time: simulated, or a lower bound over all schedules."""
    layout, mesh, profile = candidate.layout, candidate.mesh, candidate.profile
    times = stage_times(job, mesh, candidate.stages, profile)
    if simulated:
        pipeline = pipeline_seconds(job, layout, mesh, times, profile.hidden_bytes)
    else:
        pipeline = (shortest_pipeline(layout, candidate.schedule, times), 0.0)
    sent = communication(job, layout, candidate.stages, candidate.schedule, profile)
    time = step_time(job, layout, mesh, candidate.memories, sent, pipeline, model_flops)
    return PlannedLayout(layout, tuple(candidate.memories), sent, time)


def _model_flops(job: TrainingJob) -> float:
    """Return the FLOPs of one sequence through the whole model; backward counts as twice the forward."""
    with planned_ranks(ParallelDegrees()):
        profiler = Profiler(job.model, job.dtype, job.sequence_length)
        profile = profiler.profile(sequence_parallel=False, checkpointing="none", microbatch_size=1)
    layers = sum(profile.layers[kind].forward.flops for kind in job.model.layer_kinds)
    return 3.0 * (layers + profile.head.forward.flops)


def activation_modes(job: TrainingJob, layout: Layout) -> dict[str, int]:
    """Return the bytes that the first decoder layer keeps per microbatch, by kind of checkpointing."""
    degrees = layout.degrees
    with planned_ranks(degrees):
        length = local_length(job.sequence_length, degrees)
        profiler = Profiler(job.model, job.dtype, length)
        return {
            mode: profiler.profile(
                sequence_parallel=degrees.sequence_parallel,
                checkpointing=mode,
                microbatch_size=layout.microbatch_size,
            )
            .layers[0]
            .forward.kept
            for mode in job.model.activation_modes
        }
