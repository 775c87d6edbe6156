"""The degrees at which a model's experts can be distributed over ranks; other degrees are rejected."""

import math

from nxd_state import ParallelDegrees
from nxd_state.mesh import divisors

from nxd_plan.layout import Degrees, Job


def expert_degrees(job: Job, fixed: Degrees, tensor_parallel_size: int) -> list[ParallelDegrees]:
    """The degrees to try: those that divide experts and ranks, with whole experts or experts split as other layers are.

    Raises:
        ValueError: `fixed` splits experts that cannot be split so.
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
    # Tensor-parallel ranks that hold the same whole experts need more memory than if they split them: only on request.
    return [
        ParallelDegrees(tensor_parallel_size, ep=ep, etp=etp)
        for ep in sizes
        for etp in of_experts
        if etp == tensor_parallel_size or of_expert is not None or ep >= tensor_parallel_size
    ]


def check_experts(job: Job, expert_parallel_size: int) -> None:
    """Reject an expert-parallel size that the model does not support.

    Raises:
        ValueError: the model has no experts with an expert-parallel plan, or the size does not divide their number.
    """
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
