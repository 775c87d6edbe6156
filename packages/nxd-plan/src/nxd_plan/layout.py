"""The job to plan, its possible layouts over ranks, and the layouts and degrees that simple arithmetic rules out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from nxd_layers.context import SequenceCut
from nxd_optim import expert_shard_group_size
from nxd_pipeline import TRAINING_SCHEDULES
from nxd_state import ParallelDegrees
from nxd_state.degrees import SIZES, expert_tensor_parallel_mistake
from nxd_state.mesh import divisors

from nxd_plan.devices import Device
from nxd_plan.model import PlannedModel

MICROBATCH_SIZES = (1, 2, 4, 8)
CHECKPOINTING = ("none", "full")
ON_XLA = ("trn1", "trn2", "inf2")  # XLA has one graph for all ranks, so ranks cannot compute different blocks or tokens
SHORTEST_CONTEXT = 8192  # positions per rank below which context parallelism is tried only on request


@dataclass(frozen=True)
class TrainingJob:
    """A training job; only its layout is still to be chosen.

    Attributes:
        model: the model to train.
        device: the device that each rank runs on.
        num_devices: number of devices, which is the number of ranks.
        sequence_length: tokens per sequence.
        global_batch_size: sequences per step, over all ranks.
        dtype: dtype of the weights.
        schedule: the pipeline schedule, by its name in nxd-pipeline.

    Raises:
        ValueError: a number is not positive, the sequence is longer than the model supports, or a name is unknown.
    """

    model: PlannedModel
    device: Device
    num_devices: int
    sequence_length: int = 4096
    global_batch_size: int = 1024
    dtype: torch.dtype = torch.bfloat16
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name in ("num_devices", "sequence_length", "global_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        longest = self.model.max_positions
        if longest is not None and self.sequence_length > longest:
            raise ValueError(
                f"sequence_length={self.sequence_length} is more than max_position_embeddings={longest}; lower it"
            )
        if self.schedule not in TRAINING_SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} cannot train; use one of {', '.join(TRAINING_SCHEDULES)}")
        self.device.flops_of(self.dtype_name)

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class FixedDegrees:
    """The degrees fixed in advance; None leaves a degree open.

    Attributes:
        tensor_parallel_size: ranks that split each layer.
        pipeline_parallel_size: ranks that the layers are distributed over.
        sequence_parallel: whether ranks that split layers also split activations along the sequence.
        zero_stage: what is sharded over the replicas, see `ParallelDegrees`.
        microbatch_size: sequences per microbatch.
        checkpointing: "none" or "full".
        context_parallel_size: ranks that each sequence is split over.
        expert_parallel_size: ranks that the experts of a layer are distributed over.
        expert_tensor_parallel_size: ranks that split each expert: `tensor_parallel_size`, or 1.
        num_microbatches: microbatches per replica and step.
        shard_group_size: number of neighboring replicas that share what `zero_stage` shards.
        reshard_after_forward: with stage 3, see `nxd_optim.fully_shard`; None for true, since stage 2 needs no more
            memory than false, and sends as much.

    Raises:
        ValueError: a size is not positive, the kind of checkpointing is unknown, sequence parallelism is requested
            without tensor parallelism, experts are split over another number of ranks than the layers, or a choice
            about sharding has no effect at the stage.
    """

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    zero_stage: int | None = None
    microbatch_size: int | None = None
    checkpointing: str | None = None
    context_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    num_microbatches: int | None = None
    shard_group_size: int | None = None
    reshard_after_forward: bool | int | None = None

    def __post_init__(self) -> None:
        for name in (it.name for it in fields(self) if it.name.endswith(("_size", "_microbatches"))):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be 1 or more; leave it out to let the planner choose")
        if self.checkpointing not in (None, *CHECKPOINTING):
            raise ValueError(f"unknown checkpointing={self.checkpointing!r}; use {' or '.join(CHECKPOINTING)}")
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "sequence_parallel splits activations over tensor-parallel ranks, but tensor_parallel_size=1; use "
                "tensor_parallel_size=2 or more, or leave one of them out"
            )
        of_experts, of_layers = self.expert_tensor_parallel_size, self.tensor_parallel_size
        if of_layers is not None and (mistake := expert_tensor_parallel_mistake(of_experts, of_layers)):
            raise ValueError(mistake)
        if self.shard_group_size is not None and self.zero_stage == 0:
            raise ValueError(
                f"shard_group_size={self.shard_group_size} shares what ZeRO shards, but zero_stage=0; use zero_stage=1 "
                "or more, or leave one of them out"
            )
        reshard = self.reshard_after_forward
        if reshard is not None and self.zero_stage not in (None, 3):
            raise ValueError(
                f"reshard_after_forward={reshard} is of sharded parameters, but zero_stage={self.zero_stage}; use "
                "zero_stage=3, or leave one of them out"
            )
        if reshard is not None and reshard is not False and reshard < 1:
            raise ValueError(f"reshard_after_forward={reshard} must be true, false, or a number of ranks")


@dataclass(frozen=True, order=True)
class Layout:
    """One way to train the model on the ranks.

    Attributes:
        degrees: the degrees of all axes, including the replicas.
        microbatch_size: sequences per microbatch.
        num_microbatches: microbatches per replica and step.
        checkpointing: "none" or "full".
        reshard_after_forward: with ZeRO-3, see `nxd_optim.fully_shard`.
    """

    degrees: ParallelDegrees
    microbatch_size: int
    num_microbatches: int
    checkpointing: str
    reshard_after_forward: bool | int = True

    @property
    def sharing_ranks(self) -> tuple[int, int]:
        """Number of ranks that share the states of dense layers, and of experts; 1 and 1 without ZeRO."""
        degrees = self.degrees
        if not degrees.zero_stage:
            return 1, 1
        dense = degrees.shard_group_size or degrees.replicas
        return dense, expert_shard_group_size(degrees.replicas, degrees.expert_replicas, dense)

    def as_dict(self) -> dict[str, int | bool | str | None]:
        """Return the layout as a dict, by the names that recipes and configs use."""
        degrees = self.degrees
        return {
            **{name: getattr(degrees, axis) for axis, name in SIZES.items()},
            "expert_tensor_parallel_size": degrees.etp,
            "data_parallel_size": degrees.dp,
            "sequence_parallel": degrees.sequence_parallel,
            "zero_stage": degrees.zero_stage,
            "shard_group_size": degrees.shard_group_size or None,
            "reshard_after_forward": self.reshard_after_forward if degrees.zero_stage == 3 else None,
            "microbatch_size": self.microbatch_size,
            "num_microbatches": self.num_microbatches,
            "checkpointing": self.checkpointing,
        }

    def __str__(self) -> str:
        """Return a line such as "TP 8 + SP x PP 2 x DP 4, ZeRO-1, 16 microbatches of 1, checkpointing full"."""
        return (
            f"{self.degrees.describe()}, {self.num_microbatches} microbatches of {self.microbatch_size}, checkpointing "
            f"{self.checkpointing}"
        )


@dataclass(frozen=True)
class Rejected:
    """A layout, or a group of layouts, that is not possible, with the reason."""

    what: str
    reason: str


def tensor_parallel_sizes(job: TrainingJob, fixed: FixedDegrees) -> list[int]:
    """Return the degrees to try: divisors of the world size, within one host: layers exchange activations often."""
    if fixed.tensor_parallel_size is not None:
        return [fixed.tensor_parallel_size]
    return [size for size in divisors(job.num_devices) if size <= job.device.devices_per_host]


def context_parallel_sizes(job: TrainingJob, fixed: FixedDegrees, degrees: ParallelDegrees) -> list[int]:
    """Return the degrees to try: divisors of the remaining ranks that leave each rank enough of a sequence."""
    if fixed.context_parallel_size is not None:
        return [fixed.context_parallel_size]
    sizes = divisors(max(1, job.num_devices // degrees.tp))
    return [size for size in sizes if size == 1 or job.sequence_length // size >= SHORTEST_CONTEXT]


def pipeline_parallel_sizes(job: TrainingJob, fixed: FixedDegrees, degrees: ParallelDegrees) -> list[int]:
    """Return the degrees to try: divisors of the remaining ranks, up to the number of layers."""
    if fixed.pipeline_parallel_size is not None:
        return [fixed.pipeline_parallel_size]
    sizes = divisors(max(1, job.num_devices // (degrees.tp * degrees.cp)))
    of_experts = degrees.ep * degrees.etp
    if fixed.expert_parallel_size is None:
        sizes = [size for size in sizes if job.num_devices // size % of_experts == 0]
    return [size for size in sizes if size <= len(job.model.layer_kinds)]


def local_length(sequence_length: int, degrees: ParallelDegrees) -> int:
    """Return positions per context-parallel rank, padded so that tensor-parallel ranks can split them evenly."""
    if degrees.cp == 1:
        return sequence_length
    return SequenceCut(sequence_length, degrees.cp, multiple=degrees.tp).local_length


def sequence_parallel_choices(fixed: FixedDegrees, tensor_parallel_size: int) -> list[bool]:
    """Return the choices of sequence parallelism to try."""
    if tensor_parallel_size == 1:
        return [False]
    return [False, True] if fixed.sequence_parallel is None else [fixed.sequence_parallel]


def layouts_on(
    job: TrainingJob, fixed: FixedDegrees, degrees: ParallelDegrees, choices: Sequence[bool]
) -> Iterator[Layout | Rejected]:
    """Yield all layouts with these degrees, and the rejected ones with their reasons.

    They are without ZeRO, which `zero_choices` adds. Microbatch sizes ascend where all else is the same.
    """
    what = degrees.describe()
    if degrees.cp > 1 and degrees.pp > 1 and job.device.name in ON_XLA:
        yield Rejected(what, f"{job.device.name} does not combine context and pipeline parallelism; use one of them")
        return
    if job.global_batch_size % degrees.dp:
        below = job.global_batch_size // degrees.dp * degrees.dp
        use = f"{below} or {below + degrees.dp}" if below else str(degrees.dp)
        yield Rejected(
            what, f"global_batch_size={job.global_batch_size} is not a multiple of {degrees.dp} replicas; use {use}"
        )
        return
    per_replica = job.global_batch_size // degrees.dp
    fitting = _microbatch_sizes(fixed, per_replica)
    if not fitting:
        yield Rejected(what, _microbatch_mistake(fixed, per_replica))
    for sequence_parallel in choices:
        if sequence_parallel and local_length(job.sequence_length, degrees) % degrees.tp:
            yield Rejected(
                f"{what} + SP",
                f"tensor_parallel_size={degrees.tp} does not divide sequence_length={job.sequence_length}",
            )
            continue
        for checkpointing in CHECKPOINTING if fixed.checkpointing is None else (fixed.checkpointing,):
            for microbatch_size in fitting:
                yield Layout(
                    replace(degrees, sequence_parallel=sequence_parallel),
                    microbatch_size,
                    per_replica // microbatch_size,
                    checkpointing,
                    True if fixed.reshard_after_forward is None else fixed.reshard_after_forward,
                )


def _microbatch_sizes(fixed: FixedDegrees, per_replica: int) -> list[int]:
    """Return the sizes to try, ascending: those that divide a replica's sequences."""
    sizes: Sequence[int] = MICROBATCH_SIZES if fixed.microbatch_size is None else (fixed.microbatch_size,)
    if fixed.num_microbatches is not None:
        wanted, rest = divmod(per_replica, fixed.num_microbatches)
        sizes = (wanted,) if not rest and fixed.microbatch_size in (None, wanted) else ()
    return [size for size in sizes if per_replica % size == 0]


