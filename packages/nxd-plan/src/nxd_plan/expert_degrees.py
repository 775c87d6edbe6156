"""The degrees at which the experts of a model can be distributed over ranks, and the refusal of others."""

import math

from nxd_state import ParallelDegrees
from nxd_state.mesh import divisors

from nxd_plan.layout import Degrees, Job


def expert_degrees(job: Job, fixed: Degrees, tensor_parallel_size: int) -> list[ParallelDegrees]:
    """The degrees to try: those that divide the experts and the ranks; of whole experts, and split as other layers are.

    Raises:
        ValueError: experts are to be split, and cannot be.
    """
    size, of_expert = fixed.expert_parallel_size, fixed.expert_tensor_parallel_size
    experts = job.model.num_experts
    if (size is not None and size > 1) or (of_expert is not None and of_expert != tensor_parallel_size):
        check_experts(job, size or 1)
    if of_expert not in (None, 1, tensor_parallel_size):
        raise ValueError(
            f"expert_tensor_parallel_size={of_expert} must be 1 or tensor_parallel_size={tensor_parallel_size}"
        )
    if not experts:
        return [ParallelDegrees(tensor_parallel_size)]
    sizes = divisors(math.gcd(experts, job.num_devices)) if size is None else [size]
    of_experts = sorted({1, tensor_parallel_size}, reverse=True) if of_expert is None else [of_expert]
    # Tensor-parallel ranks with the same whole experts hold more than those that split them: only where asked for.
    return [
        ParallelDegrees(tensor_parallel_size, ep=ep, etp=etp)
        for ep in sizes
        for etp in of_experts
        if etp == tensor_parallel_size or of_expert is not None or ep >= tensor_parallel_size
    ]


def check_experts(job: Job, expert_parallel_size: int) -> None:
    """Refuse to split the experts of layers where that cannot be.

    Raises:
        ValueError: the model has none, or the ranks do not divide them, or the device is none for that.
    """
    experts = job.model.num_experts
    if not experts:
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} is for models with experts that have an expert-parallel "
            "plan, and this one has none; leave it out"
        )
    if experts % expert_parallel_size:
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} does not divide the {experts} experts of a layer; use one "
            f"of {', '.join(map(str, divisors(experts)))}"
        )
