"""The stages of ZeRO that a plan tries for a layout, over all replicas and over those of one host."""

from nxd_optim import expert_shard_group_size
from nxd_state import ParallelDegrees
from nxd_state.mesh import divisors

from nxd_plan.layout import ON_XLA, FixedDegrees, TrainingJob

HALF_PRECISION_BYTES = 2
Choice = tuple[int, int]  # stage, and size of the groups, 0 for all replicas


def zero_choices(
    job: TrainingJob, fixed: FixedDegrees, degrees: ParallelDegrees, num_microbatches: int
) -> list[list[Choice]]:
    """Return lists of choices to try, each in the order in which they need less memory and send more.

    Of each list, the first that fits is planned. Stage 2 differs from stage 1 with several microbatches only.

    Args:
        job: the job to plan.
        fixed: the degrees fixed in advance.
        degrees: the other degrees of the layout.
        num_microbatches: microbatches per replica and step.
    """
    if fixed.zero_stage == 0:
        return [[(0, 0)]]
    group, replicas = fixed.shard_group_size, degrees.replicas
    needs_masters = job.dtype.itemsize <= HALF_PRECISION_BYTES
    if fixed.zero_stage is not None:
        stages = [fixed.zero_stage]
    elif fixed.reshard_after_forward is not None:
        stages = [3]
    elif replicas == 1 and group is None:
        return [[(1, 0)]] if needs_masters else [[(0, 0)]]
    elif job.device.name in ON_XLA:
        stages = [1]
    else:
        stages = [1, 2, 3] if num_microbatches > 1 else [1, 3]
    if group is not None:
        return [[(stage, 0 if group == replicas else group) for stage in stages]]
    lists = [[(stage, 0) for stage in stages]]
    if fixed.zero_stage is None and fixed.reshard_after_forward is None and not needs_masters:
        lists.insert(0, [(0, 0)])
    of_host = replicas_of_host(job, degrees)
    if of_host is not None:
        lists.append([(stage, of_host) for stage in stages])
    return lists


def replicas_of_host(job: TrainingJob, degrees: ParallelDegrees) -> int | None:
    """Return the number of neighboring replicas on each host, if they can share states and other hosts have more."""
    hosts, replicas = job.device.devices_per_host, degrees.replicas
    if degrees.world_size <= hosts or job.device.name in ON_XLA:
        return None
    found = [size for size in divisors(replicas) if hosts % (size * degrees.tp) == 0]
    size = max(found, default=1)
    if not 1 < size < replicas or (degrees.splits_experts and experts_sharing(degrees, size) is None):
        return None
    return size


def experts_sharing(degrees: ParallelDegrees, shard_group_size: int) -> int | None:
    """Return the number of ranks that share an expert's states; None if it does not divide those that have it."""
    sharing = expert_shard_group_size(degrees.replicas, degrees.expert_replicas, shard_group_size)
    return None if degrees.expert_replicas % sharing else sharing


def zero_mistake(job: TrainingJob, fixed: FixedDegrees, degrees: ParallelDegrees) -> str | None:
    """Return why what is fixed of sharding cannot be at these degrees; None if it can."""
    group, reshard = fixed.shard_group_size, fixed.reshard_after_forward
    if job.device.name in ON_XLA and (fixed.zero_stage == 3 or reshard is not None):
        return f"{job.device.name} cannot shard parameters (zero_stage=3): on XLA tensors share no memory"
    if group is not None and degrees.replicas % group:
        return f"shard_group_size={group} does not divide the {degrees.replicas} replicas"
    sharing = [group or degrees.replicas]
    if degrees.splits_experts:
        of_experts = experts_sharing(degrees, sharing[0])
        if of_experts is None:
            return (
                f"shard_group_size={group} leaves ranks to share an expert's states that do not divide the "
                f"{degrees.expert_replicas} that have it"
            )
        sharing.append(of_experts)
    if not isinstance(reshard, bool | None) and any(it % reshard for it in sharing):
        return f"reshard_after_forward={reshard} does not divide the {min(sharing)} ranks that share parameters"
    return None