def _microbatch_mistake(fixed: FixedDegrees, per_replica: int) -> str:
    if fixed.microbatch_size is not None and fixed.num_microbatches is not None:
        given = f"{fixed.num_microbatches} microbatches of {fixed.microbatch_size} sequences are not"
    else:
        name = "num_microbatches" if fixed.microbatch_size is None else "microbatch_size"
        given = f"{name}={getattr(fixed, name)} does not divide"
    return f"{given} the {per_replica} sequences of a replica"


def expert_degrees(job: TrainingJob, fixed: FixedDegrees, tensor_parallel_size: int) -> list[ParallelDegrees]:
    """Return the degrees to try: divisors of experts and ranks, with experts whole or split like other layers."""
    size, of_expert = fixed.expert_parallel_size, fixed.expert_tensor_parallel_size
    experts = job.model.num_experts
    if (size is not None and size > 1) or (of_expert is not None and of_expert != tensor_parallel_size):
        check_expert_size(job, size or 1)
    if mistake := expert_tensor_parallel_mistake(of_expert, tensor_parallel_size):
        raise ValueError(mistake)
    if not experts:
        return [ParallelDegrees(tensor_parallel_size)]
    sizes = divisors(math.gcd(experts, job.num_devices)) if size is None else [size]
    of_experts = sorted({1, tensor_parallel_size}, reverse=True) if of_expert is None else [of_expert]
    # Tensor-parallel ranks that hold the same whole experts need more memory than if they split them: only on request.
    return [
        ParallelDegrees(tensor_parallel_size, ep=ep, etp=etp)
        for ep in sizes
        for etp in of_experts
        if etp == tensor_parallel_size or of_expert is not None or ep >= tensor_parallel_size
    ]


def check_expert_size(job: TrainingJob, expert_parallel_size: int) -> None:
    """Reject an expert-parallel size that the model does not support."""
    experts = job.model.num_experts
    if not experts:
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} needs a model with experts and an expert-parallel "
            "plan, which this one does not have; leave it out"
        )
    if experts % expert_parallel_size:
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} does not divide the {experts} experts of a layer; use one "
            f"of {', '.join(map(str, divisors(experts)))}"
        )
