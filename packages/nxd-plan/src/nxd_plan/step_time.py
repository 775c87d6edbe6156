"""Estimates the time of a training step: computation, messages by axis, and the pipeline's idle time.

It is a roofline model (Williams et al. 2009): every operation takes as long as its arithmetic or its memory traffic,
whichever is longer. Nothing is fused, and only ZeRO-3's gathers of the next unit overlap with computation: the estimate
is for comparing layouts, not a promise.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from nxd_layers.context.exchange import splits_heads
from nxd_pipeline import Costs, Schedule, StageCost, make_schedule, simulate
from nxd_state import Mesh

from nxd_plan.devices import Device
from nxd_plan.layout import ON_XLA, Layout, TrainingJob
from nxd_plan.memory import MOMENTS, RankMemory
from nxd_plan.operations import Operation
from nxd_plan.profile import PartProfile, Pass, Profile
from nxd_plan.replica_traffic import replica_traffic
from nxd_plan.stages import StageParts

SUSTAINED_FLOPS = 0.7  # fraction of the peak that large matrix products reach
SUSTAINED_BANDWIDTH = 0.8  # fraction of the nominal bandwidth, for memory and links
LATENCY = 10e-6  # seconds per message


@dataclass(frozen=True)
class Communication:
    """Bytes that the busiest rank sends in a step, by mesh axis.

    Attributes:
        tp: activations within the layers.
        ep: tokens to the experts of other ranks and back, and their gradients, assuming even routing.
        cp: keys and values of causal attention, or whole heads if that is less; and their gradients.
        pp: activations and their gradients between stages, and a tied embedding's gradient.
        dp: gradients, and with ZeRO also parameters, among the replicas that share states.
        mirrors: gradients among the replicas that have the same part of the states, with hybrid sharding.
        near: parameters among the near ranks of `reshard_after_forward`.
        dp_messages: number of collectives of dp and near, where a unit's is one; 1 without ZeRO-3.
        ahead: bytes of dp that gather units while the units before them compute.
        ahead_messages: number of the `dp_messages` that gather such units.
    """

    tp: int
    pp: int
    dp: int
    cp: int = 0
    ep: int = 0
    mirrors: int = 0
    near: int = 0
    dp_messages: int = 0
    ahead: int = 0
    ahead_messages: int = 0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest rank, and their parts.

    Attributes:
        pipeline: seconds of forward and backward of all microbatches, with idle time.
        data_parallel: seconds for gradients to the other replicas and parameters back, beside what overlaps.
        update: seconds of the optimizer's update.
        bubble: fraction of the pipeline's time in which ranks are idle.
        mfu: the model's floating-point operations divided by those that the devices could do: model FLOPs utilization
            (Chowdhery et al. 2022). Recomputation does not count; causal attention counts half.
    """

    pipeline: float
    data_parallel: float
    update: float
    bubble: float
    mfu: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.pipeline + self.data_parallel + self.update


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch on one stage."""

    forward: float
    backward: float


def bandwidth(device: Device, mesh: Mesh, axis: str) -> float:
    """Return the bytes/s that a rank sends along an axis: slow if any group of the axis is on several hosts."""
    return _bandwidth_among(device, mesh, mesh.group_of(0, axis))


def _bandwidth_among(device: Device, mesh: Mesh, ranks: Sequence[int]) -> float:
    """Return the bytes/s that a rank sends to others, of which `ranks` are those of the first rank."""
    first, *others = ranks
    # Groups are in blocks of consecutive ranks, so a group spans hosts if a host ends within a block.
    block = (others[0] - first) * (1 + len(others)) if others else 1
    on_one_host = mesh.world_size <= device.devices_per_host or device.devices_per_host % block == 0
    rate = device.intra_host_bandwidth if on_one_host else device.inter_host_bandwidth
    return rate * SUSTAINED_BANDWIDTH


def stage_times(job: TrainingJob, mesh: Mesh, stages: Sequence[StageParts], profile: Profile) -> tuple[StageTime, ...]:
    """Return seconds of one microbatch per stage, with the messages of tensor, context and expert parallelism."""
    flops = job.device.flops_of(job.dtype_name) * SUSTAINED_FLOPS
    memory = job.device.memory_bandwidth * SUSTAINED_BANDWIDTH
    link = bandwidth(job.device, mesh, "tp")

    context_link, expert_link = bandwidth(job.device, mesh, "cp"), bandwidth(job.device, mesh, "ep")

    def seconds(work: Pass) -> float:
        # An operation covers the keys of this rank; its queries attend to those of all ranks, half of them earlier.
        computing = sum(
            max(it.flops * (mesh.cp if it.keys else 1) / flops, it.bytes / memory) for it in work.operations
        )
        exchanged = [context_bytes(it, mesh.cp, needs_heads=job.device.name in ON_XLA) for it in work.operations]
        sending = sum(LATENCY + sent / link for sent in work.messages if sent)
        sending += sum(LATENCY + sent / expert_link for sent in work.to_experts if sent)
        return computing + sending + sum(LATENCY + sent / context_link for sent in exchanged if sent)

    def both(part: PartProfile) -> StageTime:
        return StageTime(seconds(part.forward), seconds(part.backward))

    embedding, head = both(profile.embedding), both(profile.head)
    layers = [both(layer) for layer in profile.layers]
    return tuple(
        StageTime(
            stage.has_embedding * embedding.forward
            + sum(layers[kind].forward for kind in stage.layers)
            + stage.has_head * head.forward,
            stage.has_embedding * embedding.backward
            + sum(layers[kind].backward for kind in stage.layers)
            + stage.has_head * head.backward,
        )
        for stage in stages
    )


def check_heads(profile: Profile, context_parallel_size: int) -> None:
    """Reject attention that XLA cannot compute on split sequences: it needs whole sequences of some of the heads."""
    for operation in (it for layer in profile.layers for it in layer.forward.operations if it.keys):
        num_heads, num_key_heads = operation.heads
        if not splits_heads(num_heads, num_key_heads, context_parallel_size):
            raise ValueError(
                f"context_parallel_size={context_parallel_size} cannot split the {num_heads} query heads and "
                f"{num_key_heads} key heads of a tensor-parallel rank, which this device requires"
            )


def context_bytes(operation: Operation, context_parallel_size: int, *, needs_heads: bool = False) -> int:
    """Return bytes that a context-parallel rank sends for an attention, by the transport that sends least.

    Args:
        operation: the attention.
        context_parallel_size: number of context-parallel ranks.
        needs_heads: whether each rank must compute whole sequences of some of the heads.
    """
    others, (num_heads, num_key_heads) = context_parallel_size - 1, operation.heads
    if num_heads and splits_heads(num_heads, num_key_heads, context_parallel_size):
        copies = max(1, context_parallel_size // num_key_heads)
        by_heads = (operation.queries + operation.keys * copies) * others // context_parallel_size
        if needs_heads or by_heads < operation.keys * others:
            return by_heads
    return (operation.keys + operation.key_gradients) * others


def shortest_pipeline(layout: Layout, schedule: Schedule, times: Sequence[StageTime]) -> float:
    """Return a lower bound on the seconds of the pipeline, for any order of the work.

    A rank must do all its work after the first forward and before the last backward of the stages before it.
    """
    both = [time.forward + time.backward for time in times]
    return max(
        layout.num_microbatches * sum(both[stage] for stage in own) + sum(both[: min(own)])
        for own in map(schedule.stages_of, range(schedule.num_ranks))
    )


def pipeline_seconds(
    job: TrainingJob, layout: Layout, mesh: Mesh, times: Sequence[StageTime], hidden_bytes: int
) -> tuple[float, float]:
    """Return simulated seconds of a step's forwards and backwards, and the fraction in which ranks are idle.

    With many microbatches the middle ones repeat, so at most three rounds are simulated.
    """
    ranks = layout.degrees.pp
    busy = sum(time.forward + time.backward for time in times) * layout.num_microbatches / ranks
    if ranks == 1:
        return busy, 0.0
    costs = Costs(
        tuple(
            StageCost(time.forward, time.backward / 2, time.backward / 2, output_bytes=hidden_bytes) for time in times
        ),
        latency=LATENCY,
        bytes_per_time=bandwidth(job.device, mesh, "pp"),
    )
    longest = 3 * ranks
    seconds = _simulated(job.schedule, ranks, min(layout.num_microbatches, longest), costs)
    if layout.num_microbatches > longest:
        round_seconds = seconds - _simulated(job.schedule, ranks, 2 * ranks, costs)
        seconds += round_seconds / ranks * (layout.num_microbatches - longest)
    return seconds, 1 - busy / seconds


@cache
def planned_schedule(name: str, ranks: int, num_microbatches: int) -> Schedule:
    """Call `make_schedule`; the result is cached."""
    return make_schedule(name, ranks, num_microbatches)


@cache
def _simulated(name: str, ranks: int, num_microbatches: int, costs: Costs) -> float:
    return simulate(planned_schedule(name, ranks, num_microbatches), costs).makespan


def communication(
    job: TrainingJob, layout: Layout, stages: Sequence[StageParts], schedule: Schedule, profile: Profile
) -> Communication:
    """Bytes that the busiest rank sends in a step, by axis."""
    itemsize = job.dtype.itemsize
    tp, pp, cp, ep = [0], [0], [0], [0]
    to_replicas = []
    for rank in range(schedule.num_ranks):
        own = schedule.stages_of(rank)
        tp.append(
            layout.num_microbatches * sum(_of_passes(stages[stage], profile, lambda it: it.messages) for stage in own)
        )
        cp.append(
            layout.num_microbatches
            * sum(
                _of_passes(
                    stages[stage],
                    profile,
                    lambda it: (
                        context_bytes(one, layout.degrees.cp, needs_heads=job.device.name in ON_XLA)
                        for one in it.operations
                    ),
                )
                for stage in own
            )
        )
        ep.append(
            layout.num_microbatches * sum(_of_passes(stages[stage], profile, lambda it: it.to_experts) for stage in own)
        )
        if layout.degrees.sequence_parallel:  # gradients of replicated parameters are summed over the ranks
            replicated = sum(stages[stage].replicated for stage in own) * itemsize
            tp[-1] += 2 * replicated * (layout.degrees.tp - 1) // layout.degrees.tp
        neighbours = sum((stage > 0) + (stage < len(stages) - 1) for stage in own)
        pp.append(layout.num_microbatches * neighbours * profile.hidden_bytes if schedule.num_ranks > 1 else 0)
        if schedule.num_ranks > 1:
            pp[-1] += sum(stages[stage].tied for stage in own) * itemsize
        to_replicas.append(replica_traffic(layout, stages, own, job.schedule, itemsize))
    busiest = max(to_replicas, key=lambda it: it.sharing)
    return Communication(
        max(tp),
        max(pp),
        dp=busiest.sharing,
        cp=max(cp),
        ep=max(ep),
        mirrors=max(it.mirrors for it in to_replicas),
        near=max(it.near for it in to_replicas),
        dp_messages=busiest.messages,
        ahead=busiest.ahead,
        ahead_messages=busiest.ahead_messages,
    )


def _of_passes(stage: StageParts, profile: Profile, sent: Callable[[Pass], Iterable[int]]) -> int:
    """Return the bytes of one microbatch on a stage, where `sent` gives the bytes of a pass."""

    def of(part: PartProfile) -> int:
        return sum(sent(part.forward)) + sum(sent(part.backward))

    total = sum(of(profile.layers[kind]) for kind in stage.layers)
    return total + stage.has_embedding * of(profile.embedding) + stage.has_head * of(profile.head)


def step_time(
    job: TrainingJob,
    layout: Layout,
    mesh: Mesh,
    memories: Sequence[RankMemory],
    sent: Communication,
    pipeline: tuple[float, float],
    model_flops: float,
) -> StepTime:
    """Return the time of a step.

    Args:
        job: the job to plan.
        layout: the layout to time.
        mesh: the layout's mesh.
        memories: the memory of each pipeline rank.
        sent: bytes sent, by axis.
        pipeline: the result of `pipeline_seconds`.
        model_flops: FLOPs of forward and backward of one sequence, over all ranks that share it.
    """
    seconds, bubble = pipeline
    data_parallel = _data_parallel_seconds(job.device, layout, mesh, sent, seconds * (1 - bubble))
    update = max(_update_bytes(layout, memory) for memory in memories) / (
        job.device.memory_bandwidth * SUSTAINED_BANDWIDTH
    )
    total = seconds + data_parallel + update
    possible = job.device.flops_of(job.dtype_name) * job.num_devices * total
    return StepTime(seconds, data_parallel, update, bubble, job.global_batch_size * model_flops / possible)


def _data_parallel_seconds(device: Device, layout: Layout, mesh: Mesh, sent: Communication, computing: float) -> float:
    """Return the seconds of the messages among replicas, where those that share states are neighbors.

    Gathers of the next unit count as far as they take longer than `computing`, the seconds in which a rank computes.
    """
    replicas = mesh.group_of(0, "dp", "cp")
    parts, _ = layout.sharing_ranks if layout.degrees.zero_stage else (len(replicas), 0)
    link = _bandwidth_among(device, mesh, replicas[:parts])
    seconds = (sent.dp_messages - sent.ahead_messages) * LATENCY + (sent.dp - sent.ahead) / link
    ahead = sent.ahead_messages * LATENCY + sent.ahead / link
    if sent.mirrors:
        seconds += LATENCY + sent.mirrors / _bandwidth_among(device, mesh, replicas[::parts])
    if sent.near:
        ahead += sent.near / _bandwidth_among(device, mesh, replicas[: layout.reshard_after_forward])
    return seconds + max(0.0, ahead - computing)


def _update_bytes(layout: Layout, memory: RankMemory) -> float:
    """Return the bytes that AdamW moves: gradients once; both moments and the weights, read and written."""
    weights = memory.optimizer_state / MOMENTS
    gradients = weights if layout.degrees.zero_stage else memory.gradients
    return gradients + 2 * memory.optimizer_state + 2 * weights
